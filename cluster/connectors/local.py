"""One machine: run a command, move bytes, read a file from an offset. Here: this computer."""

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
from train.tools.filesystem import write_atomic

PROJECT_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CommandResult:
    """What a command did: its words, exit code (negative: killed by that signal), output bytes, and seconds."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float


class CommandFailed(ClusterError):
    """A command ended with another code than 0; carries the Result and shows the last ten lines."""

    def __init__(self, result: CommandResult, machine_name: str) -> None:
        lines = (result.out + result.err).decode(errors="replace").strip().splitlines()[-10:]
        super().__init__("\n".join([f"{machine_name}: {result.argv[0]} ended with code {result.code}", *lines]))
        self.result = result


class Connector:
    """This computer. Commands are lists of words and never pass through a shell."""

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
        """Run a command to its end. Raises `CommandFailed` when it fails and `check`, or at `timeout` seconds."""
        start = time.monotonic()
        try:
            with subprocess.Popen(
                argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, **(env or {})}, start_new_session=True
            ) as process:
                try:
                    out, err = process.communicate(input, timeout)
                except BaseException as error:  # late, or Ctrl-C: with everything that it started
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    if not isinstance(error, subprocess.TimeoutExpired):
                        raise
                    out, err = process.communicate()
                    err, check = err + f"not over in {timeout} s".encode(), True
            code = process.returncode
        except OSError as error:  # not there, or nothing that can be run: the shell's two codes
            code, out, err = 127 if isinstance(error, FileNotFoundError) else 126, b"", str(error).encode()
        result = CommandResult(tuple(argv), code, out, err, time.monotonic() - start)
        if check and code:
            raise CommandFailed(result, self.name)
        return result

    def put(self, source: Path, target: str) -> None:
        """Copy a file of this computer to the machine."""
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def get(self, source: str, target: Path) -> None:
        """Copy a file of the machine to this computer."""
        shutil.copyfile(source, target)

    def write(self, path: str, content: bytes) -> None:
        """Replace a file of the machine, whole or not at all; its folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), content)

    def read_from(self, path: str, offset: int, limit: int = 1 << 24) -> bytes:
        """Return at most `limit` bytes of a file from an offset; nothing when it is not that long, or not there."""
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the files below a folder by relative path, with their sizes, but for hidden ones."""
        found = {}
        for here, _, names in os.walk(folder):  # passes over folders that vanish
            for path in (Path(here, name) for name in names if not name.startswith(".")):
                with contextlib.suppress(FileNotFoundError):  # renamed or removed under our eyes
                    found[str(path.relative_to(folder))] = path.stat().st_size
        return found


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project, from any folder, whatever lies there under our names."""
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-P", "-m", module, *arguments]


def visible_gpu_count() -> int:
    """Return how many NVIDIA GPUs this machine shows to a process, by the driver's files: no torch needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    gpus = Path("/proc/driver/nvidia/gpus")
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0
