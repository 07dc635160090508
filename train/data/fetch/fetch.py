"""Packed sets brought to this machine's own disk before the training: in ranges, several at once, checked, resumed.

Once per machine: who comes second waits, and finds all there. A fetch that is killed goes on where it stopped; a file
gets its name when its checksum is right, a split its manifest when all files have theirs. Imports no torch.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.data.manifest import SPLITS, FetchError
from train.tools.filesystem import locked

from .download import ByteCounter, ProgressCallback, SplitDownload, fetch_manifest
from .resume import PartialSplit
from .sources import Source

RANGE_BYTES = 64 << 20  # bytes of a request: smaller ones cost S3 more than they gain, larger ones share out badly
MAX_PARALLEL_REQUESTS = 8
STALL_TIMEOUT_SECONDS = 120.0  # seconds without a byte
LOCK_FILE = ".fetch.lock"
LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class SetToFetch:
    """A set to fetch: the root of a packed set, and the folder that is to be its copy, with the images or without."""

    source: Source
    target: Path
    index_only: bool = False


@dataclass(frozen=True)
class FetchResult:
    """What a fetch has done: bytes that came now, bytes that were there before, seconds."""

    fetched_bytes: int
    existing_bytes: int
    seconds: float


def fetch_sets(
    sets: Sequence[SetToFetch],
    *,
    range_bytes: int = RANGE_BYTES,
    max_parallel: int = MAX_PARALLEL_REQUESTS,
    stall_timeout: float = STALL_TIMEOUT_SECONDS,
    progress: ProgressCallback | None = None,
    log: LogFunction = print,
) -> FetchResult:
    """Fetch sets in this order, each to its end before the next.

    `patience` is for how many seconds a range is asked for again while no byte of it comes. Raises `FetchError`, and
    what else a source raises; what has come stays, and the same call goes on from there.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as held:
        for part in sets:  # before anything is made here
            for split in SPLITS:
                fetch_manifest(part.source, split, stall_timeout)
        for target in sorted({one.target for one in sets}):
            held.enter_context(_lock_target(target, log))
        todo, there, total = list[SplitDownload](), 0, 0
        for part in sets:
            pulls = [_make_download(part, split, range_bytes, max_parallel, stall_timeout) for split in SPLITS]
            todo += [one for one in pulls if not one.partial.is_complete]
            there += sum(one.partial.bytes_present for one in pulls)
            total += sum(one.partial.bytes_total for one in pulls)
            if all(one.partial.is_complete for one in pulls):
                more = f"every byte: imgnet-cluster data verify {part.target}"
                log(f"{part.target}: is there already, by its sizes; nothing to fetch ({more})")
        for one in todo:
            one.partial.prepare_folder()
        _check_disk_space([one.partial for one in todo])
        count = ByteCounter(there, total, progress)
        for one in todo:
            one.run(count)
    return FetchResult(count.done - there, there, time.monotonic() - begun)


def _make_download(
    set_to_fetch: SetToFetch, split: str, range_bytes: int, max_parallel: int, stall_timeout: float
) -> SplitDownload:
    partial = PartialSplit(
        set_to_fetch.target / split, fetch_manifest(set_to_fetch.source, split, stall_timeout), set_to_fetch.index_only
    )
    return SplitDownload(set_to_fetch.source, split, partial, range_bytes, max_parallel, stall_timeout)


@contextlib.contextmanager
def _lock_target(target: Path, log: LogFunction) -> Iterator[None]:
    """Hold a target: of several processes of a machine one fetches."""
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(target / LOCK_FILE, 0))
        except BlockingIOError:
            log(f"another process is fetching {target}: waiting for it")
            held.enter_context(locked(target / LOCK_FILE))
        yield


def _check_disk_space(partial_splits: Sequence[PartialSplit]) -> None:
    """Raise `FetchError` when a disk has not the room for what is missing on it."""
    for disk in {one.folder.stat().st_dev for one in partial_splits}:
        mine = [one for one in partial_splits if one.folder.stat().st_dev == disk]
        need, free = sum(one.bytes_total - one.bytes_present for one in mine), shutil.disk_usage(mine[0].folder).free
        if need > free:
            raise FetchError(
                f"{mine[0].folder.parent}: its disk has {format_bytes(free)} free, and {format_bytes(need)} are still to be fetched; "
                "make room, or take another folder"
            )


def format_bytes(byte_count: int) -> str:
    """Return a number of bytes as a person reads it."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if byte_count >= 10**power:
            number = byte_count / 10**power
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
    return f"{byte_count} bytes"
