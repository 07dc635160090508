"""The manifest of a packed split: its format, its fields, and its files with sizes and checksums.

Packing writes it last, fetching and uploading compare files with it, and the index is opened by it. Imports no torch
and no numpy, so that planning and fetching start quickly.
"""

import re
from dataclasses import dataclass, field
from typing import Self

from train.tools.records import decode, encode
from train.tools.text_files import parse_json, to_json_bytes

SPLITS = ("train", "val")

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.npy"
NAMES_FILE = "names.txt"
PACK_LOCK_FILE = ".pack.lock"  # beside train/ and val/ of a set that was packed here
FORMAT = "imgnet-cluster packed"
VERSION = 2  # of the packed format: manifest, index.npy and shards


class FetchError(Exception):
    """A data set that cannot be fetched. The text is one line: what is wrong, where, what to do."""


class ManifestError(ValueError):
    """Bytes that are not the manifest of a packed set, or are damaged."""


class OtherVersion(ManifestError):
    """The manifest of a packed set of another version, which this program cannot read."""


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.bin"


def is_shard(name: str) -> bool:
    """Return whether a file of a packed set holds images."""
    return name.endswith(".bin")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file. Only index.npy has a crc32 too, which is checked whenever the set is opened."""

    bytes: int
    sha256: str
    crc32: int | None = None


@dataclass(frozen=True, kw_only=True)
class PackingInfo:
    """How a set was made: of which sources (`signature`), and which images were left out, with the reasons.

    `val_fraction` is the fraction of the source's train/ that was held out for validation, 0 where it had a val/.
    """

    quality: int | None = None
    signature: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    val_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a packed split.

    `short_side` is in pixels, None for full size. `fetched` is "index" where the images stayed at their source.
    """

    split: str
    short_side: int | None
    images: int
    classes: list[str]
    stems_digest: str
    names_checksum: int
    files: dict[str, FileEntry]
    packing_info: PackingInfo
    fetched: str | None

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Return the manifest that the bytes of a manifest.json hold.

        Raises `OtherVersion`, and `ManifestError`, also for names of files that could lie outside the split's folder.
        """
        try:
            data = parse_json(content)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError("no manifest of a packed set")
            if data.get("version") != VERSION:
                raise OtherVersion(f"format version {data.get('version')}, this program reads {VERSION}")
            manifest = decode(cls, data)
        except OtherVersion:
            raise
        except ValueError as error:
            raise ManifestError(str(error)) from error
        if not manifest._is_sound():
            raise ManifestError("its fields contradict each other")
        return manifest

    def _is_sound(self) -> bool:
        are_safe = all(re.fullmatch(r"\w[\w.-]*", name) and entry.bytes >= 0 for name, entry in self.files.items())
        shard_count = sum(map(is_shard, self.files))
        required_names = {INDEX_FILE, NAMES_FILE, *map(shard_name, range(shard_count))}
        has_files = required_names <= self.files.keys() and self.files[INDEX_FILE].crc32 is not None
        return are_safe and has_files and self.images > 0 and bool(self.classes)

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return to_json_bytes({"format": FORMAT, "version": VERSION, **encode(self)})

    @property
    def has_images(self) -> bool:
        """Whether the images are beside the manifest, and not only the index."""
        return self.fetched != "index"

    @property
    def shard_sizes(self) -> list[int]:
        """The sizes of the shards in bytes, by number."""
        return [self.files[shard_name(number)].bytes for number in range(sum(map(is_shard, self.files)))]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.bytes for entry in self.files.values())

    def files_to_fetch(self, index_only: bool) -> dict[str, FileEntry]:
        """Return the files to fetch: all of them, or all but the shards. The index and the names come first."""
        return {name: entry for name, entry in sorted(self.files.items()) if not (index_only and is_shard(name))}
