"""Runs commands of imgnet-cluster in forks of a process that has imported its modules, which saves the start of Python.

A command gets what a shell would give it: arguments, folder, environment, streams, and a process of its own, whose
exit code is reported. Tests of the start itself, of signals and of unusual streams run the installed command. Another
such process, which has imported torch, forks `python -m MODULE` for tests of the trainer.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .waiting import DEADLINE_SECONDS, PATIENCE

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
    """A process that forks commands, or with `modules`, which it imports, what `python -m` runs. It ends with ours."""

    def __init__(self, *modules: str, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self.lock = threading.Lock()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.command_server", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=TESTS,
                env=environment,
                start_new_session=True,
            )

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        timeout_seconds: float,
        module: str = "",
    ) -> tuple[int, str, str]:
        """Run a command to its end. Return its exit code, what it printed, and its errors.

        Raises `TimeoutExpired` when it does not end in time; it is killed then.
        """
        pipes = [os.pipe(), os.pipe()]
        stdin = os.open(os.devnull, os.O_RDONLY)
        streams = (stdin, *(write_end for _, write_end in pipes))
        deadline = time.monotonic() + timeout_seconds
        with self.start(arguments, cwd, environment, streams, module) as command:
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
                command.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired([*arguments], timeout_seconds) from error
        out, err = (output.decode().replace("\r\n", "\n") for output in outputs)
        return exit_code, out, err

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        streams: Sequence[int],
        module: str = "",
    ) -> "ForkedCommand":
        """Start a command, or `python -m MODULE`, with these descriptors as its stdin, stdout and stderr.

        The caller closes its own copies of them.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self.lock:
            request = json.dumps([module, [*arguments], str(cwd), dict(environment)])
            socket.send_fds(self.requests, [request.encode()], [theirs.fileno(), *streams])
        return ForkedCommand(ours)

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


class ForkedCommand:
    """A command that runs. A context manager: its end closes the connection to the process that waits for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout_seconds: float = DEADLINE_SECONDS * PATIENCE) -> int:
        """Return the exit code. Raises `TimeoutError`."""
        if self.returncode is None:
            self.connection.settimeout(timeout_seconds)
            self.returncode = int(self.connection.recv(64))
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, None while the command runs."""
        with contextlib.suppress(BlockingIOError):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def __enter__(self) -> "ForkedCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@functools.cache
def command_server() -> CommandServer:
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


def _run_and_report(request: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
    """Fork the command, and send its process ID and then its exit code."""
    from train.tools.process import die_with_parent

    module = request[0]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if module:
        die_with_parent()
    reply, *streams = descriptors
    pid = os.fork()
    if pid == 0:
        if module:
            die_with_parent()
        os.close(reply)
        _run(streams, *request)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):  # a test that has timed out does not listen
        os.write(reply, str(pid).encode())
        _, status = os.waitpid(pid, 0)
        os.write(reply, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(streams: Sequence[int], module: str, arguments: list[str], cwd: str, environment: dict[str, str]) -> NoReturn:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if SETTLE_VARIABLE in environment:
        from infra.aws.stack import resources

        resources.SETTLE_SECONDS = float(environment[SETTLE_VARIABLE])
    if STOP_VARIABLE in environment:
        from cluster.jobs import job

        job.JOB_STOP_TIMEOUT_SECONDS = float(environment[STOP_VARIABLE])
    programs = Path(sys.executable).parent
    sys.argv = [module or str(programs / "imgnet-cluster"), *arguments]
    sys.path[:] = [cwd if module else str(programs), *(path for path in sys.path if path != str(TESTS))]
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  # open until the process ends
    sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
    if module:  # Python ends with what it raises, as always
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit(0)
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
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if not sys.argv[2:]:
        import_modules()
    serve(socket.socket(fileno=int(sys.argv[1])))
