"""A split's folder on the way to being fetched: which files are whole, and which ranges of the others have come.

    <split>/shard-00000.bin         whole, its checksum right       <split>/shard-00001.bin.part    with holes
    <split>/.fetch.jsonl            a line for each range, and for each whole file; gone when all is there
    <split>/manifest.json           last

Lines name a file by its checksum too: what is left of another state of the source counts for nothing.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from train.data.manifest import FETCHED_KEY, MANIFEST_FILE, FetchError, FileEntry, SourceManifest
from train.tools.filesystem import read_json_lines, write_atomic

JOURNAL_FILE = ".fetch.jsonl"
PARTIAL_SUFFIX = ".part"


class PartialSplit:
    """One folder and what is missing in it. `whole` files need nothing, `came` are the (begin, end) of the others."""

    def __init__(self, folder: Path, manifest: SourceManifest, index_only: bool) -> None:
        self.folder, self.manifest, self.index_only = folder, manifest, index_only
        self.files = manifest.files_to_fetch(index_only)
        self._lock = threading.Lock()
        known, ranges = self._read_journal()
        same = {name for name, one in self.files.items() if known.get(name) == one.sha256}
        self.complete_files = {name for name in same if self._has_full_size(name, self.files[name])}
        self.received_ranges = {
            name: self._usable_ranges(name, ranges) for name in self.files if name not in self.complete_files
        }
        self._unknown_files = sorted((known.keys() | {name for name, _ in ranges}) - self.files.keys())

    def _read_journal(self) -> tuple[dict[str, str], dict[tuple[str, str], list[tuple[int, int]]]]:
        """The checksums of files that were whole, and the ranges that came by file and checksum."""
        known, ranges = dict[str, str](), dict[tuple[str, str], list[tuple[int, int]]]()
        for row in read_json_lines(self.folder / JOURNAL_FILE, "file", "sha256"):
            if "begin" in row:
                ranges.setdefault((row["file"], row["sha256"]), []).append((int(row["begin"]), int(row["end"])))
            else:
                known[row["file"]] = row["sha256"]
        with suppress(OSError, FetchError):
            old = SourceManifest.parse((self.folder / MANIFEST_FILE).read_bytes(), str(self.folder))
            known |= {name: one.sha256 for name, one in old.files_to_fetch(FETCHED_KEY in old.fields).items()}
        return known, ranges

    def _has_full_size(self, name: str, file: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == file.bytes

    def _usable_ranges(self, name: str, ranges: dict[tuple[str, str], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        part = self.folder / (name + PARTIAL_SUFFIX)
        size = part.stat().st_size if part.is_file() else 0
        return [one for one in ranges.get((name, self.files[name].sha256), []) if one[1] <= size]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is to be done: the manifest is there, and all that it promises."""
        try:
            written = (self.folder / MANIFEST_FILE).read_bytes()
        except OSError:
            return False
        if not self.manifest.matches(written) or len(self.complete_files) < len(self.files):
            return False
        return written == self.manifest.raw or (self.index_only and not any(self.folder.glob("*.bin")))

    @property
    def bytes_present(self) -> int:
        """How many bytes are there already."""
        return self.bytes_total - sum(
            missing_bytes(self.files[name].bytes, came) for name, came in self.received_ranges.items()
        )

    @property
    def bytes_total(self) -> int:
        """How many bytes there will be."""
        return sum(one.bytes for one in self.files.values())

    def prepare_folder(self) -> None:
        """Make the folder, and remove what is of another state of the source. Raises `FetchError`, `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        other = next((one.name for one in os.scandir(self.folder) if one.is_dir()), None)
        if other is not None:
            raise FetchError(f"{self.folder}: is not of a packed set, it has {other}/; fetch into another folder")
        manifest = self.folder / MANIFEST_FILE
        for name in sorted(self.complete_files) if manifest.exists() else []:  # it is what knows of them
            self.record(name)
        if manifest.exists() and not self.manifest.matches(manifest.read_bytes()):
            manifest.unlink()
        images = [one.name for one in self.folder.glob("*.bin")] if self.index_only else []  # some without the others
        for name in {*self._unknown_files, *self.received_ranges, *images}:
            (self.folder / name).unlink(missing_ok=True)
        for name in self._unknown_files:
            self.partial_path(name).unlink(missing_ok=True)

    def partial_path(self, name: str) -> Path:
        """Return where a file is while it is not whole."""
        return self.folder / (name + PARTIAL_SUFFIX)

    def record(self, name: str, **byte_range: int) -> None:
        """Write down that a range (`begin`, `end`) has come, or that a file is whole."""
        line = json.dumps({"file": name, "sha256": self.files[name].sha256, **byte_range}) + "\n"
        with self._lock, (self.folder / JOURNAL_FILE).open("a") as file:
            file.write(line)

    def verify_and_commit(self, name: str) -> bool:
        """Make a file whole when its checksum is right."""
        part, file = self.partial_path(name), self.files[name]
        digest = hashlib.sha256()
        with part.open("r+b") as content:
            content.truncate(file.bytes)
            os.fsync(content.fileno())
            while piece := content.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest() != file.sha256:
            return False
        self.record(name)
        part.replace(self.folder / name)
        return True

    def write_manifest(self) -> None:
        """Write the manifest: all is there."""
        write_atomic(self.folder / MANIFEST_FILE, self.manifest.bytes_for_target(self.index_only))
        (self.folder / JOURNAL_FILE).unlink(missing_ok=True)


def missing_ranges(size: int, received: Iterable[tuple[int, int]], max_length: int) -> Iterator[tuple[int, int]]:
    """Yield the (begin, end) of what is missing of `size` bytes, each at most `step` long."""
    at = 0
    for begin, end in sorted([*received, (size, size)]):
        while at < begin:
            yield at, min(at + max_length, begin)
            at = min(at + max_length, begin)
        at = max(at, end)


def missing_bytes(size: int, received: Iterable[tuple[int, int]]) -> int:
    """Return how many of `size` bytes are missing."""
    return sum(end - begin for begin, end in missing_ranges(size, received, size or 1))
