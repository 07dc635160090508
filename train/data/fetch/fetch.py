"""Fetches packed sets to the machine's own disk before training: several files at once, each verified.

    <split>/shard-00000.bin   complete, its checksum verified     <split>/shard-00001.bin.part   being received
    <split>/.fetch.json       the manifest, while files are missing: the complete files are of this version
    <split>/manifest.json     the manifest, once all files are complete

A fetch that was interrupted keeps its complete files, and fetches the others from their start. A set is fetched once
per machine: a second process waits, and finds everything there. Imports no torch.
"""

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from train.data.manifest import MANIFEST_FILE, PACK_LOCK_FILE, SPLITS, FetchError, FileEntry, Manifest, ManifestError
from train.tools.errors import one_line_error
from train.tools.files import FULL_DISK_ERRORS, SHARED_LOCK, locked, write_atomic
from train.tools.process_log import Progress, no_progress

from .sources import ByteCallback, Source, fetch_manifest

MAX_PARALLEL_FILES = 8
LOCK_FILE = ".fetch.lock"
UNFINISHED_MANIFEST_FILE = ".fetch.json"
PARTIAL_SUFFIX = ".part"
LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class SetToFetch:
    """A packed set to fetch: its source, the target folder, and whether only the index is fetched, without images."""

    source: Source
    target: Path
    index_only: bool = False


@dataclass(frozen=True)
class FetchResult:
    """The result of a fetch: bytes received now, bytes that the target held before, and seconds."""

    fetched_bytes: int
    existing_bytes: int
    seconds: float


def fetch_sets(
    sets: Sequence[SetToFetch],
    *,
    max_parallel: int = MAX_PARALLEL_FILES,
    progress: Progress = no_progress,
    log: LogFunction = print,
) -> FetchResult:
    """Fetch sets in this order. Raises `FetchError`, and errors of a source; a repeated call keeps complete files."""
    start_time = time.monotonic()
    # Before any folder is created.
    manifests = [{split: fetch_manifest(part.source, split) for split in SPLITS} for part in sets]
    with contextlib.ExitStack() as locks:
        for target in sorted({part.target for part in sets}):
            _lock_target(target, locks, log)
        split_fetches: list[SplitFetch] = []
        for part, manifest_by_split in zip(sets, manifests, strict=True):
            fetches = [SplitFetch(part, split, manifest) for split, manifest in manifest_by_split.items()]
            split_fetches += fetches
            if all(fetch.is_complete for fetch in fetches):
                log(
                    f"{part.target}: is there already, by its file sizes; nothing to fetch (to check every byte: "
                    f"imgnet-cluster data verify {part.target})"
                )
        incomplete = [fetch for fetch in split_fetches if not fetch.is_complete]
        for fetch in incomplete:
            fetch.prepare_folder()
        _check_disk_space(incomplete)
        total_bytes = sum(entry.bytes for fetch in split_fetches for entry in fetch.files.values())
        missing_bytes = sum(fetch.missing_bytes for fetch in split_fetches)
        existing_bytes = done_bytes = total_bytes - missing_bytes
        lock = threading.Lock()

        def on_bytes(count: int) -> None:
            nonlocal done_bytes
            with lock:
                done_bytes += count
                progress(done_bytes, total_bytes)

        for fetch in incomplete:
            fetch.run(max_parallel, on_bytes)
    return FetchResult(missing_bytes, existing_bytes, time.monotonic() - start_time)


class SplitFetch:
    """The fetch of one split into its folder. `files` are all files to fetch, `missing_files` those not there yet."""

    def __init__(self, set_to_fetch: SetToFetch, split: str, manifest: Manifest) -> None:
        self.source = set_to_fetch.source
        self.split = split
        self.folder = set_to_fetch.target / split
        self.files = manifest.files_to_fetch(set_to_fetch.index_only)
        self.target_manifest = replace(manifest, fetched="index") if set_to_fetch.index_only else manifest
        finished = _read_manifest(self.folder / MANIFEST_FILE)
        earlier = finished or _read_manifest(self.folder / UNFINISHED_MANIFEST_FILE)
        # The files whose checksums an earlier fetch has verified, or will verify before they get their names.
        self.earlier_files = earlier.files_to_fetch(not earlier.has_images) if earlier else {}
        self.missing_files = {name: entry for name, entry in self.files.items() if not self._has_file(name, entry)}
        self.is_complete = not self.missing_files and finished in (manifest, self.target_manifest)
        self.replaces_other = finished not in (None, manifest, self.target_manifest)

    def _has_file(self, name: str, entry: FileEntry) -> bool:
        path = self.folder / name
        return self.earlier_files.get(name) == entry and path.is_file() and path.stat().st_size == entry.bytes

    @property
    def missing_bytes(self) -> int:
        """The size of the files that are not there yet."""
        return sum(entry.bytes for entry in self.missing_files.values())

    def prepare_folder(self) -> None:
        """Create the folder. Remove incomplete files, and files of other versions of the source.

        With the index only, shards of an earlier fetch go too: a reader needs all of them or none. Raises `FetchError`,
        also for another set that was packed here: it may be the only copy of its images.
        """
        if self.replaces_other and (self.folder.parent / PACK_LOCK_FILE).exists():
            raise FetchError(
                f"{self.folder}: has another set, which was packed here; fetch into another folder, or remove that set"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        subfolder = next((entry.name for entry in os.scandir(self.folder) if entry.is_dir()), None)
        if subfolder is not None:
            raise FetchError(f"{self.folder}: is not a packed set, it has {subfolder}/; fetch into another folder")
        files = [*self.folder.glob("*.bin"), *self.folder.glob(f"*{PARTIAL_SUFFIX}*")]
        names = {*self.earlier_files, *self.files, *(file.name for file in files)}
        for name in names - (self.files.keys() - self.missing_files.keys()):
            (self.folder / name).unlink(missing_ok=True)
        write_atomic(self.folder / UNFINISHED_MANIFEST_FILE, self.target_manifest.to_bytes())
        (self.folder / MANIFEST_FILE).unlink(missing_ok=True)

    def run(self, max_parallel: int, on_bytes: ByteCallback) -> None:
        """Fetch all missing files, `max_parallel` at once, then write the manifest. The first error ends the others."""
        has_failed = threading.Event()

        def on_bytes_of_file(count: int) -> None:
            if has_failed.is_set():
                raise FetchError("another file could not be fetched")
            on_bytes(count)

        with ThreadPoolExecutor(max_parallel) as pool:
            try:
                futures = [pool.submit(self._fetch_file, name, on_bytes_of_file) for name in self.missing_files]
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                has_failed.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        (self.folder / UNFINISHED_MANIFEST_FILE).replace(self.folder / MANIFEST_FILE)

    def _fetch_file(self, name: str, on_bytes: ByteCallback) -> None:
        """Fetch a file under its partial name, verify its checksum, and give it its name."""
        partial_path = self.folder / (name + PARTIAL_SUFFIX)
        try:
            self.source.download(f"{self.split}/{name}", partial_path, on_bytes)
            with partial_path.open("r+b") as file:
                os.fsync(file.fileno())
                is_correct = hashlib.file_digest(file, "sha256").hexdigest() == self.files[name].sha256
            if not is_correct:
                partial_path.unlink()
                raise FetchError(
                    f"{self.source.name}/{self.split}/{name}: its checksum is not that of the manifest: the source is "
                    "damaged, or is being written to; fetch again, and to check it: imgnet-cluster data verify"
                )
            partial_path.replace(self.folder / name)
        except OSError as error:
            make_room = "make room, and " if error.errno in FULL_DISK_ERRORS else ""
            raise FetchError(
                f"{self.folder / name}: {one_line_error(error)}; {make_room}fetch again: complete files are kept"
            ) from error


def _read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of an earlier fetch; None without one, or when it is damaged."""
    with contextlib.suppress(OSError, ManifestError):
        return Manifest.parse(path.read_bytes())
    return None


def _lock_target(target: Path, locks: contextlib.ExitStack, log: LogFunction) -> None:
    """Take the lock of a target folder, so that only one process of a machine fetches into it."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        locks.enter_context(locked(target / LOCK_FILE, 0, SHARED_LOCK))
    except BlockingIOError:
        log(f"another process is fetching {target}: waiting for it")
        locks.enter_context(locked(target / LOCK_FILE, permissions=SHARED_LOCK))


def _check_disk_space(split_fetches: Sequence[SplitFetch]) -> None:
    fetches_by_disk = defaultdict[int, list[SplitFetch]](list)
    for fetch in split_fetches:
        fetches_by_disk[fetch.folder.stat().st_dev].append(fetch)
    for fetches in fetches_by_disk.values():
        folder = fetches[0].folder.parent
        needed_bytes = sum(fetch.missing_bytes for fetch in fetches)
        free_bytes = shutil.disk_usage(folder).free
        if needed_bytes > free_bytes:
            raise FetchError(
                f"{folder}: its disk has {format_bytes(free_bytes)} free, but {format_bytes(needed_bytes)} are still "
                "to be fetched; make room, or give another folder"
            )


def format_bytes(byte_count: int) -> str:
    """Return a number of bytes in a readable unit, such as 1.2 kB or 140 GB."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if byte_count >= 10**power:
            number = byte_count / 10**power
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
    return f"{byte_count} bytes"
