"""Files: atomic replacement, exclusive creation, locks, JSON, files of lines, checksums. Imports no torch."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NoReturn, cast
from uuid import uuid4

CHECKSUM_MAGIC = "imgnet-sealed 2"
LOCK_POLL_SECONDS = 0.02
MAX_FILE_BYTES = 64_000_000  # of a file that is read as a whole
MAX_LINE_BYTES = 4_000_000  # of a file of lines, which may have any number of them
# The errors of a path at which there is something else than a regular file of a size that can be read.
NO_FILE_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EFBIG)
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
BLOCK_BYTES = 4096  # that are read at a time where only some lines of a file are needed
CHUNK_BYTES = 1 << 18  # that are read at a time of a file of lines that is read as a whole
HASHED_BYTES = 1 << 20  # that are hashed at a time
MAX_INTEGER_DIGITS = 20
# JSON with such a number is parsed with checks, which take longer.
LARGE_NUMBER_PATTERN = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{20}")


@contextlib.contextmanager
def _temp_file(
    path: Path, write_content: Callable[[BinaryIO], object], durable: bool = True, mode: int = 0o666
) -> Iterator[Path]:
    """Yield a temporary file beside `path`, with what a function writes into it. At the end the file is gone.

    An `OSError` names `path`. With `durable` the file is synced to disk, and at the end its folder.
    """
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(temp, "wb", opener=partial(os.open, mode=mode)) as file:
            write_content(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temp
    except OSError as error:
        if error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with contextlib.suppress(OSError):  # the folder may be missing too
            temp.unlink(missing_ok=True)
    if durable:
        _fsync_folder(path.parent)


def write_atomic(path: Path, content: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Write or replace a file so that a reader sees the old content or the new, never a part. Raises `OSError`.

    With `durable` the file survives a power failure. The umask takes permissions from `mode`.
    """
    write_atomic_with(path, lambda file: file.write(content), durable, mode)


def write_atomic_with(
    path: Path, write_content: Callable[[BinaryIO], object], durable: bool = True, mode: int = 0o666
) -> None:
    """Write or replace a file like `write_atomic`, with what a function writes into it. Raises `OSError`."""
    with _temp_file(path, write_content, durable, mode) as temp:
        temp.replace(path)


def create_once(path: Path, content: bytes) -> bool:
    """Create a file, durably and as a whole, unless it exists. Of several writers the first one wins.

    Returns whether this call created it. When the file exists already, nothing is changed. Raises `OSError`.
    """
    try:
        with _temp_file(path, lambda file: file.write(content)) as temp:
            os.link(temp, path)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, timeout_seconds: float = math.inf) -> Iterator[None]:
    """Hold an exclusive lock on a file while the `with` block runs. The kernel releases the lock of a dead process.

    While it is held, the file contains the ID of this process. Waits for the present holder, at most `timeout_seconds`;
    raises `BlockingIOError` when the lock is then still held.
    """
    deadline = time.monotonic() + timeout_seconds
    with open(path, "a", opener=_open_regular) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOCK_POLL_SECONDS)
            except OSError as error:  # such as ENOSYS of Lustre without `-o flock`
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _fsync_folder(folder: Path) -> None:
    """Sync a folder to disk: a new file name is durable only when its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line_error(error: BaseException) -> str:
    """Return the text of an error in one line. The text of an `OSError` begins with its file."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def to_json_bytes(value: object) -> bytes:
    """Return a value as indented JSON text that ends in a newline. NaN and infinity become null: JSON has neither."""
    return (json.dumps(replace_nonfinite(value), indent=1) + "\n").encode()


def is_valid_json(data: bytes) -> bool:
    """Return whether a text is complete JSON. A file that is rewritten in place may be read in a torn state."""
    with contextlib.suppress(ValueError):
        parse_json(data)
        return True
    return False


def parse_json(text: bytes) -> Any:  # Any: JSON of any shape
    """Return the value of a JSON text in UTF-8.

    Raises `ValueError`, also when it is nested too deep, or has a number that is not finite or too long to be one.
    """
    checks: dict[str, Any] = {"parse_constant": _refuse_number}  # Any: json.loads has arguments of other types too
    if LARGE_NUMBER_PATTERN.search(text):
        checks |= {"parse_float": _parse_finite_float, "parse_int": _parse_short_integer}
    try:
        return json.loads(text.decode(), **checks)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _parse_finite_float(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _parse_short_integer(text: str) -> int:
    return int(text) if len(text) <= MAX_INTEGER_DIGITS else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:MAX_INTEGER_DIGITS]} is not a finite number, or too long")


def json_roundtrip(value: object) -> Any:  # Any: JSON of any shape
    """Return a value as JSON would give it back: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def replace_nonfinite(value: object) -> object:
    """Return nested dicts and lists with None in place of each NaN and infinity. Tuples become lists."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def open_regular(path: Path, mode: Literal["rb", "ab"] = "rb", permissions: int = 0o666) -> BinaryIO:
    """Open a file. Raises `OSError`, also for a FIFO or a device, whose opening or reading could hang.

    For writing, a symbolic link is refused too, and a new file gets the permissions that the umask leaves.
    """
    return open(path, mode, opener=partial(_open_regular, permissions=permissions))


def _open_regular(path: str, flags: int, permissions: int = 0o666) -> int:
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW  # somebody else may have placed a link in a shared folder
    handle = os.open(path, flags | os.O_NONBLOCK, permissions)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file", path)


@dataclass(frozen=True)
class FileVersion:
    """What changes with a file: a file of the same version has the same content."""

    inode: int
    size: int  # in bytes
    changed_ns: int


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file, None when there is none. Raises other `OSError`s."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
    return None


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file. Raises `OSError`, also when it is not a regular file or has more bytes."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes / 1e6:.0f} MB", str(path))
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines, without lines of more than `MAX_LINE_BYTES`.

    The last line may be incomplete. A missing file yields nothing. Raises other `OSError`s.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        yield from lines_from_here(file)


def lines_from_here(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its position on, like `read_lines`."""
    while line := file.readline(MAX_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        rest = b"" if is_whole else line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        if is_whole:
            yield line


def line_blocks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of an open file from its position on in large blocks, each with the offset of its end.

    Lines of more than `MAX_LINE_BYTES` are left out. The last block may be an unfinished line.
    """
    rest = b""
    is_too_long = False
    while chunk := file.read(CHUNK_BYTES):
        lines, newline, unfinished = chunk.rpartition(b"\n")
        if newline:
            block = rest + lines + newline
            if is_too_long:
                block = block.partition(b"\n")[2]
            if block:
                yield block, file.tell() - len(unfinished)
            rest, is_too_long = b"", False
        rest = b"" if is_too_long else rest + unfinished
        if len(rest) >= MAX_LINE_BYTES:
            rest, is_too_long = b"", True
    if rest:
        yield rest, file.tell()


def lines_with(marker: bytes, block: bytes) -> Iterator[bytes]:
    """Yield the lines of a block that contain a text. The others take almost no time."""
    found = block.find(marker)
    while found >= 0:
        begin = block.rfind(b"\n", 0, found) + 1
        end = block.find(b"\n", found) + 1 or len(block)
        yield block[begin:end]
        found = block.find(marker, end)


def lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its end, without their newlines. Reads no more blocks than are needed.

    The first of them may be incomplete. Empty lines and those of more than `MAX_LINE_BYTES` are left out.
    """
    begin = file.seek(0, os.SEEK_END)
    rest = b""  # the known part of a line whose beginning is not read yet
    is_too_long = False
    while begin > 0:
        end, begin = begin, max(0, begin - BLOCK_BYTES)
        file.seek(begin)
        head, *lines = (file.read(end - begin) + rest).split(b"\n")
        for line in reversed(lines):
            if line and not is_too_long:
                yield line
            is_too_long = False
        is_too_long = is_too_long or len(head) >= MAX_LINE_BYTES
        rest = b"" if is_too_long else head
    if rest:
        yield rest


def last_line(path: Path) -> str:
    """Return the last line of a log, or the last state of a progress bar; "" when there is none."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def read_json(path: Path) -> Any | None:  # Any: JSON of any shape
    """Return the value in a JSON file, None when the file is missing, unreadable or no JSON."""
    with contextlib.suppress(OSError, ValueError):
        return parse_json(read_file(path))
    return None


def read_json_lines(path: Path, *required_keys: str) -> Iterator[dict[str, Any]]:  # Any: JSON of any shape
    """Yield the JSON objects of a file with one object per line that have all required keys.

    Lines that are damaged, or not complete yet, are skipped. A missing file yields nothing. Raises other `OSError`s.
    """
    for line in read_lines(path):
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and row.keys() >= {*required_keys}:
                yield row


def with_checksum(payload: bytes) -> bytes:
    """Return the content of a sealed file: the payload, then a line with its length and SHA-256.

    The line comes last, so that a program that knows nothing of it still finds the payload's own format at the
    beginning: `torch.load` reads a sealed zip archive as it is.
    """
    return payload + _checksum_footer(len(payload), hashlib.sha256(payload).hexdigest())


def _checksum_footer(payload_length: int, digest: str) -> bytes:
    return f"\n{CHECKSUM_MAGIC} {payload_length:020d} {digest}\n".encode()


FOOTER_BYTES = len(_checksum_footer(0, hashlib.sha256().hexdigest()))


class _HashingStream:
    """A writable stream that counts and hashes what it passes on to a file.

    It keeps the error of a failed write, because a writer such as torch.save may hide the reason (a full disk).
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, chunk: bytes) -> int:
        """Write a chunk. Raises `OSError`."""
        try:
            self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.length += len(chunk)
        self.sha256.update(chunk)
        return len(chunk)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is complete."""


def write_with_checksum(path: Path, write_payload: Callable[[IO[bytes]], object]) -> None:
    """Write a sealed file atomically. `write_payload` writes the payload into a stream: memory holds no second copy.

    Raises `OSError`.
    """

    def write(file: BinaryIO) -> None:
        stream = _HashingStream(file)
        try:
            write_payload(cast(IO[bytes], stream))
        except Exception:
            if stream.error:
                raise stream.error from None
            raise
        file.write(_checksum_footer(stream.length, stream.sha256.hexdigest()))

    write_atomic_with(path, write)


def read_with_checksum(path: Path) -> bytes:
    """Return the payload of a sealed file. Raises `ValueError` when it is cut, changed or not sealed, and `OSError`."""
    with path.open("rb") as file:
        payload = file.read(max(0, os.fstat(file.fileno()).st_size - FOOTER_BYTES))
        footer = file.read()
    _verify_footer(path, footer, len(payload), hashlib.sha256(payload).hexdigest())
    return payload


def verify_checksum(path: Path) -> None:
    """Raise as `read_with_checksum` does, with little memory for a file of any size."""
    with path.open("rb") as file:
        payload_length = max(0, os.fstat(file.fileno()).st_size - FOOTER_BYTES)
        digest = sha256_of_range(file, payload_length)
        _verify_footer(path, file.read(), payload_length, digest)


def sha256_of_range(file: BinaryIO, length: int, before: bytes = b"") -> str:
    """Return the SHA-256 of some bytes and of the next ones of an open file, at most `length`, in hexadecimal."""
    sha256 = hashlib.sha256(before)
    while length > 0 and (chunk := file.read(min(length, HASHED_BYTES))):
        sha256.update(chunk)
        length -= len(chunk)
    return sha256.hexdigest()


def is_sealed(path: Path) -> bool:
    """Whether a file ends as a sealed one does, intact or not. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - FOOTER_BYTES))
        return file.read(FOOTER_BYTES).startswith(f"\n{CHECKSUM_MAGIC} ".encode())


def _verify_footer(path: Path, footer: bytes, payload_length: int, digest: str) -> None:
    if not footer.startswith(f"\n{CHECKSUM_MAGIC} ".encode()):
        raise ValueError(f"{path}: is damaged or cut short, or is not a checkpoint of this program")
    if footer != _checksum_footer(payload_length, digest):
        raise ValueError(f"{path}: is damaged: its checksum does not match its content")


def is_intact(path: Path) -> bool:
    """Return whether a file can be read, is sealed, and has the content that its checksum says."""
    with contextlib.suppress(OSError, ValueError):
        verify_checksum(path)
        return True
    return False
