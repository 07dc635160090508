"""The shards of a packed split, read anywhere at any time by threads and forked processes: few handles, no lock.

pread and not mmap: a disk error is an error there, and not the end of the process.
"""

import os
from collections.abc import Sequence
from pathlib import Path

MAX_OPEN_SHARDS = 128  # kept open per split and process: three copies of ImageNet stay below a limit of 1,024


class ShardError(Exception):
    """A shard that is not what the manifest says; the text is what is wrong with it."""


def shard_name(number: int) -> str:
    """Return a shard's file name."""
    return f"shard-{number:05d}.bin"


class _ShardFile:
    """One open file, closed when nobody reads it any more: not under a thread that is just reading."""

    def __init__(self, path: Path) -> None:
        self.file_descriptor = -1
        self.file_descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.file_descriptor).st_size

    def __del__(self) -> None:
        if self.file_descriptor >= 0:
            os.close(self.file_descriptor)


class ShardReader:
    """The shards of `folder`, `sizes` in bytes by number, opened when they are first read."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.sizes = folder, sizes
        self._open_files: dict[int, _ShardFile] = {}

    def __reduce__(self) -> tuple[type["ShardReader"], tuple[Path, Sequence[int]]]:
        return ShardReader, (self.folder, self.sizes)  # handles stay in their process

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return a part of a shard. Raises `ShardError`."""
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
            self._open_files.popitem()  # in a random order none is better than another
        self._open_files[shard] = file
        return file

    def was_replaced(self, shard: int) -> bool:
        """Whether another file has taken the place of the one that is open."""
        try:
            now, then = (self.folder / shard_name(shard)).stat(), os.fstat(self._open_files[shard].file_descriptor)
        except (OSError, KeyError):
            return False
        return (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino)


def describe_size_mismatch(found: int, expected: int) -> str:
    """Say that a file has not the size that the manifest names."""
    return f"the file {'is cut short' if found < expected else 'was replaced'}: {found} bytes instead of {expected}"
