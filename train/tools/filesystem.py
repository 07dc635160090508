"""Files that are whole or not there: replace, publish once, seal with a checksum. Imports no torch."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

CHECKSUM_MAGIC = "imgnet-sealed 1"


def _write_temp_file(path: Path, write_content: Callable[[BinaryIO], object], durable: bool) -> Path:
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    with _remove_temp_on_error(temp, path), temp.open("wb") as file:
        write_content(file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return temp


@contextlib.contextmanager
def _remove_temp_on_error(temp: Path, path: Path) -> Iterator[None]:
    """Leave no half file after a full disk or Ctrl-C, and name the file that was asked for."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # nor was it there to be made
            temp.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_atomic(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Not durable: without fsync."""
    _write_atomic_with(path, lambda file: file.write(content), durable)


def _write_atomic_with(path: Path, write_content: Callable[[BinaryIO], object], durable: bool = True) -> None:
    temp = _write_temp_file(path, write_content, durable)
    with _remove_temp_on_error(temp, path):  # a folder has that name
        temp.replace(path)
    if durable:
        _fsync_folder(path.parent)


def overwrite_in_place(path: Path, content: bytes) -> None:
    """Write a small file in place: for a file that changes each second, of which a reader may drop a torn state.

    A rename would leave readers on NFS with the old file for a while, or none (ESTALE).
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, content, 0)  # before the cut: on a full disk the old text stays
        os.ftruncate(handle, len(content))
    finally:
        os.close(handle)


def create_once(path: Path, content: bytes) -> bool:
    """Write a file that must not exist yet. False, and nothing changed, when it does: the first writer wins."""
    temp = _write_temp_file(path, lambda file: file.write(content), durable=True)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    finally:
        temp.unlink(missing_ok=True)
    _fsync_folder(path.parent)
    return True


@contextlib.contextmanager
def locked(path: Path, timeout_seconds: float = math.inf) -> Iterator[None]:
    """Hold a lock file, waiting for whoever has it. The kernel takes the lock back from the dead.

    Raises `BlockingIOError` when it is still held after `seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
        yield


def _fsync_folder(folder: Path) -> None:
    """A new name is durable only when its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line_error(error: BaseException) -> str:
    """Return an error's text in one line; an OSError names its file."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def to_json_bytes(value: Any) -> bytes:
    """Return the value as JSON text that ends in a newline. NaN becomes null: JSON knows no NaN."""
    return (json.dumps(replace_nonfinite(value), indent=1) + "\n").encode()


def is_valid_json(data: bytes) -> bool:
    """Whether a text is whole: one that is rewritten in place may be torn."""
    with contextlib.suppress(ValueError):
        json.loads(data)
        return True
    return False


def json_roundtrip(value: Any) -> Any:
    """Return the value as JSON would give it back: tuples become lists, keys texts."""
    return json.loads(json.dumps(value))


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None where a number is NaN or infinite."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(one) for one in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def read_json(path: Path) -> Any | None:
    """Return a JSON file's value, None while it is not there or cannot be read as such."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def read_json_lines(path: Path, *required_keys: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that are JSON objects with these names; none when it is not there.

    Not the last line when only a part of it has arrived, nor what is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.keys() >= {*required_keys}:
                    yield row


def with_checksum(payload: bytes) -> bytes:
    """Put a line with the payload's length and SHA-256 before it."""
    return _checksum_header(len(payload), hashlib.sha256(payload).hexdigest()) + payload


def _checksum_header(payload_length: int, digest: str) -> bytes:
    return f"{CHECKSUM_MAGIC} {payload_length:020d} {digest}\n".encode()


class _HashingStream:
    """Passes on what is written and adds it up. Who writes may hide the error of a full disk; it is kept."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, chunk: bytes) -> int:
        """Write a part."""
        try:
            self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.length += len(chunk)
        self.sha256.update(chunk)
        return len(chunk)

    def flush(self) -> None:
        """The file is flushed at its end."""


def write_with_checksum(path: Path, write_payload: Callable[[Any], object]) -> None:
    """Write a sealed file as `replace` does, of what `fill` writes into a stream: memory holds no copy of it."""

    def write(file: BinaryIO) -> None:
        stream = _HashingStream(file)
        file.write(_checksum_header(0, stream.sha256.hexdigest()))
        try:
            write_payload(stream)
        except Exception:
            if stream.error:
                raise stream.error from None
            raise
        file.seek(0)
        file.write(_checksum_header(stream.length, stream.sha256.hexdigest()))

    _write_atomic_with(path, write)


def read_with_checksum(path: Path) -> bytes:
    """Return the payload of a sealed file. Raises `ValueError` when the file is cut, changed or not sealed."""
    with path.open("rb") as file:
        words = file.readline(200).decode("ascii", "replace").rsplit(maxsplit=2)
        payload = file.read()
    if len(words) != 3 or words[0] != CHECKSUM_MAGIC:
        raise ValueError(f"{path}: is not a checkpoint of this program")
    if words[1] != f"{len(payload):020d}" or words[2] != hashlib.sha256(payload).hexdigest():
        raise ValueError(f"{path}: is damaged: its checksum does not fit")
    return payload


def newest_intact_file(folder: Path, pattern: str) -> Path | None:
    """Return the last file by name whose seal is whole, None when there is none. Damaged ones are passed over."""
    for path in sorted(folder.glob(pattern), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            read_with_checksum(path)
            return path
    return None
