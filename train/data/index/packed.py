"""A packed split: shards of images back to back, a memory-mapped index, and a manifest.

shard-00000.bin ...  the images' bytes, in the order of IDs
index.npy            one `ROW_DTYPE` per image, in the order of IDs
names.txt            `class/file name`, one per line: for messages and comparisons only
manifest.json        written last: without it the set is not finished
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from train.data.manifest import INDEX_FILE, MANIFEST_FILE, NAMES_FILE, Manifest, ManifestError, OtherVersion, shard_name
from train.tools.errors import one_line_error

from .base import DataError, ImageIds, Index

UNFINISHED_MARKER = ".unfinished"  # this file exists from the first byte until the manifest is written
ROW_DTYPE = np.dtype([
    ("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"),
    ("label", "<u4"), ("width", "<u2"), ("height", "<u2"), ("crc", "<u4"),
])  # fmt: skip
ROWS_PER_CHECK = 1 << 14  # few, so that a check takes little memory
MAX_OPEN_SHARDS = 128  # per split and process: three copies of ImageNet stay below a limit of 1,024 open files
IndexRows = NDArray[np.void]


def is_packed(folder: Path) -> bool:
    """Return whether the folder of a split is a finished packed set."""
    return (folder / MANIFEST_FILE).exists()


def is_unfinished(folder: Path) -> bool:
    """Return whether packing or fetching was begun in a folder and not finished."""
    leftovers = (path for path in folder.iterdir() if "shard-" in path.name or path.name == UNFINISHED_MARKER)
    return not is_packed(folder) and any(path.is_file() for path in leftovers)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a packed split. Raises `DataError` when it is damaged or has another version."""
    path = folder / MANIFEST_FILE
    try:
        return Manifest.parse(path.read_bytes())
    except OtherVersion as error:
        raise DataError(
            f"{path}: the set has {error}; create it again, or use the version of imgnet-cluster that created it"
        ) from None
    except (OSError, ManifestError):
        raise DataError(
            f"{path}: is damaged, or not a manifest of this program; remove it and create the data set again"
        ) from None


class MappedColumn:
    """One column of a memory-mapped index, as int64. Only the rows that are indexed are read from disk."""

    def __init__(self, values: NDArray[np.integer]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> Any:  # Any: as in `IntColumn`
        return self._values[rows].astype(np.int64)

    def __array__(self, dtype: DTypeLike = np.int64, copy: bool | None = None) -> NDArray[np.int64]:
        return np.asarray(self[:], dtype)


class ShardError(Exception):
    """A shard that is not as the manifest says. The text says what is wrong, without the shard's name."""


class ShardReader:
    """Reads the shards of a folder, each opened on first use, from threads and forked processes without a lock.

    `sizes` are the expected sizes in bytes, by number. With pread a disk error is an exception; with mmap it kills the
    process. A file is closed when the last reference goes, so never while another thread reads from it.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self._open_files: dict[int, FileIO] = {}

    def __reduce__(self) -> tuple[type["ShardReader"], tuple[Path, Sequence[int]]]:
        return ShardReader, (self.folder, self.sizes)  # file descriptors are not pickled

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Return `length` bytes of a shard. Raises `ShardError`."""
        data = b""
        try:
            file = self._open_files.get(shard) or self._open_shard(shard)
            while more := os.pread(file.fileno(), length - len(data), offset + len(data)):
                data += more
        except OSError as error:
            raise ShardError(error.strerror or str(error)) from error
        if len(data) < length:
            raise ShardError(f"the file is cut short: it ends at byte {offset + len(data)} of {self.sizes[shard]}")
        return data

    def _open_shard(self, shard: int) -> FileIO:
        if shard >= len(self.sizes):
            raise ShardError("the manifest has no such shard")
        file = FileIO(self.folder / shard_name(shard))
        size = os.fstat(file.fileno()).st_size
        if size != self.sizes[shard]:
            raise ShardError(describe_size_mismatch(size, self.sizes[shard]))
        if len(self._open_files) >= MAX_OPEN_SHARDS:
            self._open_files.popitem()  # any of them: images are read in random order
        self._open_files[shard] = file
        return file

    def was_replaced(self, shard: int) -> bool:
        """Return whether the path of an open shard now names another file."""
        try:
            current = (self.folder / shard_name(shard)).stat()
            opened = os.fstat(self._open_files[shard].fileno())
        except (OSError, KeyError):
            return False
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)


def describe_size_mismatch(actual: int, expected: int) -> str:
    """Return the error text for a file whose size in bytes is not the one in the manifest."""
    return f"the file {'is cut short' if actual < expected else 'was replaced'}: {actual} bytes instead of {expected}"


@dataclass(frozen=True, kw_only=True)
class PackedIndex(Index):
    """The images of a packed split. `rows` are those of all its images, `ids` those of this index, None for all."""

    manifest: Manifest
    rows: IndexRows
    shards: ShardReader
    ids: ImageIds | None = None

    def take(self, ids: ImageIds) -> Self:
        """Return an index of only these images, in this order."""
        return replace(super().take(ids), ids=ids if self.ids is None else self.ids[ids])

    def _id(self, number: int) -> int:
        """Return the ID in the whole set of an image of this index."""
        return number if self.ids is None else int(self.ids[number])

    def read(self, number: int) -> bytes:
        """Return the bytes of an image. Raises `DataError` when they are not the bytes that were packed."""
        shard, offset, length, _, _, _, crc = self.rows[self._id(number)].item()
        try:
            data = self.shards.read(shard, offset, length)
        except ShardError as error:
            raise self._damaged_error(number, str(error)) from error
        if zlib.crc32(data) != crc:
            was_replaced = self.shards.was_replaced(shard)
            reason = "the file was replaced during the run" if was_replaced else "its bytes have changed"
            raise self._damaged_error(number, f"{reason} (checksum)")
        return data

    def _damaged_error(self, number: int, reason: str) -> DataError:
        return DataError(f"{self.location(number)}: {reason}; {_list_damage_hint(self.folder)}")

    def names(self) -> list[str]:
        """Return `class/file name` of every image. Raises `DataError` when names.txt is damaged."""
        path = self.folder / NAMES_FILE
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{one_line_error(error)}; {_list_damage_hint(self.folder)}") from error
        if zlib.crc32(text) != self.manifest.names_checksum:
            raise DataError(f"{path}: is damaged (checksum); {_list_damage_hint(self.folder)}")
        names = text.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return names if self.ids is None else [names[number] for number in self.ids.tolist()]

    def name(self, number: int) -> str:
        """Return `class/file name` of one image, "?" when names.txt cannot be read."""
        image_id = self._id(number)
        try:
            with (self.folder / NAMES_FILE).open("rb") as file:
                line = next(islice(file, image_id, None), b"?")
        except OSError:
            return "?"
        return line.decode("utf-8", "surrogateescape").rstrip("\n")

    def location(self, number: int) -> str:
        """Return the shard's path, the image's position in the shard, its ID and its name."""
        row = self.rows[self._id(number)]
        is_before = (self.rows["shard"] == row["shard"]) & (self.rows["offset"] < row["offset"])
        path = self.folder / shard_name(int(row["shard"]))
        return f"{path}, image {int(is_before.sum())} in it (id {self._id(number)}, {self.name(number)})"


def _list_damage_hint(folder: Path) -> str:
    return f"to list all damage: imgnet-cluster data verify {folder.parent}"


def load_packed_index(folder: Path, classes: Sequence[str] | None, *, check_shard_sizes: bool = True) -> PackedIndex:
    """Return the index of a packed split, labeled by the position of each class in `classes` (None: its own classes).

    Raises `DataError` when the index is damaged or, with `check_shard_sizes`, when a shard does not have its size. Of
    full-size images only the index may be there: a run that reads the copies needs no more.
    """
    manifest = read_manifest(folder)
    rows = map_index_rows(folder, manifest)
    if check_shard_sizes and manifest.has_images:
        _check_shard_files(folder, manifest)
    labels: NDArray[np.integer] = rows["label"]
    if classes is not None and list(classes) != manifest.classes:
        label_by_class = {name: label for label, name in enumerate(classes)}
        labels = np.array([label_by_class.get(name, -1) for name in manifest.classes], np.int64)[labels]
    return PackedIndex(
        folder=folder,
        classes=tuple(classes or manifest.classes),
        labels=MappedColumn(labels),
        widths=MappedColumn(rows["width"]),
        heights=MappedColumn(rows["height"]),
        known_digests=(manifest.stems_digest, manifest.names_checksum),
        has_images=manifest.has_images,
        manifest=manifest,
        rows=rows,
        shards=ShardReader(folder, manifest.shard_sizes),
    )


def map_index_rows(folder: Path, manifest: Manifest) -> IndexRows:
    """Memory-map index.npy. Raises `DataError` for a wrong checksum, and for an image without a shard or a class."""
    path = folder / INDEX_FILE
    rows: IndexRows | None = None
    try:
        if file_crc32(path) == manifest.files[INDEX_FILE].crc32:
            rows = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise DataError(f"{one_line_error(error)}; {_list_damage_hint(folder)}") from error
    except Exception:  # numpy's reader may raise any exception on a damaged file
        pass
    if rows is None or rows.dtype != ROW_DTYPE or rows.shape != (manifest.images,):
        raise DataError(f"{path}: is damaged (checksum); {_list_damage_hint(folder)}")
    rows = np.asarray(rows)  # np.memmap's own indexing takes ten times as long
    shard_sizes = np.array([min(size, 1 << 62) for size in (*manifest.shard_sizes, 0)], np.uint64)
    for first in range(0, len(rows), ROWS_PER_CHECK):
        block = rows[first : first + ROWS_PER_CHECK]
        ends = block["offset"] + block["length"]
        sizes = shard_sizes[np.minimum(block["shard"], len(shard_sizes) - 1)]
        is_possible = (ends >= block["offset"]) & (ends <= sizes) & (block["label"] < len(manifest.classes))
        if not is_possible.all():
            raise DataError(f"{path}: is damaged: an image lies outside its shard, or its class does not exist")
    return rows


def file_crc32(path: Path) -> int:
    """Return a file's crc32, without mmap: a file that is truncated meanwhile would kill the process (SIGBUS)."""
    crc = 0
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _check_shard_files(folder: Path, manifest: Manifest) -> None:
    """Raise `DataError` for a shard that is missing or has the wrong size: before training, not in the middle of it."""
    size_by_name = {path.name: path.stat().st_size for path in folder.glob("shard-*.bin")}
    for number, expected in enumerate(manifest.shard_sizes):
        name = shard_name(number)
        size = size_by_name.get(name)
        if size != expected:
            reason = "the shard is missing" if size is None else describe_size_mismatch(size, expected)
            raise DataError(f"{folder / name}: {reason}; {_list_damage_hint(folder)}")
