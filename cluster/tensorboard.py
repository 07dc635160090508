"""TensorBoard over the event files that have come home, on this computer only."""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from train import spawn

from .errors import ClusterError
from .job import Job

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
    port = port or spawn.free_port()
    check_port(port)
    folder = job.run / "events"
    folder.mkdir(exist_ok=True)
    log = job.run / ".tensorboard.log"
    server = spawn.start(command(folder, port), log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server.pid, port, log)
        print(f"http://{HOST}:{port}/  {job.name}, until Ctrl-C", flush=True)
        while server.poll() is None:
            with contextlib.suppress(ClusterError):
                job.refresh()
            time.sleep(1)
        return int(server.returncode)
    except KeyboardInterrupt:
        print("TensorBoard stopped; the job goes on", file=sys.stderr)
        return 0
    finally:
        spawn.kill([server])


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
