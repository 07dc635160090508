"""One split of a packed set on its way from its source: ranges in threads, patience, checksums, the manifest last."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from train.data.manifest import MANIFEST, FetchError, Manifest
from train.tools.filesystem import one_line

from .resume import Partial, gaps
from .sources import Source

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
ENDING_SECONDS = 5.0  # for the other threads to see that one has failed
Progress = Callable[[int, int], None]  # bytes that are there, bytes that there will be
Answer = TypeVar("Answer")


class Patience:
    """Asks again, ever later, while an `OSError` may pass; `what` it was about stands in the error."""

    def __init__(self, seconds: float, what: str, over: threading.Event | None = None) -> None:
        self.seconds, self.what, self.over = seconds, what, over or threading.Event()
        self.good()

    def good(self) -> None:
        """Something came: begin anew."""
        self.deadline, self.pause = time.monotonic() + self.seconds, FIRST_PAUSE

    def after(self, error: OSError) -> None:
        """Wait a moment. Raises `FetchError` when it is too late for that."""
        if time.monotonic() + self.pause > self.deadline:
            why = f"nothing came for {self.seconds:.0f} s"
            raise FetchError(f"{self.what}: {one_line(error)}; {why}; fetch again, it goes on from here") from error
        self.over.wait(self.pause)
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


def look(source: Source, path: str, seconds: float) -> bytes | None:
    """Return a small file of a source, None when it is not there. Raises `FetchError` when it does not come in time."""
    patience = Patience(seconds, f"{source.name}/{path}")
    while True:
        try:
            return source.small(path)
        except OSError as error:
            patience.after(error)


def read_manifest(source: Source, split: str, seconds: float) -> Manifest:
    """Return a split's manifest. Raises `FetchError` when there is none, or it does not come in so many seconds."""
    path = f"{split}/{MANIFEST}"
    raw = look(source, path, seconds)
    if raw is None:
        raise FetchError(source.missing(split))
    return Manifest.parse(raw, f"{source.name}/{path}")


class Count:
    """Counts bytes for whoever looks, from several threads."""

    def __init__(self, done: int, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress, self.lock = done, total, progress, threading.Lock()

    def add(self, count: int) -> None:
        """So many more are there."""
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


class Pull:
    """What is fetched of one split, and how: ranges of `step` bytes, `at_once` in flight, `seconds` of patience."""

    def __init__(self, source: Source, split: str, partial: Partial, step: int, at_once: int, seconds: float) -> None:
        self.source, self.split, self.partial = source, split, partial
        self.step, self.at_once, self.seconds = step, at_once, seconds
        self.over, self.lock = threading.Event(), threading.Lock()
        self.left: dict[str, int] = {}  # ranges that a file still waits for
        self.errors: list[BaseException] = []

    def pull(self, count: Count) -> None:
        """Fetch all that is missing, then write the manifest, unless the source has another one by now."""
        self._in_threads(self._todo(), count)
        if read_manifest(self.source, self.split, self.seconds).raw != self.partial.manifest.raw:
            raise FetchError(
                f"{self.source.name}/{self.split}: was changed while it was fetched; when it is finished, fetch again: "
                "only what differs is fetched"
            )
        self.partial.finish()

    def _todo(self) -> Iterator[tuple[str, int, int]]:
        found = []
        for name, came in self.partial.came.items():
            ranges = list(gaps(self.partial.files[name].bytes, came, self.step)) or [(0, 0)]
            self.left[name] = len(ranges)
            found += [(name, begin, end) for begin, end in ranges]
        return iter(found)

    def _in_threads(self, todo: Iterator[tuple[str, int, int]], count: Count) -> None:
        """Do all ranges; the first error ends all. A thread that hangs in the kernel ends with the process."""
        threads = [threading.Thread(target=self._work, args=(todo, count), daemon=True) for _ in range(self.at_once)]
        for one in threads:
            one.start()
        try:
            while any(one.is_alive() for one in threads) and not self.errors:
                for one in threads:
                    one.join(0.05)
        finally:
            self.over.set()
        for one in threads:
            one.join(ENDING_SECONDS)
        if self.errors:
            raise self.errors[0]

    def _work(self, todo: Iterator[tuple[str, int, int]], count: Count) -> None:
        try:
            while not self.over.is_set():
                with self.lock:
                    one = next(todo, None)
                if one is None:
                    return
                self._range(*one, count)
                self._close(one[0])
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def _range(self, name: str, begin: int, end: int, count: Count | None = None) -> None:
        """Fetch a range into the file, and write down that it is there."""
        path, part, at = f"{self.split}/{name}", self.partial.part(name), begin
        patience = Patience(self.seconds, f"{self.source.name}/{path}, bytes {begin} to {end}", self.over)
        handle = self._local(part, lambda: os.open(part, os.O_WRONLY | os.O_CREAT, 0o644))
        try:
            while at < end and not self.over.is_set():
                try:
                    for piece in self.source.pieces(path, at, end - at, self.partial.files[name].bytes):
                        self._write(part, handle, piece, at)
                        at += len(piece)
                        patience.good()
                        if count:
                            count.add(len(piece))
                        if self.over.is_set():
                            return
                    if at < end:
                        raise ConnectionError("it ended early")
                except OSError as error:
                    patience.after(error)
        finally:
            os.close(handle)
        if at == end > begin:
            self._local(part, lambda: self.partial.note(name, begin=begin, end=end))

    def _close(self, name: str) -> None:
        """After the last range of a file: is it what the manifest says? Else once more from its beginning."""
        if self.over.is_set():
            return
        with self.lock:
            self.left[name] -= 1
            last = self.left[name] == 0
        part = self.partial.part(name)
        if not last or self._local(part, lambda: self.partial.right(name)):
            return
        for begin, end in gaps(self.partial.files[name].bytes, (), self.step):
            self._range(name, begin, end)
        if not self.over.is_set() and not self._local(part, lambda: self.partial.right(name)):
            part.unlink()
            raise FetchError(
                f"{self.source.name}/{self.split}/{name}: its checksum is not that of the manifest, twice: the source "
                "is damaged, or somebody writes there; look: imgnet-cluster data verify"
            )

    def _write(self, part: Path, handle: int, piece: bytes, at: int) -> None:
        """Write all of it, which one call need not do."""
        view = memoryview(piece)
        while view:
            count = self._local(part, lambda here=at, what=view: os.pwrite(handle, what, here))  # type: ignore[misc]
            view, at = view[count:], at + count

    def _local(self, part: Path, do: Callable[[], Answer]) -> Answer:
        """Do something on our own disk, whose errors do not pass. Raises `FetchError`."""
        try:
            return do()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            then = "what has come stays: make room, and fetch again" if full else "what has come stays"
            raise FetchError(f"{part}: {error.strerror}; {then}") from error
