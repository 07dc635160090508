"""Fetches packed sets to the machine's own disk before training: several files at once, verified and resumable.

A set is fetched once per machine: a second process waits, and finds everything there. A fetch that is killed keeps its
complete files; those that were being received are fetched again. A file gets its name when its checksum is verified, a
split its manifest when all files are complete. Imports no torch.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.data.manifest import SPLITS, FetchError
from train.tools.filesystem import locked
from train.tools.process_log import Progress, no_progress

from .download import ByteCounter, SplitDownload, fetch_manifest
from .resume import PartialSplit
from .sources import Source

MAX_PARALLEL_FILES = 8
STALL_TIMEOUT_SECONDS = 120.0  # without a received byte
LOCK_FILE = ".fetch.lock"
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
    stall_timeout: float = STALL_TIMEOUT_SECONDS,
    progress: Progress = no_progress,
    log: LogFunction = print,
) -> FetchResult:
    """Fetch sets in this order, each completely before the next.

    A file is retried until none of its bytes is received for `stall_timeout` seconds. Raises `FetchError`, and other
    errors of a source. Complete files stay, and the same call fetches the others.
    """
    start_time = time.monotonic()
    with contextlib.ExitStack() as locks:
        for set_to_fetch in sets:  # before any folder is created
            for split in SPLITS:
                fetch_manifest(set_to_fetch.source, split, stall_timeout)
        for target in sorted({set_to_fetch.target for set_to_fetch in sets}):
            locks.enter_context(_lock_target(target, log))
        pending_downloads: list[SplitDownload] = []
        existing_bytes = total_bytes = 0
        for set_to_fetch in sets:
            downloads = [_make_download(set_to_fetch, split, max_parallel, stall_timeout) for split in SPLITS]
            incomplete_downloads = [download for download in downloads if not download.partial.is_complete]
            pending_downloads += incomplete_downloads
            existing_bytes += sum(download.partial.bytes_present for download in downloads)
            total_bytes += sum(download.partial.bytes_total for download in downloads)
            if not incomplete_downloads:
                target = set_to_fetch.target
                log(
                    f"{target}: is there already, by its file sizes; nothing to fetch (to check every byte: "
                    f"imgnet-cluster data verify {target})"
                )
        for download in pending_downloads:
            download.partial.prepare_folder()
        _check_disk_space([download.partial for download in pending_downloads])
        counter = ByteCounter(existing_bytes, total_bytes, progress)
        for download in pending_downloads:
            download.run(counter)
    return FetchResult(counter.done - existing_bytes, existing_bytes, time.monotonic() - start_time)


def _make_download(set_to_fetch: SetToFetch, split: str, max_parallel: int, stall_timeout: float) -> SplitDownload:
    manifest = fetch_manifest(set_to_fetch.source, split, stall_timeout)
    partial = PartialSplit(set_to_fetch.target / split, manifest, set_to_fetch.index_only)
    return SplitDownload(set_to_fetch.source, split, partial, max_parallel, stall_timeout)


@contextlib.contextmanager
def _lock_target(target: Path, log: LogFunction) -> Iterator[None]:
    """Hold the lock of a target folder, so that only one process of a machine fetches into it."""
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(locked(target / LOCK_FILE, 0))
        except BlockingIOError:
            log(f"another process is fetching {target}: waiting for it")
            locks.enter_context(locked(target / LOCK_FILE))
        yield


def _check_disk_space(partial_splits: Sequence[PartialSplit]) -> None:
    """Raise `FetchError` when a disk does not have room for what is still to be fetched to it."""
    for device in {partial.folder.stat().st_dev for partial in partial_splits}:
        partials_on_disk = [partial for partial in partial_splits if partial.folder.stat().st_dev == device]
        folder = partials_on_disk[0].folder
        needed_bytes = sum(partial.bytes_total - partial.bytes_present for partial in partials_on_disk)
        free_bytes = shutil.disk_usage(folder).free
        if needed_bytes > free_bytes:
            raise FetchError(
                f"{folder.parent}: its disk has {format_bytes(free_bytes)} free, but {format_bytes(needed_bytes)} are "
                "still to be fetched; make room, or give another folder"
            )


def format_bytes(byte_count: int) -> str:
    """Return a number of bytes in a readable unit, such as 1.2 kB or 140 GB."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if byte_count >= 10**power:
            number = byte_count / 10**power
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
    return f"{byte_count} bytes"
