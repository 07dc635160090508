"""The connector interface: run a command on a machine, copy files, read a file from an offset. Here for this computer.

`cluster.connectors.ssh` implements the same interface for a machine over ssh.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from cluster.errors import ClusterError
from train.tools.agent_protocol import module_folders_variable
from train.tools.filesystem import write_atomic

from . import untrusted

MAX_QUOTED_BYTES = 10_000  # of a failed command's output
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a process sees: indices or UUIDs (NVIDIA, "CUDA C++ guide")
PROJECT_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command: its arguments, exit code (negative: killed by that signal), output and seconds."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float


class CommandFailed(ClusterError):
    """A command ended with a non-zero exit code. Carries its `CommandResult`; the text shows its last ten lines."""

    def __init__(self, result: CommandResult, machine_name: str) -> None:
        output = (result.out + result.err)[-MAX_QUOTED_BYTES:].decode(errors="replace")
        lines = [untrusted.one_line(line) for line in output.strip().splitlines()[-10:]]
        super().__init__("\n".join([f"{machine_name}: {result.argv[0]} ended with code {result.code}", *lines]))
        self.result = result


class Connector:
    """Runs commands and moves files on this computer. Commands are argument lists and never pass through a shell."""

    name = "here"

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float | None = None,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end, with `env` added to the environment.

        Raises `CommandFailed` if it fails and `check` is true, and always if it is not over after `timeout` seconds.
        Then, or at Ctrl-C, the command is killed with every process that it started.
        """
        start = time.monotonic()
        try:
            with subprocess.Popen(
                argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **(env or {})}, start_new_session=True
            ) as process:
                try:
                    stdout, stderr = process.communicate(input, timeout)
                except BaseException as error:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    if not isinstance(error, subprocess.TimeoutExpired):
                        raise
                    stdout, stderr = process.communicate()
                    stderr += f"not over in {timeout} s".encode()
                    check = True
            code = process.returncode
        except OSError as error:  # there is no such program, or it cannot be executed: the exit codes of a shell
            code = 127 if isinstance(error, FileNotFoundError) else 126
            stdout, stderr = b"", str(error).encode()
        result = CommandResult(tuple(argv), code, stdout, stderr, time.monotonic() - start)
        if check and code:
            raise CommandFailed(result, self.name)
        return result

    def put(self, source: Path, target: str) -> None:
        """Copy a file of this computer to the machine."""
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def write(self, path: str, content: bytes) -> None:
        """Replace a file of the machine atomically. Creates its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), content)

    def read_from(self, path: str, offset: int, limit: int = 1 << 24) -> bytes:
        """Return at most `limit` bytes of a file from an offset; b"" if the file is shorter or does not exist."""
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def list_files(self, folder: str, with_hidden: bool = False) -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by relative path; of hidden files if wanted."""
        sizes = {}
        for parent, _, names in os.walk(folder):  # ignores folders that vanish meanwhile
            for path in (Path(parent, name) for name in names if with_hidden or name[0] != "."):
                with contextlib.suppress(FileNotFoundError):  # renamed or removed since it was listed
                    sizes[str(path.relative_to(folder))] = path.stat().st_size
        return sizes


def module_command(
    module: str,
    *arguments: str,
    module_folders: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command that runs a module of this project from any folder, with `environment` added to the caller's.

    `python -P` ignores packages of the current folder, which may have the same names as the project's. The user's own
    modules are imported from `module_folders`.
    """
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {
        "PYTHONPATH": path,
        **(module_folders_variable(module_folders) if module_folders else {}),
        **(environment or {}),
    }
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, "-P", "-m", module, *arguments]


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that a process on this computer can see, as CUDA_VISIBLE_DEVICES names them.

    Reads that variable or else the driver's files in /proc, because importing torch takes seconds.
    """
    names = os.environ.get(GPUS_VARIABLE)
    if names is not None:
        return tuple(name.strip() for name in names.split(",") if name.strip() not in ("", "-1"))
    return tuple(map(str, range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))))
