"""Runs TensorBoard over the event files in local run folders, reachable from this computer only."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

from cluster.errors import ClusterError
from cluster.jobs import store
from cluster.jobs.job import Job
from train.tools import process
from train.tools.agent_protocol import EVENTS_FOLDER

BIND_ADDRESS = "127.0.0.1"
TENSORBOARD_START_TIMEOUT_SECONDS = 60.0
REFRESH_SECONDS = 1.0  # between two copies of new event files from the machines


def tensorboard_command(log_folder: Path, port: int) -> list[str]:
    """Return TensorBoard's command line."""
    arguments = ["--logdir", str(log_folder), "--host", BIND_ADDRESS, "--port", str(port), "--reload_interval", "5"]
    return [sys.executable, "-P", "-m", "tensorboard.main", *arguments]


def check_port_is_free(port: int) -> None:
    """Raise `ClusterError` when another process listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((BIND_ADDRESS, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} is taken; choose another: --port {port + 1}, or --port 0 for a free one"
            ) from error


def serve(job: Job, port: int) -> int:
    """Serve one job's curves until Ctrl-C, and copy its new events while it runs. Returns an exit code."""
    events_folder = job.path / EVENTS_FOLDER
    events_folder.mkdir(exist_ok=True)
    return _run_server(
        events_folder, port, job.path / ".tensorboard.log", f"{job.name}, until Ctrl-C", lambda: _refresh_jobs([job])
    )


def serve_all(port: int) -> int:
    """Serve the curves of all jobs of the runs folder side by side, also of jobs that start later.

    Returns an exit code. Raises `NoSuchJob` when there is no job yet.
    """
    runs_folder = store.find().path.parent
    links_folder = runs_folder / ".board"
    links_folder.mkdir(exist_ok=True)

    def refresh() -> None:
        jobs = store.all_jobs()
        _refresh_jobs(jobs)
        link_event_folders(links_folder, jobs)

    link_event_folders(links_folder, store.all_jobs())
    return _run_server(
        links_folder, port, runs_folder / ".tensorboard.log", f"all jobs of {runs_folder}, until Ctrl-C", refresh
    )


def link_event_folders(links_folder: Path, job_list: Sequence[Job]) -> None:
    """Make `links_folder` contain exactly one link per job, from the job's name to its event folder."""
    for path in links_folder.iterdir():
        if not path.exists() or path.name not in {job.name for job in job_list}:
            path.unlink(missing_ok=True)
    for job in job_list:
        if (job.path / EVENTS_FOLDER).is_dir():
            with contextlib.suppress(FileExistsError):
                (links_folder / job.name).symlink_to(Path("..") / job.name / EVENTS_FOLDER)


def _refresh_jobs(job_list: Sequence[Job]) -> None:
    for job in job_list:
        with contextlib.suppress(ClusterError):
            job.refresh()


def _run_server(log_folder: Path, port: int, log_path: Path, description: str, refresh: Callable[[], None]) -> int:
    """Run TensorBoard on `port` (0: a free one) until it ends or the user interrupts it. Returns an exit code."""
    port = port or process.free_port()
    check_port_is_free(port)
    server = process.start_process(tensorboard_command(log_folder, port), log_path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server.pid, port, log_path)
        print(f"http://{BIND_ADDRESS}:{port}/  {description}", flush=True)
        while server.poll() is None:
            refresh()
            time.sleep(REFRESH_SECONDS)
        return int(server.returncode)
    except KeyboardInterrupt:
        print("TensorBoard stopped; the job goes on", file=sys.stderr)
        return 0
    finally:
        process.kill_process_groups([server])


def _wait_until_up(pid: int, port: int, log_path: Path) -> None:
    """Wait until the server answers. Raises `ClusterError` with its last log line when it ended or never answers."""
    deadline = time.monotonic() + TENSORBOARD_START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        with contextlib.suppress(OSError), urlopen(f"http://{BIND_ADDRESS}:{port}/", timeout=1):
            return
        time.sleep(0.1)
    log_lines = log_path.read_text(errors="replace").strip().splitlines() if log_path.exists() else []
    raise ClusterError(f"TensorBoard did not start: {log_lines[-1] if log_lines else 'no log output'} (see {log_path})")
