"""Random access to the shards of a packed split, from threads and forked processes, with few open files and no lock.

Reads use pread and not mmap: with pread a disk error is an exception, with mmap it kills the process.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from train.data.manifest import shard_name

MAX_OPEN_SHARDS = 128  # per split and process: three copies of ImageNet stay below a limit of 1,024 open files


class ShardError(Exception):
    """A shard that is not as the manifest says. The text says what is wrong, without the shard's name."""


class _ShardFile:
    """An open shard file. It is closed when the last reference goes, so never while another thread reads from it."""

    def __init__(self, path: Path) -> None:
        self.file_descriptor = -1
        self.file_descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.file_descriptor).st_size

    def __del__(self) -> None:
        if self.file_descriptor >= 0:
            os.close(self.file_descriptor)


class ShardReader:
    """Reads the shards of a folder, each opened on first use. `sizes` are the expected sizes in bytes, by number."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self._open_files: dict[int, _ShardFile] = {}

    def __reduce__(self) -> tuple[type["ShardReader"], tuple[Path, Sequence[int]]]:
        return ShardReader, (self.folder, self.sizes)  # file descriptors are not pickled

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raises `ShardError`."""
        try:
            file = self._open_files.get(shard) or self._open_shard(shard)
            data = os.pread(file.file_descriptor, length, offset)
            while len(data) < length and (
                more := os.pread(file.file_descriptor, length - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise ShardError(error.strerror or str(error)) from error
        if len(data) < length:
            raise ShardError(f"the file is cut short: it ends at byte {offset + len(data)} of {self.sizes[shard]}")
        return data

    def _open_shard(self, shard: int) -> _ShardFile:
        if shard >= len(self.sizes):
            raise ShardError("the manifest has no such shard")
        file = _ShardFile(self.folder / shard_name(shard))
        if file.size != self.sizes[shard]:
            raise ShardError(describe_size_mismatch(file.size, self.sizes[shard]))
        if len(self._open_files) >= MAX_OPEN_SHARDS:
            self._open_files.popitem()  # any of them: images are read in random order
        self._open_files[shard] = file
        return file

    def was_replaced(self, shard: int) -> bool:
        """Return whether the path of an open shard now names another file."""
        try:
            current = (self.folder / shard_name(shard)).stat()
            opened = os.fstat(self._open_files[shard].file_descriptor)
        except (OSError, KeyError):
            return False
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)


def describe_size_mismatch(actual: int, expected: int) -> str:
    """Return the error text for a file whose size in bytes is not the one in the manifest."""
    return f"the file {'is cut short' if actual < expected else 'was replaced'}: {actual} bytes instead of {expected}"
