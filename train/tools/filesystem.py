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

MAGIC = "imgnet-sealed 1"


def _temp(path: Path, write: Callable[[BinaryIO], object], durable: bool) -> Path:
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    with _no_half(temp, path), temp.open("wb") as file:
        write(file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return temp


@contextlib.contextmanager
def _no_half(temp: Path, path: Path) -> Iterator[None]:
    """Leave no half file after a full disk or Ctrl-C, and name the file that was asked for."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # nor was it there to be made
            temp.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def replace(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Not durable: without fsync."""
    _replace(path, lambda file: file.write(content), durable)


def _replace(path: Path, write: Callable[[BinaryIO], object], durable: bool = True) -> None:
    temp = _temp(path, write, durable)
    with _no_half(temp, path):  # a folder has that name
        temp.replace(path)
    if durable:
        _sync_folder(path.parent)


def overwrite(path: Path, content: bytes) -> None:
    """Write a small file in place: for a file that changes each second, of which a reader may drop a torn state.

    A rename would leave readers on NFS with the old file for a while, or none (ESTALE).
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, content, 0)  # before the cut: on a full disk the old text stays
        os.ftruncate(handle, len(content))
    finally:
        os.close(handle)


def publish(path: Path, content: bytes) -> bool:
    """Write a file that must not exist yet. False, and nothing changed, when it does: the first writer wins."""
    temp = _temp(path, lambda file: file.write(content), durable=True)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    finally:
        temp.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return True


@contextlib.contextmanager
def locked(path: Path, seconds: float = math.inf) -> Iterator[None]:
    """Hold a lock file, waiting for whoever has it. The kernel takes the lock back from the dead.

    Raises `BlockingIOError` when it is still held after `seconds`.
    """
    deadline = time.monotonic() + seconds
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


def _sync_folder(folder: Path) -> None:
    """A new name is durable only when its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line(error: BaseException) -> str:
    """Return an error's text in one line; an OSError names its file."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def as_json(value: Any) -> bytes:
    """Return the value as JSON text that ends in a newline. NaN becomes null: JSON knows no NaN."""
    return (json.dumps(finite(value), indent=1) + "\n").encode()


def is_json(data: bytes) -> bool:
    """Whether a text is whole: one that is rewritten in place may be torn."""
    with contextlib.suppress(ValueError):
        json.loads(data)
        return True
    return False


def plain(value: Any) -> Any:
    """Return the value as JSON would give it back: tuples become lists, keys texts."""
    return json.loads(json.dumps(value))


def finite(value: Any) -> Any:
    """Return the value with None where a number is NaN or infinite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def read_json(path: Path) -> Any | None:
    """Return a JSON file's value, None while it is not there or cannot be read as such."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def json_lines(path: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that are JSON objects with these names; none when it is not there.

    Not the last line when only a part of it has arrived, nor what is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.keys() >= {*names}:
                    yield row


def seal(payload: bytes) -> bytes:
    """Put a line with the payload's length and SHA-256 before it."""
    return _head(len(payload), hashlib.sha256(payload).hexdigest()) + payload


def _head(length: int, digest: str) -> bytes:
    return f"{MAGIC} {length:020d} {digest}\n".encode()


class _Stream:
    """Passes on what is written and adds it up. Who writes may hide the error of a full disk; it is kept."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.sum = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, part: bytes) -> int:
        """Write a part."""
        try:
            self.file.write(part)
        except OSError as error:
            self.error = error
            raise
        self.length += len(part)
        self.sum.update(part)
        return len(part)

    def flush(self) -> None:
        """The file is flushed at its end."""


def replace_sealed(path: Path, fill: Callable[[Any], object]) -> None:
    """Write a sealed file as `replace` does, of what `fill` writes into a stream: memory holds no copy of it."""

    def write(file: BinaryIO) -> None:
        stream = _Stream(file)
        file.write(_head(0, stream.sum.hexdigest()))
        try:
            fill(stream)
        except Exception:
            if stream.error:
                raise stream.error from None
            raise
        file.seek(0)
        file.write(_head(stream.length, stream.sum.hexdigest()))

    _replace(path, write)


def unseal(path: Path) -> bytes:
    """Return the payload of a sealed file. Raises `ValueError` when the file is cut, changed or not sealed."""
    with path.open("rb") as file:
        words = file.readline(200).decode("ascii", "replace").rsplit(maxsplit=2)
        payload = file.read()
    if len(words) != 3 or words[0] != MAGIC:
        raise ValueError(f"{path}: is not a checkpoint of this program")
    if words[1] != f"{len(payload):020d}" or words[2] != hashlib.sha256(payload).hexdigest():
        raise ValueError(f"{path}: is damaged: its checksum does not fit")
    return payload


def newest_sealed(folder: Path, pattern: str) -> Path | None:
    """Return the last file by name whose seal is whole, None when there is none. Damaged ones are passed over."""
    for path in sorted(folder.glob(pattern), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            unseal(path)
            return path
    return None
