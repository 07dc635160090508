"""`Source`, the interface of a place that packed sets are fetched from, and `FolderSource`; S3 is another source.

A set is train/ and val/. Each has shards, index.npy, names.txt, and a manifest.json that lists them with size and
SHA-256 and was written last. Imports no torch and no numpy.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from train.data.manifest import FORMAT, MANIFEST_FILE, VERSION, FetchError, Manifest, ManifestError, OtherVersion
from train.tools.errors import one_line_error

COPY_CHUNK_BYTES = 4 << 20
ByteCallback = Callable[[int], object]


class Source(Protocol):
    """The root of a packed set. Repeats what may succeed later, where that makes sense for this kind of place."""

    name: str

    def read_small_file(self, path: str) -> bytes | None:
        """Return the content of a small file, or None when it does not exist. Raises `FetchError`."""

    def download(self, path: str, file: Path, on_bytes: ByteCallback) -> None:
        """Copy a file of the set to a local file, which is replaced. Raises `FetchError`, `OSError`.

        `on_bytes` is called with each number of bytes that have arrived. An exception that it raises ends the copy.
        """

    def describe_missing(self, split: str) -> str:
        """Return one line for a split without a manifest: what is there instead, and what to type."""


class FolderSource:
    """A packed set in a folder, for example a shared one. The kernel repeats what fails on a network file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)

    def read_small_file(self, path: str) -> bytes | None:
        """Return the content of a small file, or None when it does not exist."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise FetchError(one_line_error(error)) from error

    def download(self, path: str, file: Path, on_bytes: ByteCallback) -> None:
        """Copy a file of the set to a local file."""
        with (self.root / path).open("rb") as original, file.open("wb") as copy:
            while chunk := original.read(COPY_CHUNK_BYTES):
                copy.write(chunk)
                on_bytes(len(chunk))

    def describe_missing(self, split: str) -> str:
        """Return one line for a split without a manifest: what is there instead, and what to type."""
        folder = self.root / split
        if not self.root.is_dir():
            return f"{self.root}: there is no such folder"
        if folder.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(folder)):
            pack_command = f"imgnet-cluster data pack {self.root} {self.root}-packed"
            return f"{self.root}: has single files, but fetch takes a packed set; to make one: {pack_command}"
        return f"{folder / MANIFEST_FILE}: is not there: no packed set, or packing is not finished"


def fetch_manifest(source: Source, split: str) -> Manifest:
    """Return the manifest of a split. Raises `FetchError` when it is missing or unusable."""
    path = f"{split}/{MANIFEST_FILE}"
    content = source.read_small_file(path)
    if content is None:
        raise FetchError(source.describe_missing(split))
    try:
        return Manifest.parse(content)
    except OtherVersion:
        raise FetchError(
            f"{source.name}/{path}: is of another format than {FORMAT!r} version {VERSION}; pack the set again with "
            "this version of imgnet-cluster"
        ) from None
    except ManifestError:
        raise FetchError(f"{source.name}/{path}: is not the manifest of a packed set, or is damaged") from None
