"""The state of a split's folder while it is being fetched: complete files, and those that are being received.

    <split>/shard-00000.bin         complete, its checksum verified     <split>/shard-00001.bin.part    being received
    <split>/.fetch.jsonl            the journal: a line for each complete file; removed at the end
    <split>/manifest.json           written last

A file that was being received when the fetch ended is fetched again as a whole. The journal names each file together
with its checksum. So data of another version of the source is ignored.
"""

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from train.data.manifest import MANIFEST_FILE, FetchError, FileEntry, Manifest, ManifestError
from train.tools.filesystem import read_json_lines, write_atomic

JOURNAL_FILE = ".fetch.jsonl"
PARTIAL_SUFFIX = ".part"
READ_CHUNK_BYTES = 1 << 20


class PartialSplit:
    """A split's folder and what it lacks: `missing_files` are to be fetched, `complete_files` need nothing."""

    def __init__(self, folder: Path, manifest: Manifest, index_only: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.index_only = index_only
        self.target_manifest = replace(manifest, fetched="index") if index_only else manifest
        self.files = manifest.files_to_fetch(index_only)
        self._lock = threading.Lock()
        known_checksums = self._read_journal()
        self.complete_files = {
            name
            for name, entry in self.files.items()
            if known_checksums.get(name) == entry.sha256 and self._has_full_size(name, entry)
        }
        self.missing_files = [name for name in self.files if name not in self.complete_files]
        self._unknown_files = sorted(known_checksums.keys() - self.files.keys())

    def _read_journal(self) -> dict[str, str]:
        """Return the checksums of complete files by name.

        The manifest of an earlier, finished fetch counts as well: it lists files that were complete.
        """
        checksums = {
            row["file"]: row["sha256"] for row in read_json_lines(self.folder / JOURNAL_FILE, "file", "sha256")
        }
        manifest = self._written_manifest()
        if manifest:
            files = manifest.files_to_fetch(not manifest.has_images)
            checksums |= {name: entry.sha256 for name, entry in files.items()}
        return checksums

    def _written_manifest(self) -> Manifest | None:
        """Return the manifest of an earlier, finished fetch; None without one, or when it is damaged."""
        with suppress(OSError, ManifestError):
            return Manifest.parse((self.folder / MANIFEST_FILE).read_bytes())
        return None

    def _has_full_size(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.bytes

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: the manifest is there, and every file that it lists."""
        written = self._written_manifest()
        if written is None or self.missing_files or replace(written, fetched=self.manifest.fetched) != self.manifest:
            return False
        return written == self.manifest or (self.index_only and not any(self.folder.glob("*.bin")))

    @property
    def bytes_present(self) -> int:
        """The size of the complete files."""
        return sum(self.files[name].bytes for name in self.complete_files)

    @property
    def bytes_total(self) -> int:
        """The size of all files to fetch."""
        return sum(entry.bytes for entry in self.files.values())

    def prepare_folder(self) -> None:
        """Create the folder, and remove what will not be used. Raises `FetchError`, `OSError`.

        Removed are files of another version of the source, and files that were received in part.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        subfolder = next((entry.name for entry in os.scandir(self.folder) if entry.is_dir()), None)
        if subfolder is not None:
            raise FetchError(f"{self.folder}: is not a packed set, it has {subfolder}/; fetch into another folder")
        written = self._written_manifest()
        for name in sorted(self.complete_files) if written else ():  # only that manifest records them
            self.record(name)
        if written is None or replace(written, fetched=self.manifest.fetched) != self.manifest:
            (self.folder / MANIFEST_FILE).unlink(missing_ok=True)
        # With the index only, shards of an earlier fetch go: a reader needs all of them or none.
        shards = [path.name for path in self.folder.glob("*.bin")] if self.index_only else []
        partial_files = [path.name for path in self.folder.glob(f"*{PARTIAL_SUFFIX}")]
        for name in {*self._unknown_files, *self.missing_files, *shards, *partial_files}:
            (self.folder / name).unlink(missing_ok=True)

    def partial_path(self, name: str) -> Path:
        """Return the path of a file while it is incomplete."""
        return self.folder / (name + PARTIAL_SUFFIX)

    def record(self, name: str) -> None:
        """Append to the journal that a file is complete."""
        line = json.dumps({"file": name, "sha256": self.files[name].sha256}) + "\n"
        with self._lock, (self.folder / JOURNAL_FILE).open("a") as file:
            file.write(line)

    def verify_and_commit(self, name: str) -> bool:
        """Give a file its final name if its checksum is right. Returns whether it is."""
        partial_path = self.partial_path(name)
        digest = hashlib.sha256()
        with partial_path.open("r+b") as file:
            os.fsync(file.fileno())
            while chunk := file.read(READ_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != self.files[name].sha256:
            return False
        self.record(name)
        partial_path.replace(self.folder / name)
        return True

    def write_manifest(self) -> None:
        """Write the manifest, because all files are complete, and remove the journal."""
        write_atomic(self.folder / MANIFEST_FILE, self.target_manifest.to_bytes())
        (self.folder / JOURNAL_FILE).unlink(missing_ok=True)
