"""The manifest of a packed data set: its shards, sizes and checksums."""

import json
import re
from dataclasses import dataclass
from typing import Any, Self

SPLITS = ("train", "val")


MANIFEST_FILE = "manifest.json"


FORMAT, VERSION = "imgnet-cluster packed", 2  # as packed.py writes it


FETCHED_KEY = "fetched"  # in the manifest of a target: "index" where the images themselves were not fetched


class FetchError(Exception):
    """A set that cannot be fetched; the text is one line: what, where, what to do."""


@dataclass(frozen=True)
class FileEntry:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceManifest:
    """A split's manifest: its bytes as they are, and its files by name."""

    raw: bytes
    fields: dict[str, Any]
    files: dict[str, FileEntry]

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Self:
        """Return what the bytes say. Raises `FetchError` when it is no manifest, or one that this program cannot read.

        Names with a slash or a dot before them are refused: they could lie anywhere.
        """
        try:
            said = json.loads(raw)
            if (said["format"], said["version"]) != (FORMAT, VERSION):
                raise FetchError(f"{where}: is of another format than '{FORMAT}' {VERSION}; which program made it?")
            files = {str(name): FileEntry(int(one["bytes"]), str(one["sha256"])) for name, one in said["files"].items()}
            if not all(re.fullmatch(r"\w[\w.-]*", name) and one.bytes >= 0 for name, one in files.items()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchError(f"{where}: is not the manifest of a packed set, or is damaged") from None
        return cls(raw, said, files)

    def files_to_fetch(self, index_only: bool) -> dict[str, FileEntry]:
        """Return the files to fetch: all, or those without images. Small ones first."""
        return {name: one for name, one in sorted(self.files.items()) if not (index_only and is_shard(name))}

    def matches(self, target_bytes: bytes) -> bool:
        """Whether the manifest of a target is this one, all fetched or only the index."""
        try:
            said = json.loads(target_bytes)
            return bool({key: one for key, one in said.items() if key != FETCHED_KEY} == self.fields)
        except (ValueError, AttributeError):
            return False

    def bytes_for_target(self, index_only: bool) -> bytes:
        """Return the manifest for a target."""
        return (json.dumps({**self.fields, FETCHED_KEY: "index"}, indent=1) + "\n").encode() if index_only else self.raw


def is_shard(name: str) -> bool:
    """Whether a file of a packed set holds images."""
    return name.endswith(".bin")
