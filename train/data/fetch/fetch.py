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

from .download import Count, Progress, Pull, read_manifest
from .resume import Partial
from .sources import Source

RANGE = 64 << 20  # bytes of a request: smaller ones cost S3 more than they gain, larger ones share out badly
AT_ONCE = 8
PATIENCE = 120.0  # seconds without a byte
LOCK = ".fetch.lock"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A set to fetch: the root of a packed set, and the folder that is to be its copy, with the images or without."""

    source: Source
    target: Path
    index_only: bool = False


@dataclass(frozen=True)
class Fetched:
    """What a fetch has done: bytes that came now, bytes that were there before, seconds."""

    came: int
    there: int
    seconds: float


def fetch(
    parts: Sequence[Part],
    *,
    range_bytes: int = RANGE,
    at_once: int = AT_ONCE,
    patience: float = PATIENCE,
    progress: Progress | None = None,
    say: Say = print,
) -> Fetched:
    """Fetch sets in this order, each to its end before the next.

    `patience` is for how many seconds a range is asked for again while no byte of it comes. Raises `FetchError`, and
    what else a source raises; what has come stays, and the same call goes on from there.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as held:
        for part in parts:  # before anything is made here
            for split in SPLITS:
                read_manifest(part.source, split, patience)
        for target in sorted({one.target for one in parts}):
            held.enter_context(_alone(target, say))
        todo, there, total = list[Pull](), 0, 0
        for part in parts:
            pulls = [_pull(part, split, range_bytes, at_once, patience) for split in SPLITS]
            todo += [one for one in pulls if not one.partial.complete]
            there += sum(one.partial.there for one in pulls)
            total += sum(one.partial.total for one in pulls)
            if all(one.partial.complete for one in pulls):
                more = f"every byte: imgnet-cluster data verify {part.target}"
                say(f"{part.target}: is there already, by its sizes; nothing to fetch ({more})")
        for one in todo:
            one.partial.begin()
        _check_room([one.partial for one in todo])
        count = Count(there, total, progress)
        for one in todo:
            one.pull(count)
    return Fetched(count.done - there, there, time.monotonic() - begun)


def _pull(part: Part, split: str, step: int, at_once: int, patience: float) -> Pull:
    partial = Partial(part.target / split, read_manifest(part.source, split, patience), part.index_only)
    return Pull(part.source, split, partial, step, at_once, patience)


@contextlib.contextmanager
def _alone(target: Path, say: Say) -> Iterator[None]:
    """Hold a target: of several processes of a machine one fetches."""
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(target / LOCK, 0))
        except BlockingIOError:
            say(f"another process is fetching {target}: waiting for it")
            held.enter_context(locked(target / LOCK))
        yield


def _check_room(found: Sequence[Partial]) -> None:
    """Raise `FetchError` when a disk has not the room for what is missing on it."""
    for disk in {one.folder.stat().st_dev for one in found}:
        mine = [one for one in found if one.folder.stat().st_dev == disk]
        need, free = sum(one.total - one.there for one in mine), shutil.disk_usage(mine[0].folder).free
        if need > free:
            raise FetchError(
                f"{mine[0].folder.parent}: its disk has {size(free)} free, and {size(need)} are still to be fetched; "
                "make room, or take another folder"
            )


def size(count: int) -> str:
    """Return a number of bytes as a person reads it."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            number = count / 10**power
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
    return f"{count} bytes"
