"""What machines send: the rules for their answers, and the writing of their bytes on this computer.

A machine may be broken, or somebody else may control it. Every path, size, number and text that a machine names passes
a function of this module before it is used. An answer that breaks a rule raises `BadAnswer` and nothing of it is used.
`ssh_scripts` leaves out what the rules forbid, so an intact machine breaks none. `ArrivalFolder` writes the bytes.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from cluster.errors import ClusterError
from train.tools.agent_protocol import LOG_FOLDERS
from train.tools.files import folder_below, open_below, overwrite_below

MAX_PATH_BYTES = 200  # of a mirrored file, relative to the job's folder
MAX_PATH_DEPTH = 3  # of a mirrored file below its folder
MAX_RECORD_BYTES = 1 << 16  # of a status or attempt file; the largest known ones have 4 KB
MAX_FILE_BYTES = 1 << 32  # of a file that grows; a week of metrics, one line a second, has 0.3 GB
MAX_FILE_COUNT = 50_000  # of a job's logs and attempt files: 100 attempts of 500 processes
MAX_ATTEMPTS_BYTES = 1 << 26  # of all attempt files of a job: every command reads all of them
MAX_OUTPUT_BYTES = 1 << 22  # of one command
MAX_LISTING_BYTES = 1 << 22
MAX_CHECKPOINT_BYTES = 1 << 36  # the weights and momenta of ten billion parameters have 80 GB
FREE_DISK_BYTES = 1 << 28  # bytes of machines leave this free, or a twentieth of a smaller disk
MAX_LINE_CHARACTERS = 1000
MAX_QUOTED_CHARACTERS = 100

# A program that was started in the run folder could import such a file, so that a machine's code would run here.
IMPORTABLE_SUFFIXES = (".py", ".pyc", ".so")
# The files that commands read. A folder of such a name would make each reader fail.
READ_SUFFIXES = (".json", ".jsonl", ".log")

_NAME = r"[A-Za-z0-9_+=,@][A-Za-z0-9._+=,@-]*"  # begins neither with "." nor with "-"
_MIRRORED_PATH = re.compile(
    rf"status/(?P<machine>{_NAME})\.json|attempts/[0-9]{{6}}\.json|"
    rf"(?:{'|'.join(LOG_FOLDERS)})(?:/{_NAME}){{1,{MAX_PATH_DEPTH}}}"
)
_CHECKPOINT_PATH = re.compile(r"([0-9]{6})/(step|resume)-([0-9]{1,12})[A-Za-z0-9_-]{0,100}\.pt")


class BadAnswer(ClusterError):
    """A machine's answer breaks a rule."""

    def __init__(self, rule: str, machine_name: str = "") -> None:
        self.rule = rule
        text = (
            f"its answer was dropped: it {rule}; the machine is broken, its start-up files print in the background, or "
            "somebody else controls it: look at the machine, or stop the job: imgnet-cluster stop"
        )
        super().__init__(f"{machine_name}: {text}" if machine_name else text)


# --- paths --------------------------------------------------------------------------------------------------------


def is_mirrored_path(path: str, machine_names: Collection[str] | None = None) -> bool:
    """Whether a file of the job's folder is copied here. A status file is only if its machine is in `machine_names`."""
    has_readable_folder = any(folder.endswith(READ_SUFFIXES) for folder in parent_folders(path))
    is_allowed = len(path) <= MAX_PATH_BYTES and not path.endswith(IMPORTABLE_SUFFIXES) and not has_readable_folder
    match = _MIRRORED_PATH.fullmatch(path) if is_allowed else None
    machine = match and match["machine"]
    return bool(match) and (machine is None or machine_names is None or machine in machine_names)


def parent_folders(path: str) -> list[str]:
    """Return the folders in which a relative path lies, the outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: index + 1]) for index in range(len(parts))]


def is_below(path: str) -> bool:
    """Whether a relative path stays below its folder: no empty part, no "." or "..", nothing absolute."""
    return bool(path) and "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def checkpoint_age(path: str) -> tuple[int, bool, int] | None:
    """Return a key that sorts checkpoints by age, None for another path. A saved one is newer than a resumed one."""
    match = _CHECKPOINT_PATH.fullmatch(path)
    return (int(match[1]), match[2] == "step", int(match[3])) if match else None


def absolute_path(answer: bytes) -> str:
    """Return a folder or program on the machine, as the machine names it. Raises `BadAnswer`."""
    path = answer.decode("utf-8", "surrogateescape")
    if not path.startswith("/") or len(path) > os.pathconf("/", "PC_PATH_MAX") or not path.isprintable():
        raise BadAnswer(f"names {_quote(answer)}, which is not an absolute path")
    return path


def file_size(answer: bytes) -> int:
    """Return the size of a file that a machine names. Raises `BadAnswer`."""
    if not re.fullmatch(rb"[0-9]{1,18}", answer):
        raise BadAnswer(f"names {_quote(answer)}, which is not the size of a file")
    return int(answer)


def one_line(text: bytes | str, max_characters: int = MAX_LINE_CHARACTERS) -> str:
    """Return the text of a machine as one short line without control characters."""
    text = text[: 4 * max_characters]
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 3]}..."


def _quote(text: bytes) -> str:
    return repr(one_line(text, MAX_QUOTED_CHARACTERS))


# --- answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommandExit:
    """How a command ended: exit code (negative: the signal that killed it) and the sizes of its two outputs."""

    code: int
    stdout_bytes: int
    stderr_bytes: int


@dataclass(frozen=True, kw_only=True)
class NewBytes:
    """What the mirrored files have gained, by path. With `is_complete` there was nothing more at that moment."""

    contents: Mapping[str, bytes]
    is_complete: bool


def parse_exit(command_id: str, output: bytes | bytearray, max_bytes: int) -> tuple[CommandExit, int] | None:
    """Return how a command ended and where its output begins; None until that line has come. Raises `BadAnswer`."""
    start = output.find(b"\n%s " % command_id.encode())
    end = output.find(b"\n", start + 1)
    if start < 0 or end < 0:
        return None
    match = re.fullmatch(rb" ([0-9]{1,3}) ([0-9]{1,18}) ([0-9]{1,18})", output[start + 1 + len(command_id) : end])
    if not match:
        raise BadAnswer("reports the end of a command in another form than agreed")
    code, stdout_bytes, stderr_bytes = (int(column) for column in match.groups())
    if stdout_bytes + stderr_bytes > max_bytes:
        raise BadAnswer(f"has {(stdout_bytes + stderr_bytes) / 1e6:.0f} MB, the limit is {max_bytes / 1e6:.0f} MB")
    if 128 < code <= 128 + 31:  # a shell reports signal n as exit code 128 + n; the highest is 31
        code = 128 - code
    return CommandExit(code=code, stdout_bytes=stdout_bytes, stderr_bytes=stderr_bytes), end + 1


def parse_listing(stdout: bytes) -> dict[str, int]:
    """Return the size of each file by its path, from the output of `LIST_FILES_SCRIPT`. Raises `BadAnswer`."""
    sizes = {}
    for entry in stdout.split(b"\0"):
        if entry:
            match = re.fullmatch(rb"([0-9]{1,18}) (?:\./)?(.+)", entry, re.DOTALL)
            path = os.fsdecode(match[2]) if match else ""
            if not match or not is_below(path):
                raise BadAnswer(f"lists {_quote(entry)}, which is not the size and path of a file in the folder")
            sizes[path] = int(match[1])
    return sizes


def parse_new_bytes(
    stdout: bytes, delimiter: str, known_sizes: Mapping[str, int], machine_names: Collection[str]
) -> NewBytes:
    """Return the new bytes of each file, from the output of `new_bytes_script`. Raises `BadAnswer`."""
    *parts, trailer = stdout.split(f"{delimiter}\n".encode())[1:] or [b"end\n"]
    contents: dict[str, bytes] = {}
    for part in parts:
        raw_path, newline, content = part.partition(b"\n")
        path = raw_path.decode(errors="replace")
        if not newline or not is_mirrored_path(path, machine_names):
            raise BadAnswer(f"names the file {_quote(raw_path)}, which is not one of the job's")
        if path in contents:
            raise BadAnswer(f"has {path} twice")
        grows = path.startswith(LOG_FOLDERS)
        size = len(content) + (known_sizes.get(path, 0) if grows else 0)
        if size > (MAX_FILE_BYTES if grows else MAX_RECORD_BYTES):
            raise BadAnswer(f"makes {path} {size / 1e6:.1f} MB long")
        contents[path] = content
    if trailer not in (b"end\n", b"more\n"):
        raise BadAnswer("ends in another form than agreed")
    kept_paths = {path for path in contents if not path.startswith("status/")} | known_sizes.keys()
    if len(kept_paths) > max(MAX_FILE_COUNT, len(known_sizes)):
        raise BadAnswer(f"has more than {MAX_FILE_COUNT} files")
    sizes = {**known_sizes, **{path: len(content) for path, content in contents.items()}}
    attempts_bytes = sum(size for path, size in sizes.items() if path.startswith("attempts/"))
    if attempts_bytes > MAX_ATTEMPTS_BYTES:
        raise BadAnswer(f"makes the attempt files {attempts_bytes / 1e6:.1f} MB long together")
    return NewBytes(contents=contents, is_complete=trailer == b"end\n")


# --- writing ------------------------------------------------------------------------------------------------------


class ArrivalFolder:
    """A folder of this computer into which bytes from machines are written.

    Paths are relative to it. No link is followed at any level, only folders and regular files. Methods raise `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, path: str, offset: int, data: bytes) -> int:
        """Append the bytes of a file from `offset` that it lacks. Returns its size, even if that is below `offset`."""
        _require_below(path)
        self.require_space(len(data))
        with open_below(self.path, path, os.O_WRONLY | os.O_APPEND) as file:
            size = file.seek(0, os.SEEK_END)
            if offset <= size < offset + len(data):
                file.write(memoryview(data)[size - offset :])
            return file.tell()

    def overwrite(self, path: str, data: bytes) -> None:
        """Overwrite a small file in place, which takes a tenth of the time of a rename. A reader drops a torn state."""
        _require_below(path)
        overwrite_below(self.path, path, data)

    def create(self, path: str, write_content: Callable[[BinaryIO], object]) -> None:
        """Write or replace a file atomically and durably."""
        folder, slash, name = path.rpartition("/")
        temp_name = f".{name}.{uuid4().hex}"
        _require_below(path)
        with folder_below(self.path, path) as parent:
            try:
                with open_below(self.path, f"{folder}{slash}{temp_name}", os.O_WRONLY | os.O_EXCL) as file:
                    write_content(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temp_name, name, src_dir_fd=parent, dst_dir_fd=parent)
                os.fsync(parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temp_name, dir_fd=parent)
                raise

    def sizes(self, folders: Collection[str]) -> dict[str, int]:
        """Return the sizes of the regular files in these folders, by path."""
        sizes = {}
        for folder in folders:
            if (self.path / folder).is_symlink():
                continue
            for parent, _, names in os.walk(self.path / folder):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        status = Path(parent, name).lstat()
                        if stat.S_ISREG(status.st_mode):
                            sizes[str(Path(parent, name).relative_to(self.path))] = status.st_size
        return sizes

    def has_place(self, path: str) -> bool:
        """Whether a file can be here: no folder of this path, and no file where one of its folders would be."""
        is_folder = (self.path / path).is_dir()
        return not is_folder and not any((self.path / folder).is_file() for folder in parent_folders(path))

    def require_space(self, size: int) -> None:
        """Raise `OSError` when the disk has no room for `size` bytes from a machine."""
        usage = shutil.disk_usage(self.path)
        if usage.free - size < min(FREE_DISK_BYTES, usage.total // 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _require_below(path: str) -> None:
    if not is_below(path):
        raise ValueError(f"{path!r} does not stay below its folder")
