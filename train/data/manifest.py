"""The manifest of a packed split: its format, its fields, and its files with sizes and checksums.

`PackedManifest` has every field, as the code that packs and reads a set needs them. `SourceManifest` is what fetch and
upload need: the bytes exactly as the source has them, and the list of files. Imports no torch and no numpy, so that
planning and fetching start quickly.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Self

SPLITS = ("train", "val")

MANIFEST_FILE = "manifest.json"
FORMAT = "imgnet-cluster packed"
VERSION = 2  # of the packed format: manifest, index.npy and shards

FETCHED_KEY = "fetched"  # in the manifest of a fetched copy: "index" where the images themselves were not fetched


class FetchError(Exception):
    """A data set that cannot be fetched. The text is one line: what is wrong, where, what to do."""


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.bin"


def is_shard(name: str) -> bool:
    """Return whether a file of a packed set holds images."""
    return name.endswith(".bin")


@dataclass(frozen=True, kw_only=True)
class PackedManifest:
    """The manifest of a packed split, with all its fields.

    `short_side` is the images' short side in pixels, None for full size. `files` has the bytes and the sha256 of each
    file by name; that of index.npy has a crc32 too. `packing_info` records how the set was made. `fetched` is "index"
    where the images were left at their source.
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
        """Return the content of manifest.json."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        if self.fetched is None:
            del fields[FETCHED_KEY]
        return fields

    @property
    def shard_sizes(self) -> list[int]:
        """The sizes of the shards in bytes, by number."""
        count = sum(name.startswith("shard-") for name in self.files)
        return [int(self.files[shard_name(number)]["bytes"]) for number in range(count)]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file, as its manifest states them."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceManifest:
    """The manifest of a split at a source: its raw bytes, its fields as JSON has them, and its files by name."""

    raw: bytes
    fields: dict[str, Any]
    files: dict[str, FileEntry]

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Self:
        """Parse the bytes of a manifest.json; `where` names the file in errors.

        Raises `FetchError` when the bytes are not a manifest, or have a version that this program cannot read. File
        names with a slash or a leading dot are refused: such a file could lie outside the split's folder.
        """
        try:
            fields = json.loads(raw)
            if (fields["format"], fields["version"]) != (FORMAT, VERSION):
                raise FetchError(
                    f"{where}: is of another format than {FORMAT!r} version {VERSION}; pack the set again with this "
                    "version of imgnet-cluster"
                )
            files = {
                str(name): FileEntry(int(entry["bytes"]), str(entry["sha256"]))
                for name, entry in fields["files"].items()
            }
            if not all(re.fullmatch(r"\w[\w.-]*", name) and entry.bytes >= 0 for name, entry in files.items()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchError(f"{where}: is not the manifest of a packed set, or is damaged") from None
        return cls(raw, fields, files)

    def files_to_fetch(self, index_only: bool) -> dict[str, FileEntry]:
        """Return the files to fetch: all of them, or all but the shards. The index and the names come first."""
        return {name: entry for name, entry in sorted(self.files.items()) if not (index_only and is_shard(name))}

    def matches(self, target_bytes: bytes) -> bool:
        """Return whether the manifest of a fetched copy is this one, whether all or only the index was fetched."""
        try:
            target_fields = json.loads(target_bytes)
            return bool({key: value for key, value in target_fields.items() if key != FETCHED_KEY} == self.fields)
        except (ValueError, AttributeError):
            return False

    def bytes_for_target(self, index_only: bool) -> bytes:
        """Return the bytes of the manifest to write beside a fetched copy."""
        return (json.dumps({**self.fields, FETCHED_KEY: "index"}, indent=1) + "\n").encode() if index_only else self.raw
