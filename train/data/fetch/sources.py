"""`Source`, the interface of a place that packed sets are fetched from, and `FolderSource`; S3 is another source.

A set is train/ and val/. Each has shards, index.npy, names.txt, and a manifest.json that lists them with size and
SHA-256 and was written last. Imports no torch and no numpy.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from train.data.manifest import MANIFEST_FILE, FetchError
from train.tools.filesystem import one_line_error

READ_CHUNK_BYTES = 4 << 20


class Source(Protocol):
    """The root of a packed set. An `OSError` from its methods may be transient and is retried, other errors are not."""

    name: str

    def read_small_file(self, path: str) -> bytes | None:
        """Return the content of a small file, or None when it does not exist."""

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a byte range of a file in chunks. The range may end early.

        Raises `FetchError` when the file's size is not `size`, or the file was replaced since it was first read.
        """

    def describe_missing(self, split: str) -> str:
        """Return one line for a split without a manifest: what is there instead, and what to type."""


class FolderSource:
    """A packed set in a folder, for example a shared one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)
        self._first_seen_versions: dict[str, tuple[int, int]] = {}  # (inode, mtime in ns) by path

    def read_small_file(self, path: str) -> bytes | None:
        """Return the content of a small file, or None when it does not exist."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise FetchError(one_line_error(error)) from error

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a byte range of a file.

        Raises `FetchError` when the file is gone, was replaced, or does not have `size` bytes.
        """
        file = self.root / path
        try:
            file_descriptor = os.open(file, os.O_RDONLY)
        except (FileNotFoundError, PermissionError) as error:
            raise FetchError(f"{one_line_error(error)}; its manifest lists it") from error
        try:
            status = os.fstat(file_descriptor)
            check_size(str(file), status.st_size, size)
            version = status.st_ino, status.st_mtime_ns
            if self._first_seen_versions.setdefault(path, version) != version:
                raise file_replaced_error(str(file))
            end = offset + length
            while offset < end and (chunk := os.pread(file_descriptor, min(READ_CHUNK_BYTES, end - offset), offset)):
                offset += len(chunk)
                yield chunk
        finally:
            os.close(file_descriptor)

    def describe_missing(self, split: str) -> str:
        """Return one line for a split without a manifest: what is there instead, and what to type."""
        folder = self.root / split
        if not self.root.is_dir():
            return f"{self.root}: there is no such folder"
        if folder.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(folder)):
            pack_command = f"imgnet-cluster data pack {self.root} {self.root}-packed"
            return f"{self.root}: has single files, but fetch takes a packed set; to make one: {pack_command}"
        return f"{folder / MANIFEST_FILE}: is not there: no packed set, or packing is not finished"


def check_size(where: str, actual: int, expected: int) -> None:
    """Raise `FetchError` when a file's size in bytes is not the one in its manifest."""
    if actual != expected:
        raise FetchError(
            f"{where}: has {actual} bytes, its manifest says {expected}; "
            "to check the source: imgnet-cluster data verify"
        )


def file_replaced_error(where: str) -> FetchError:
    """Return the error for a file that was replaced since it was first read."""
    return FetchError(f"{where}: was replaced while it was fetched; when the source is finished, fetch again")
