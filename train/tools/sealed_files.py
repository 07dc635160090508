"""Sealed files: they end with their length and checksum, so that damage is noticed."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO, cast

from .files import write_atomic_with

CHECKSUM_MAGIC = "imgnet-sealed 2"
HASHED_BYTES = 1 << 20  # that are hashed at a time


def with_checksum(payload: bytes) -> bytes:
    """Return the content of a sealed file: the payload, then a line with its length and SHA-256.

    The line comes last, so that other programs find the payload's own format: `torch.load` reads a sealed archive.
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
    """Write a sealed file atomically, without a second copy in memory: into a stream. Raises `OSError`."""

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
    """Return whether a file ends with the footer of a sealed file, even if it is damaged. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - FOOTER_BYTES))
        return file.read(FOOTER_BYTES).startswith(f"\n{CHECKSUM_MAGIC} ".encode())


def _verify_footer(path: Path, footer: bytes, payload_length: int, digest: str) -> None:
    if not footer.startswith(f"\n{CHECKSUM_MAGIC} ".encode()):
        raise ValueError(
            f"{path}: is damaged or cut short, or is not a checkpoint of this program; of what `export --format torch` "
            "wrote, name the job"
        )
    if footer != _checksum_footer(payload_length, digest):
        raise ValueError(f"{path}: is damaged: its checksum does not match its content")


def is_intact(path: Path) -> bool:
    """Return whether a file can be read, is sealed, and has the content that its checksum says."""
    with contextlib.suppress(OSError, ValueError):
        verify_checksum(path)
        return True
    return False
