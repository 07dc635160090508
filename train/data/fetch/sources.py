"""Where a packed set is fetched from: two verbs, and what its manifest says. A shared folder is one; S3 is another.

A set is train/ and val/, each with shards, index.npy, names.txt, and a manifest.json that names them with size and
SHA-256 and was written last. Imports no torch and no numpy.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from train.data.manifest import MANIFEST_FILE, FetchError
from train.tools.filesystem import one_line_error

READ_CHUNK_BYTES = 4 << 20  # bytes read at once


class Source(Protocol):
    """The root of a packed set. `OSError` from it may pass, any other error will not."""

    name: str

    def read_small_file(self, path: str) -> bytes | None:
        """Return a small file, None when it is not there."""

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file piece by piece; it may end early.

        Raises `FetchError` when the file has not `size` bytes, or is another one than when it was first read.
        """

    def describe_missing(self, split: str) -> str:
        """Return one line that says what is there instead of a packed split, and what to type."""


class FolderSource:
    """A packed set in a folder, such as one that all machines share."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, str(root)
        self._first_seen_versions: dict[str, tuple[int, int]] = {}

    def read_small_file(self, path: str) -> bytes | None:
        """Return a small file, None when it is not there."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise FetchError(one_line_error(error)) from error

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file. Raises `FetchError` when it is gone, was replaced, or has not `size` bytes."""
        file = self.root / path
        try:
            handle = os.open(file, os.O_RDONLY)
        except (FileNotFoundError, PermissionError) as error:
            raise FetchError(f"{one_line_error(error)}; its manifest names it") from error
        try:
            found = os.fstat(handle)
            check_size(str(file), found.st_size, size)
            mark = found.st_ino, found.st_mtime_ns
            if self._first_seen_versions.setdefault(path, mark) != mark:
                raise file_replaced_error(str(file))
            end = offset + length
            while offset < end and (piece := os.pread(handle, min(READ_CHUNK_BYTES, end - offset), offset)):
                offset += len(piece)
                yield piece
        finally:
            os.close(handle)

    def describe_missing(self, split: str) -> str:
        """Say what is there instead of a packed split."""
        folder = self.root / split
        if not self.root.is_dir():
            return f"{self.root}: there is no such folder"
        if folder.is_dir() and any(one.is_dir() and not one.name.startswith(".") for one in os.scandir(folder)):
            pack = f"imgnet-cluster data pack {self.root} {self.root}-packed"
            return f"{self.root}: has single files, fetch takes a packed set; make one: {pack}"
        return f"{folder / MANIFEST_FILE}: is not there: no packed set, or one that is not finished"


def check_size(where: str, found: int, expected: int) -> None:
    """Raise `FetchError` when a file is not as long as its manifest says."""
    if found != expected:
        raise FetchError(f"{where}: has {found} bytes, its manifest says {expected}; look: imgnet-cluster data verify")


def file_replaced_error(where: str) -> FetchError:
    """Return the error of a file that is another one than a moment ago."""
    return FetchError(f"{where}: was replaced while it was fetched; when the source is finished, fetch again")
