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

HOST = "127.0.0.1"
START_SECONDS = 60.0


def command(folder: Path, port: int) -> list[str]:
    """Return TensorBoard's command line."""
    words = ["--logdir", str(folder), "--host", HOST, "--port", str(port), "--reload_interval", "5"]
    return [sys.executable, "-P", "-m", "tensorboard.main", *words]


def check_port(port: int) -> None:
    """Raise `ClusterError` when something listens on the port already."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} is taken; choose another: --port {port + 1}, or --port 0 for a free one"
            ) from error


def serve(job: Job, port: int) -> int:
    """Run TensorBoard until Ctrl-C or its end, keeping the job's events coming. Returns an exit code."""
    folder = job.run / "events"
    folder.mkdir(exist_ok=True)
    return _serve(folder, port, job.run / ".tensorboard.log", f"{job.name}, until Ctrl-C", lambda: _refresh([job]))


def serve_all(port: int) -> int:
    """The same for all jobs of the runs folder side by side, as runs job-1, job-2, ..., also those that come later.

    Raises `NoSuchJob` when there is none yet.
    """
    runs = store.find().run.parent
    board = runs / ".board"
    board.mkdir(exist_ok=True)

    def look() -> None:
        found = store.all_jobs()
        _refresh(found)
        link(board, found)

    link(board, store.all_jobs())
    return _serve(board, port, runs / ".tensorboard.log", f"all jobs of {runs}, until Ctrl-C", look)


def link(board: Path, found: Sequence[Job]) -> None:
    """Make the folder have a link to the events of each of these jobs, by its name, and no other."""
    for path in board.iterdir():
        if not path.exists() or path.name not in {job.name for job in found}:
            path.unlink(missing_ok=True)
    for job in found:
        if (job.run / "events").is_dir():
            with contextlib.suppress(FileExistsError):
                (board / job.name).symlink_to(Path("..") / job.name / "events")


def _refresh(found: Sequence[Job]) -> None:
    for job in found:
        with contextlib.suppress(ClusterError):
            job.refresh()


def _serve(folder: Path, port: int, log: Path, what: str, look: Callable[[], None]) -> int:
    port = port or process.free_port()
    check_port(port)
    server = process.start(command(folder, port), log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server.pid, port, log)
        print(f"http://{HOST}:{port}/  {what}", flush=True)
        while server.poll() is None:
            look()
            time.sleep(1)
        return int(server.returncode)
    except KeyboardInterrupt:
        print("TensorBoard stopped; the job goes on", file=sys.stderr)
        return 0
    finally:
        process.kill([server])


def _wait_until_up(pid: int, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        with contextlib.suppress(OSError), urlopen(f"http://{HOST}:{port}/", timeout=1):
            return
        time.sleep(0.1)
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    raise ClusterError(f"TensorBoard did not start: {lines[-1] if lines else 'no word from it'} (see {log})")
