"""Runs commands of imgnet-cluster in forks of a process that has imported its modules, which saves the start of Python.

A command gets what a shell would give it: arguments, folder, environment, streams, and a process of its own, whose
exit code is reported. Tests of the start itself, of signals and of unusual streams run the installed command.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

MAX_REQUEST_BYTES = 1 << 20
# Variables that Python itself obeys when it starts. A command whose own differ from ours needs a Python of its own.
PYTHON_VARIABLES = ("PYTHON", "LC_", "LANG", "LD_")
# If a command has this variable, a stack's new resources settle in this time: no other process creates them meanwhile.
SETTLE_VARIABLE = "TEST_SETTLE_SECONDS"
# If a command has this variable, its `stop` waits so long for the job's end, then terminates the machines itself.
STOP_VARIABLE = "TEST_STOP_SECONDS"
TESTS = Path(__file__).resolve().parents[1]
QUICK_START = str(TESTS / "support/quick_start")  # in PYTHONPATH it changes trainers only
ENVIRONMENT = dict(os.environ)  # before a test changes it


class CommandServer:
    """A process that forks commands. One for each process of pytest; it ends with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.command_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=TESTS,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_seconds: float
    ) -> tuple[int, str, str]:
        """Run a command to its end. Return its exit code, what it printed, and its errors.

        Raises `TimeoutExpired` when it does not end in time; it is killed then.
        """
        pipes = [os.pipe(), os.pipe()]
        stdin = os.open(os.devnull, os.O_RDONLY)
        streams = (stdin, *(write_end for _, write_end in pipes))
        deadline = time.monotonic() + timeout_seconds
        with self.start(arguments, cwd, environment, streams) as command:
            for stream in streams:
                os.close(stream)
            outputs = [bytearray(), bytearray()]
            readers = [
                threading.Thread(target=_read_all, args=(read_end, output), daemon=True)
                for (read_end, _), output in zip(pipes, outputs, strict=True)
            ]
            for reader in readers:
                reader.start()
            try:
                exit_code = command.wait(timeout_seconds)
                for reader in readers:  # as `subprocess.run` does: until whoever has the pipes open has closed them
                    reader.join(max(0.0, deadline - time.monotonic()))
                if any(reader.is_alive() for reader in readers):
                    raise TimeoutError
            except TimeoutError as error:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(command.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([*arguments], timeout_seconds) from error
        out, err = (output.decode().replace("\r\n", "\n") for output in outputs)
        return exit_code, out, err

    def start(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], streams: Sequence[int]
    ) -> "ForkedCommand":
        """Start a command with these descriptors as its stdin, stdout and stderr. The caller closes its own copies."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, self.lock:
            request = json.dumps({"arguments": [*arguments], "cwd": str(cwd), "environment": dict(environment)})
            socket.send_fds(self.requests, [request.encode()], [theirs.fileno(), *streams])
        return ForkedCommand(ours)


class ForkedCommand:
    """A command that runs. A context manager: its end closes the connection to the process that waits for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rb")
        self.pid = int(self.lines.readline())

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit code. Raises `TimeoutError`."""
        self.connection.settimeout(timeout_seconds)
        return int(self.lines.readline())

    def __enter__(self) -> "ForkedCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.connection.close()


@functools.cache
def command_server() -> CommandServer:
    """Return the server of this process, started at the first call."""
    return CommandServer()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a Python with this environment would start as the server's has started."""
    names = {name for name in (*environment, *ENVIRONMENT) if name.startswith(PYTHON_VARIABLES)}
    return all(
        environment.get(name) in ((None, QUICK_START) if name == "PYTHONPATH" else (ENVIRONMENT.get(name),))
        for name in names - {"PYTHONUNBUFFERED"}
    )


def _read_all(descriptor: int, output: bytearray) -> None:
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while chunk := file.read(65536):
            output += chunk


# --- the server -----------------------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork a command for each request, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait for commands need not be waited for
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 4)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run_and_report(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_report(request: dict[str, object], descriptors: Sequence[int]) -> NoReturn:
    """Fork the command, and send its process ID and then its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reply, *streams = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(reply)
        _run(request, streams)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):  # a test that has timed out does not listen
        os.write(reply, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(reply, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(request: dict[str, object], streams: Sequence[int]) -> NoReturn:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.chdir(str(request["cwd"]))
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if SETTLE_VARIABLE in environment:
        from infra.aws.stack import resources

        resources.SETTLE_SECONDS = float(environment[SETTLE_VARIABLE])
    if STOP_VARIABLE in environment:
        from cluster.jobs import job

        job.JOB_STOP_TIMEOUT_SECONDS = float(environment[STOP_VARIABLE])
    sys.argv = [str(Path(sys.executable).parent / "imgnet-cluster"), *arguments]
    sys.path[:] = [str(Path(sys.executable).parent), *(path for path in sys.path if path != str(TESTS))]
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  # open until the process ends
    sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
    exit_code = 1
    try:
        from cluster.cli import main

        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            exit_code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                output.flush()
        os._exit(exit_code)


def import_modules() -> None:
    for package_name in ("cluster", "infra"):
        package = importlib.import_module(package_name)
        for module in pkgutil.walk_packages(package.__path__, f"{package_name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent)]
    import_modules()
    serve(socket.socket(fileno=int(sys.argv[1])))
