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

from train.tools.filesystem import one_line_error, read_json

from .base import DataError, ImageIds, Index, names_crc32, stems_sha256
from .shards import ShardError, ShardReader, describe_size_mismatch, shard_name

FORMAT, VERSION = "imgnet-cluster packed", 2
MANIFEST_FILE, INDEX_FILE, NAMES_FILE = "manifest.json", "index.npy", "names.txt"
UNFINISHED_MARKER = ".unfinished"  # lies there from the first byte to the manifest
ROW_DTYPE = np.dtype(
    [
        *(("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")),
        *(("width", "<u2"), ("height", "<u2"), ("crc", "<u4")),
    ]
)
IndexRows = NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class PackedManifest:
    """What a packed split consists of: `files` by name, each with its bytes and sha256; `short` None for full size.

    `fetched` is "index" where the images were left at their source.
    """

    split: str
    short_side: int | None
    images: int
    classes: list[str]
    stems_digest: str
    names_checksum: int
    files: dict[str, dict[str, Any]]
    packing_info: dict[str, Any]
    fetched: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is written to the file."""
        said = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {name: value for name, value in said.items() if (name, value) != ("fetched", None)}

    @property
    def shard_sizes(self) -> list[int]:
        """The sizes of the shards in bytes, by number."""
        count = sum(name.startswith("shard-") for name in self.files)
        return [int(self.files[shard_name(number)]["bytes"]) for number in range(count)]

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(int(one["bytes"]) for one in self.files.values())


def is_packed(folder: Path) -> bool:
    """Whether the folder of a split is a finished packed set."""
    return (folder / MANIFEST_FILE).exists()


def is_unfinished(folder: Path) -> bool:
    """Whether a packed set was begun here and not finished."""
    begun = (one for one in folder.iterdir() if "shard-" in one.name or one.name == UNFINISHED_MARKER)
    return not is_packed(folder) and any(one.is_file() for one in begun)


def read_manifest(folder: Path) -> PackedManifest:
    """Return the manifest of a packed split. Raises `DataError` for one that is damaged or of another version."""
    path = folder / MANIFEST_FILE
    said = read_json(path)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise DataError(f"{path}: is damaged, or not a manifest of this program; remove it and make the set again")
    if said.get("version") != VERSION:
        raise DataError(
            f"{path}: the set has format version {said.get('version')}, this program reads {VERSION}; make it again, "
            "or use the version of imgnet-cluster that made it"
        )
    try:
        needed = [name for name in PackedManifest.__dataclass_fields__ if name != "fetched"]
        found = PackedManifest(**{name: said[name] for name in needed}, fetched=said.get("fetched"))
        sizes = found.bytes, found.shard_sizes, found.files[INDEX_FILE]["crc32"], found.files[NAMES_FILE]["bytes"]
        if not (isinstance(found.images, int) and found.images > 0 and found.classes and sizes):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path}: is damaged; remove it and make the set again") from None
    return found


class MappedColumn:
    """One column of an index that lies on the disk, as int64: only the rows that are asked for are read."""

    def __init__(self, values: NDArray[Any], ids: ImageIds | None = None) -> None:
        self._values, self._ids = values, ids

    def __len__(self) -> int:
        return len(self._values if self._ids is None else self._ids)

    def __getitem__(self, rows: Any) -> Any:
        return self._values[rows if self._ids is None else self._ids[rows]].astype(np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def take(self, ids: ImageIds) -> "MappedColumn":
        """Return the numbers of these images only."""
        return MappedColumn(self._values, ids if self._ids is None else self._ids[ids])


@dataclass(frozen=True, kw_only=True)
class PackedIndex(Index):
    """The images of a packed split: `rows` of all, mapped; `ids` of those taken, None for all."""

    labels: MappedColumn
    widths: MappedColumn
    heights: MappedColumn
    manifest: PackedManifest
    rows: IndexRows
    shards: ShardReader
    ids: ImageIds | None = None

    def take(self, ids: ImageIds) -> Self:
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
            raise self._damaged_error(number, str(error)) from error
        if zlib.crc32(data) != crc:
            why = (
                "the file was replaced during the run" if self.shards.was_replaced(shard) else "its bytes have changed"
            )
            raise self._damaged_error(number, f"{why} (checksum)")
        return data

    def _damaged_error(self, number: int, reason: str) -> DataError:
        return DataError(
            f"{self.location(number)}: {reason}; to see all that is damaged: {_verify_command(self.folder)}"
        )

    def names(self) -> list[str]:
        """Return `class/file name` of every image. Raises `DataError` when names.txt is damaged."""
        path = self.folder / NAMES_FILE
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{one_line_error(error)}; to see all that is damaged: {_verify_command(self.folder)}"
            ) from error
        if zlib.crc32(text) != self.manifest.names_checksum:
            raise DataError(f"{path}: is damaged (checksum); to see all that is: {_verify_command(self.folder)}")
        found = text.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return found if self.ids is None else [found[number] for number in self.ids.tolist()]

    def name(self, number: int) -> str:
        """Return `class/file name` of one image, "?" when names.txt cannot be read."""
        wanted = self._id(number)
        try:
            with (self.folder / NAMES_FILE).open("rb") as file:
                line = next(islice(file, wanted, None), b"?")
        except OSError:
            return "?"
        return line.decode("utf-8", "surrogateescape").rstrip("\n")

    def location(self, number: int) -> str:
        """Return the shard, the image's number in it, its id and its name."""
        row = self.rows[self._id(number)]
        before = (self.rows["shard"] == row["shard"]) & (self.rows["offset"] < row["offset"])
        path = self.folder / shard_name(int(row["shard"]))
        return f"{path}, image {int(before.sum())} in it (id {self._id(number)}, {self.name(number)})"

    @property
    def has_images(self) -> bool:
        """Whether the shards were fetched too."""
        return self.manifest.fetched != "index"

    @property
    def stems_digest(self) -> str:
        """The digest of the names without suffix."""
        return self.manifest.stems_digest if self.ids is None else stems_sha256(self.names())

    @property
    def names_checksum(self) -> int:
        """The checksum of the names."""
        return self.manifest.names_checksum if self.ids is None else names_crc32(self.names())


def _verify_command(folder: Path) -> str:
    return f"imgnet-cluster data verify {folder.parent}"


def load_packed_index(folder: Path, classes: Sequence[str] | None, *, check_shard_sizes: bool = True) -> PackedIndex:
    """Return the index of a packed split, labelled by `classes` (none: its own).

    Raises `DataError` unless the index is whole and, if `whole`, the shards have their sizes, but where only the index
    was fetched: who reads only the copies needs no more than names and numbers of the full-size images.
    """
    manifest = read_manifest(folder)
    rows = map_index_rows(folder, manifest)
    if check_shard_sizes and manifest.fetched != "index":
        _check_shard_files(folder, manifest)
    labels: NDArray[Any] = rows["label"]
    if classes is not None and list(classes) != manifest.classes:
        label = {name: number for number, name in enumerate(classes)}
        labels = np.array([label.get(name, -1) for name in manifest.classes], np.int64)[labels]
    return PackedIndex(
        folder=folder,
        classes=tuple(classes or manifest.classes),
        labels=MappedColumn(labels),
        widths=MappedColumn(rows["width"]),
        heights=MappedColumn(rows["height"]),
        manifest=manifest,
        rows=rows,
        shards=ShardReader(folder, manifest.shard_sizes),
    )


def map_index_rows(folder: Path, manifest: PackedManifest) -> IndexRows:
    """Map index.npy. Raises `DataError` unless it is the one that the manifest names."""
    path, said = folder / INDEX_FILE, manifest.files[INDEX_FILE]
    try:
        crc = file_crc32(path)
        rows = np.load(path, mmap_mode="r", allow_pickle=False) if crc == said["crc32"] else None
    except (OSError, ValueError) as error:
        raise DataError(f"{one_line_error(error)}; to see all that is damaged: {_verify_command(folder)}") from error
    if rows is None or rows.dtype != ROW_DTYPE or rows.shape != (manifest.images,):
        raise DataError(f"{path}: is damaged (checksum); to see all that is: {_verify_command(folder)}")
    return np.asarray(rows)  # np.memmap's own indexing takes ten times as long


def file_crc32(path: Path) -> int:
    """Return a file's crc32, read and not mapped: a file that is cut meanwhile must not end the process."""
    crc, buffer = 0, memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _check_shard_files(folder: Path, manifest: PackedManifest) -> None:
    """Name a shard that is missing or has another size, before the training and not in the middle of it."""
    found = {one.name: one.stat().st_size for one in folder.glob("shard-*.bin")}
    for number, size in enumerate(manifest.shard_sizes):
        name = shard_name(number)
        if found.get(name) != size:
            why = describe_size_mismatch(found[name], size) if name in found else "the shard is missing"
            raise DataError(f"{folder / name}: {why}; to see all that is damaged: {_verify_command(folder)}")
