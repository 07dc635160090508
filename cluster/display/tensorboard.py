"""TensorBoard over the event files that have come home, on this computer only."""

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

BIND_ADDRESS = "127.0.0.1"
TENSORBOARD_START_TIMEOUT_SECONDS = 60.0


def tensorboard_command(log_folder: Path, port: int) -> list[str]:
    """Return TensorBoard's command line."""
    words = ["--logdir", str(log_folder), "--host", BIND_ADDRESS, "--port", str(port), "--reload_interval", "5"]
    return [sys.executable, "-P", "-m", "tensorboard.main", *words]


def check_port_is_free(port: int) -> None:
    """Raise `ClusterError` when something listens on the port already."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((BIND_ADDRESS, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} is taken; choose another: --port {port + 1}, or --port 0 for a free one"
            ) from error


def serve(job: Job, port: int) -> int:
    """Run TensorBoard until Ctrl-C or its end, keeping the job's events coming. Returns an exit code."""
    folder = job.path / "events"
    folder.mkdir(exist_ok=True)
    return _run_server(
        folder, port, job.path / ".tensorboard.log", f"{job.name}, until Ctrl-C", lambda: _refresh_jobs([job])
    )


def serve_all(port: int) -> int:
    """The same for all jobs of the runs folder side by side, as runs job-1, job-2, ..., also those that come later.

    Raises `NoSuchJob` when there is none yet.
    """
    runs = store.find().path.parent
    board = runs / ".board"
    board.mkdir(exist_ok=True)

    def look() -> None:
        found = store.all_jobs()
        _refresh_jobs(found)
        link_event_folders(board, found)

    link_event_folders(board, store.all_jobs())
    return _run_server(board, port, runs / ".tensorboard.log", f"all jobs of {runs}, until Ctrl-C", look)


def link_event_folders(links_folder: Path, job_list: Sequence[Job]) -> None:
    """Make the folder have a link to the events of each of these jobs, by its name, and no other."""
    for path in links_folder.iterdir():
        if not path.exists() or path.name not in {job.name for job in job_list}:
            path.unlink(missing_ok=True)
    for job in job_list:
        if (job.path / "events").is_dir():
            with contextlib.suppress(FileExistsError):
                (links_folder / job.name).symlink_to(Path("..") / job.name / "events")


def _refresh_jobs(job_list: Sequence[Job]) -> None:
    for job in job_list:
        with contextlib.suppress(ClusterError):
            job.refresh()


def _run_server(log_folder: Path, port: int, log_path: Path, description: str, refresh: Callable[[], None]) -> int:
    port = port or process.free_port()
    check_port_is_free(port)
    server = process.start_process(tensorboard_command(log_folder, port), log_path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server.pid, port, log_path)
        print(f"http://{BIND_ADDRESS}:{port}/  {description}", flush=True)
        while server.poll() is None:
            refresh()
            time.sleep(1)
        return int(server.returncode)
    except KeyboardInterrupt:
        print("TensorBoard stopped; the job goes on", file=sys.stderr)
        return 0
    finally:
        process.kill_process_groups([server])


def _wait_until_up(pid: int, port: int, log_path: Path) -> None:
    deadline = time.monotonic() + TENSORBOARD_START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        with contextlib.suppress(OSError), urlopen(f"http://{BIND_ADDRESS}:{port}/", timeout=1):
            return
        time.sleep(0.1)
    lines = log_path.read_text(errors="replace").strip().splitlines() if log_path.exists() else []
    raise ClusterError(f"TensorBoard did not start: {lines[-1] if lines else 'no word from it'} (see {log_path})")
