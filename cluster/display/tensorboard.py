"""Runs TensorBoard over the event files in local run folders, reachable from this computer only."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from cluster.errors import ClusterError
from cluster.jobs import store
from cluster.jobs.job import Job
from train.tools import process
from train.tools.agent_protocol import EVENTS_FOLDER

BIND_ADDRESS = "127.0.0.1"
TENSORBOARD_START_TIMEOUT_SECONDS = 60.0
SETTINGS_SUFFIX = ".settings"  # of the event file with the arguments of a command
REFRESH_SECONDS = 1.0  # between two copies of new event files from the machines


def serve(find_jobs: Callable[[], Sequence[Job]], port: int, title: str) -> int:
    """Serve the curves of the jobs of `find_jobs`, with new events, until Ctrl-C. Returns an exit code."""
    with tempfile.TemporaryDirectory(prefix="imgnet-tensorboard-") as folder:

        def refresh() -> None:
            jobs = find_jobs()
            for job in jobs:
                with contextlib.suppress(ClusterError):
                    job.refresh()
            link_event_folders(Path(folder), jobs)

        link_event_folders(Path(folder), find_jobs())
        log_path = store.runs_folder() / ".tensorboard.log"
        exit_code = _run_server(Path(folder), port, log_path, f"{title}, until Ctrl-C", refresh)
        if exit_code == 0:
            unfinished = [job.name for job in find_jobs() if not job.has_ended]
            goes_on = f"; still at work: {', '.join(unfinished)}" if unfinished else ""
            print(f"TensorBoard stopped{goes_on}", file=sys.stderr)
        return exit_code


def link_event_folders(links_folder: Path, job_list: Sequence[Job]) -> None:
    """Make `links_folder` contain exactly one link per job with events, from the job's title to its event folder."""
    titles = {_title(job): job for job in job_list}
    for path in links_folder.iterdir():
        if not path.exists() or path.name not in titles:
            path.unlink(missing_ok=True)
    for title, job in titles.items():
        if (job.path / EVENTS_FOLDER).is_dir():
            with contextlib.suppress(FileExistsError):
                (links_folder / title).symlink_to(job.path / EVENTS_FOLDER)
            with contextlib.suppress(ClusterError, OSError):  # a damaged job and a full disk hide no curves
                write_settings(job)


def _title(job: Job) -> str:
    with contextlib.suppress(ClusterError):  # a damaged job
        return replace(job.spec, name=job.name).title  # the name of a copied run folder counts
    return job.name


def write_settings(job: Job) -> None:
    """Write a command's arguments beside its events, once, for HParams. Raises `OSError`, `ClusterError`."""
    folder = job.path / EVENTS_FOLDER
    if job.spec.own_command is None or any(folder.glob(f"*{SETTINGS_SUFFIX}")):
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=SETTINGS_SUFFIX)
    try:
        summary = hparams_pb(job.hparams, trial_id=_title(job), start_time_secs=job.spec.created)
        writer.add_event(Event(wall_time=job.spec.created, summary=summary))
    finally:
        writer.close()


def _check_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((BIND_ADDRESS, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} is taken; choose another: --port {port + 1}, or --port 0 for a free one"
            ) from error


def _run_server(log_folder: Path, port: int, log_path: Path, description: str, refresh: Callable[[], None]) -> int:
    """Run TensorBoard on `port` (0: a free one) until it ends or the user interrupts it. Returns an exit code."""
    port = port or process.free_port()
    _check_port_is_free(port)
    arguments = ["--logdir", str(log_folder), "--host", BIND_ADDRESS, "--port", str(port), "--reload_interval", "5"]
    server = process.start_process([sys.executable, "-P", "-m", "tensorboard.main", *arguments], log_path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server.pid, port, log_path)
        print(f"http://{BIND_ADDRESS}:{port}/  {description}", flush=True)
        while server.poll() is None:
            refresh()
            time.sleep(REFRESH_SECONDS)
        return int(server.returncode)
    except KeyboardInterrupt:
        return 0
    finally:
        process.kill_process_groups([server])


def _wait_until_up(pid: int, port: int, log_path: Path) -> None:
    """Wait until the server answers. Raises `ClusterError` with its last log line when it ended or never answers."""
    deadline = time.monotonic() + TENSORBOARD_START_TIMEOUT_SECONDS
    opener = build_opener(ProxyHandler({}))  # http_proxy does not know this computer
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        with contextlib.suppress(OSError), opener.open(f"http://{BIND_ADDRESS}:{port}/", timeout=1):
            return
        time.sleep(0.1)
    log_lines = log_path.read_text(errors="replace").strip().splitlines() if log_path.exists() else []
    raise ClusterError(f"TensorBoard did not start: {log_lines[-1] if log_lines else 'no log output'} (see {log_path})")
