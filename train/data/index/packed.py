"""A packed split: shards of images back to back, an index of numbers that is mapped and not read, a manifest.

shard-00000.bin ...  the images' bytes, in the order of ids
index.npy            one `ROW` an image, in the order of ids
names.txt            `class/file name`, a line each: for messages and comparisons only
manifest.json        written last: without it the set is not finished
"""

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.tools.filesystem import one_line, read_json

from .base import DataError, Ids, Index, names_crc, names_digest
from .shards import ShardError, Shards, shard_name, wrong_size

FORMAT, VERSION = "imgnet-cluster packed", 1
MANIFEST, INDEX, NAMES = "manifest.json", "index.npy", "names.txt"
UNFINISHED = ".unfinished"  # lies there from the first byte to the manifest
ROW = np.dtype(
    [
        *(("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")),
        *(("width", "<u2"), ("height", "<u2"), ("crc", "<u4")),
    ]
)
Rows = NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a packed split consists of: `files` by name, each with its bytes and sha256; `short` None for full size.

    `fetched` is "index" where the images were left at their source.
    """

    split: str
    short: int | None
    images: int
    classes: list[str]
    source: str
    names: int
    files: dict[str, dict[str, Any]]
    made: dict[str, Any]
    fetched: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is written to the file."""
        said = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {name: value for name, value in said.items() if (name, value) != ("fetched", None)}

    @property
    def shards(self) -> list[int]:
        """The sizes of the shards in bytes, by number."""
        count = sum(name.startswith("shard-") for name in self.files)
        return [int(self.files[shard_name(number)]["bytes"]) for number in range(count)]

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(int(one["bytes"]) for one in self.files.values())


def is_packed(folder: Path) -> bool:
    """Whether the folder of a split is a finished packed set."""
    return (folder / MANIFEST).exists()


def is_unfinished(folder: Path) -> bool:
    """Whether a packed set was begun here and not finished."""
    begun = (one for one in folder.iterdir() if "shard-" in one.name or one.name == UNFINISHED)
    return not is_packed(folder) and any(one.is_file() for one in begun)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a packed split. Raises `DataError` for one that is damaged or of another version."""
    path = folder / MANIFEST
    said = read_json(path)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise DataError(f"{path}: is damaged, or not a manifest of this program; remove it and make the set again")
    if said.get("version") != VERSION:
        raise DataError(
            f"{path}: the set has format version {said.get('version')}, this program reads {VERSION}; make it again, "
            "or use the version of imgnet-cluster that made it"
        )
    try:
        needed = [name for name in Manifest.__dataclass_fields__ if name != "fetched"]
        found = Manifest(**{name: said[name] for name in needed}, fetched=said.get("fetched"))
        sizes = found.bytes, found.shards, found.files[INDEX]["crc32"], found.files[NAMES]["bytes"]
        if not (isinstance(found.images, int) and found.images > 0 and found.classes and sizes):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path}: is damaged; remove it and make the set again") from None
    return found


class Column:
    """One column of an index that lies on the disk, as int64: only the rows that are asked for are read."""

    def __init__(self, values: NDArray[Any], ids: Ids | None = None) -> None:
        self._values, self._ids = values, ids

    def __len__(self) -> int:
        return len(self._values if self._ids is None else self._ids)

    def __getitem__(self, asked: Any) -> Any:
        return self._values[asked if self._ids is None else self._ids[asked]].astype(np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def take(self, ids: Ids) -> "Column":
        """Return the numbers of these images only."""
        return Column(self._values, ids if self._ids is None else self._ids[ids])


@dataclass(frozen=True, kw_only=True)
class PackedIndex(Index):
    """The images of a packed split: `rows` of all, mapped; `ids` of those taken, None for all."""

    labels: Column
    widths: Column
    heights: Column
    manifest: Manifest
    rows: Rows
    shards: Shards
    ids: Ids | None = None

    def take(self, ids: Ids) -> Self:
        """Return the index of these images only, in this order."""
        mine = np.asarray(ids, np.int64) if self.ids is None else self.ids[ids]
        labels, widths, heights = (one.take(ids) for one in (self.labels, self.widths, self.heights))
        return replace(self, ids=mine, labels=labels, widths=widths, heights=heights)

    def _id(self, number: int) -> int:
        return number if self.ids is None else int(self.ids[number])

    def read(self, number: int) -> bytes:
        """Return the bytes of an image. Raises `DataError` when they are not those that were written."""
        shard, offset, length, _, _, _, crc = self.rows[self._id(number)].item()
        try:
            data = self.shards.read(shard, offset, length)
        except ShardError as error:
            raise self._bad(number, str(error)) from error
        if zlib.crc32(data) != crc:
            why = "the file was replaced during the run" if self.shards.replaced(shard) else "its bytes have changed"
            raise self._bad(number, f"{why} (checksum)")
        return data

    def _bad(self, number: int, why: str) -> DataError:
        return DataError(f"{self.where(number)}: {why}; to see all that is damaged: {_verify(self.folder)}")

    def names(self) -> list[str]:
        """Return `class/file name` of every image. Raises `DataError` when names.txt is damaged."""
        path = self.folder / NAMES
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{one_line(error)}; to see all that is damaged: {_verify(self.folder)}") from error
        if zlib.crc32(text) != self.manifest.names:
            raise DataError(f"{path}: is damaged (checksum); to see all that is: {_verify(self.folder)}")
        found = text.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return found if self.ids is None else [found[number] for number in self.ids.tolist()]

    def name(self, number: int) -> str:
        """Return `class/file name` of one image, "?" when names.txt cannot be read."""
        wanted = self._id(number)
        try:
            with (self.folder / NAMES).open("rb") as file:
                line = next(islice(file, wanted, None), b"?")
        except OSError:
            return "?"
        return line.decode("utf-8", "surrogateescape").rstrip("\n")

    def where(self, number: int) -> str:
        """Return the shard, the image's number in it, its id and its name."""
        row = self.rows[self._id(number)]
        before = (self.rows["shard"] == row["shard"]) & (self.rows["offset"] < row["offset"])
        path = self.folder / shard_name(int(row["shard"]))
        return f"{path}, image {int(before.sum())} in it (id {self._id(number)}, {self.name(number)})"

    @property
    def has_bytes(self) -> bool:
        """Whether the shards were fetched too."""
        return self.manifest.fetched != "index"

    @property
    def source(self) -> str:
        """The digest of the names without suffix."""
        return self.manifest.source if self.ids is None else names_digest(self.names())

    @property
    def fingerprint(self) -> int:
        """The checksum of the names."""
        return self.manifest.names if self.ids is None else names_crc(self.names())


def _verify(folder: Path) -> str:
    return f"imgnet-cluster data verify {folder.parent}"


def load(folder: Path, classes: Sequence[str] | None, *, whole: bool = True) -> PackedIndex:
    """Return the index of a packed split, labelled by `classes` (none: its own).

    Raises `DataError` unless the index is whole and, if `whole`, the shards have their sizes, but where only the index
    was fetched: who reads only the copies needs no more than names and numbers of the full-size images.
    """
    manifest = read_manifest(folder)
    rows = open_rows(folder, manifest)
    if whole and manifest.fetched != "index":
        _check_shards(folder, manifest)
    labels: NDArray[Any] = rows["label"]
    if classes is not None and list(classes) != manifest.classes:
        label = {name: number for number, name in enumerate(classes)}
        labels = np.array([label.get(name, -1) for name in manifest.classes], np.int64)[labels]
    return PackedIndex(
        folder=folder,
        classes=tuple(classes or manifest.classes),
        labels=Column(labels),
        widths=Column(rows["width"]),
        heights=Column(rows["height"]),
        manifest=manifest,
        rows=rows,
        shards=Shards(folder, manifest.shards),
    )


def open_rows(folder: Path, manifest: Manifest) -> Rows:
    """Map index.npy. Raises `DataError` unless it is the one that the manifest names."""
    path, said = folder / INDEX, manifest.files[INDEX]
    try:
        crc = crc_of(path)
        rows = np.load(path, mmap_mode="r", allow_pickle=False) if crc == said["crc32"] else None
    except (OSError, ValueError) as error:
        raise DataError(f"{one_line(error)}; to see all that is damaged: {_verify(folder)}") from error
    if rows is None or rows.dtype != ROW or rows.shape != (manifest.images,):
        raise DataError(f"{path}: is damaged (checksum); to see all that is: {_verify(folder)}")
    return np.asarray(rows)  # np.memmap's own indexing takes ten times as long


def crc_of(path: Path) -> int:
    """Return a file's crc32, read and not mapped: a file that is cut meanwhile must not end the process."""
    crc, buffer = 0, memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _check_shards(folder: Path, manifest: Manifest) -> None:
    """Name a shard that is missing or has another size, before the training and not in the middle of it."""
    found = {one.name: one.stat().st_size for one in folder.glob("shard-*.bin")}
    for number, size in enumerate(manifest.shards):
        name = shard_name(number)
        if found.get(name) != size:
            why = wrong_size(found[name], size) if name in found else "the shard is missing"
            raise DataError(f"{folder / name}: {why}; to see all that is damaged: {_verify(folder)}")
