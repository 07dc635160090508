"""The state of a split's folder while it is being fetched: complete files, and received ranges of the others.

    <split>/shard-00000.bin         complete, its checksum verified     <split>/shard-00001.bin.part    with holes
    <split>/.fetch.jsonl            the journal: a line per received range and per complete file; removed at the end
    <split>/manifest.json           written last

The journal names each file together with its checksum. So data of another version of the source is ignored.
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
READ_CHUNK_BYTES = 1 << 20

Ranges = list[tuple[int, int]]  # (begin, end) in bytes


class PartialSplit:
    """A split's folder and what it lacks.

    `complete_files` are the names of files that need nothing. `received_ranges` are the ranges of each other file that
    have been received.
    """

    def __init__(self, folder: Path, manifest: SourceManifest, index_only: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.index_only = index_only
        self.files = manifest.files_to_fetch(index_only)
        self._lock = threading.Lock()
        known_checksums, known_ranges = self._read_journal()
        self.complete_files = {
            name
            for name, entry in self.files.items()
            if known_checksums.get(name) == entry.sha256 and self._has_full_size(name, entry)
        }
        self.received_ranges = {
            name: self._usable_ranges(name, known_ranges) for name in self.files if name not in self.complete_files
        }
        known_names = known_checksums.keys() | {name for name, _ in known_ranges}
        self._unknown_files = sorted(known_names - self.files.keys())

    def _read_journal(self) -> tuple[dict[str, str], dict[tuple[str, str], Ranges]]:
        """Return the checksums of complete files by name, and the received ranges by (name, checksum).

        The manifest of an earlier, finished fetch counts as well: it lists files that were complete.
        """
        checksums = dict[str, str]()
        ranges = dict[tuple[str, str], Ranges]()
        for row in read_json_lines(self.folder / JOURNAL_FILE, "file", "sha256"):
            if "begin" in row:
                ranges.setdefault((row["file"], row["sha256"]), []).append((int(row["begin"]), int(row["end"])))
            else:
                checksums[row["file"]] = row["sha256"]
        with suppress(OSError, FetchError):
            manifest = SourceManifest.parse((self.folder / MANIFEST_FILE).read_bytes(), str(self.folder))
            files = manifest.files_to_fetch(FETCHED_KEY in manifest.fields)
            checksums |= {name: entry.sha256 for name, entry in files.items()}
        return checksums, ranges

    def _has_full_size(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.bytes

    def _usable_ranges(self, name: str, known_ranges: dict[tuple[str, str], Ranges]) -> Ranges:
        """Return the ranges that lie within the partial file, which may be shorter after a power cut."""
        path = self.partial_path(name)
        size = path.stat().st_size if path.is_file() else 0
        return [(begin, end) for begin, end in known_ranges.get((name, self.files[name].sha256), []) if end <= size]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: the manifest is there, and every file that it lists."""
        try:
            written_manifest = (self.folder / MANIFEST_FILE).read_bytes()
        except OSError:
            return False
        if not self.manifest.matches(written_manifest) or len(self.complete_files) < len(self.files):
            return False
        return written_manifest == self.manifest.raw or (self.index_only and not any(self.folder.glob("*.bin")))

    @property
    def bytes_present(self) -> int:
        """How many bytes have been received already."""
        return self.bytes_total - sum(
            missing_bytes(self.files[name].bytes, ranges) for name, ranges in self.received_ranges.items()
        )

    @property
    def bytes_total(self) -> int:
        """The size of all files to fetch."""
        return sum(entry.bytes for entry in self.files.values())

    def prepare_folder(self) -> None:
        """Create the folder, and remove files of another version of the source. Raises `FetchError`, `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        subfolder = next((entry.name for entry in os.scandir(self.folder) if entry.is_dir()), None)
        if subfolder is not None:
            raise FetchError(f"{self.folder}: is not a packed set, it has {subfolder}/; fetch into another folder")
        manifest_path = self.folder / MANIFEST_FILE
        if manifest_path.exists():
            for name in sorted(self.complete_files):  # only the manifest, which may be removed below, records them
                self.record(name)
            if not self.manifest.matches(manifest_path.read_bytes()):
                manifest_path.unlink()
        # With the index only, shards of an earlier fetch go: a reader needs all of them or none.
        shards = [path.name for path in self.folder.glob("*.bin")] if self.index_only else []
        for name in {*self._unknown_files, *self.received_ranges, *shards}:
            (self.folder / name).unlink(missing_ok=True)
        for name in self._unknown_files:
            self.partial_path(name).unlink(missing_ok=True)

    def partial_path(self, name: str) -> Path:
        """Return the path of a file while it is incomplete."""
        return self.folder / (name + PARTIAL_SUFFIX)

    def record(self, name: str, **byte_range: int) -> None:
        """Append to the journal that a range (`begin`, `end`) was received, or without one that a file is complete."""
        line = json.dumps({"file": name, "sha256": self.files[name].sha256, **byte_range}) + "\n"
        with self._lock, (self.folder / JOURNAL_FILE).open("a") as file:
            file.write(line)

    def verify_and_commit(self, name: str) -> bool:
        """Give a file its final name if its checksum is right. Returns whether it is."""
        partial_path = self.partial_path(name)
        entry = self.files[name]
        digest = hashlib.sha256()
        with partial_path.open("r+b") as file:
            file.truncate(entry.bytes)
            os.fsync(file.fileno())
            while chunk := file.read(READ_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != entry.sha256:
            return False
        self.record(name)
        partial_path.replace(self.folder / name)
        return True

    def write_manifest(self) -> None:
        """Write the manifest, because all files are complete, and remove the journal."""
        write_atomic(self.folder / MANIFEST_FILE, self.manifest.bytes_for_target(self.index_only))
        (self.folder / JOURNAL_FILE).unlink(missing_ok=True)


def missing_ranges(size: int, received: Iterable[tuple[int, int]], max_length: int) -> Iterator[tuple[int, int]]:
    """Yield the (begin, end) of the ranges missing of `size` bytes, each at most `max_length` long."""
    position = 0
    for begin, end in sorted([*received, (size, size)]):
        while position < begin:
            range_end = min(position + max_length, begin)
            yield position, range_end
            position = range_end
        position = max(position, end)


def missing_bytes(size: int, received: Iterable[tuple[int, int]]) -> int:
    """Return how many of `size` bytes are missing."""
    return sum(end - begin for begin, end in missing_ranges(size, received, size or 1))
