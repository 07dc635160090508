"""One split of a packed set on its way from its source: ranges in threads, patience, checksums, the manifest last."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from train.data.manifest import MANIFEST_FILE, FetchError, SourceManifest
from train.tools.filesystem import one_line_error

from .resume import PartialSplit, missing_ranges
from .sources import Source

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 10.0
THREAD_JOIN_SECONDS = 5.0  # for the other threads to see that one has failed
ProgressCallback = Callable[[int, int], None]  # bytes that are there, bytes that there will be
Answer = TypeVar("Answer")


class RetryBackoff:
    """Asks again, ever later, while an `OSError` may pass; `what` it was about stands in the error."""

    def __init__(self, timeout_seconds: float, subject: str, cancelled: threading.Event | None = None) -> None:
        self.timeout_seconds, self.subject, self.cancelled = timeout_seconds, subject, cancelled or threading.Event()
        self.reset()

    def reset(self) -> None:
        """Something came: begin anew."""
        self.deadline, self.pause_seconds = time.monotonic() + self.timeout_seconds, FIRST_RETRY_SECONDS

    def wait_or_raise(self, error: OSError) -> None:
        """Wait a moment. Raises `FetchError` when it is too late for that."""
        if time.monotonic() + self.pause_seconds > self.deadline:
            why = f"nothing came for {self.timeout_seconds:.0f} s"
            raise FetchError(
                f"{self.subject}: {one_line_error(error)}; {why}; fetch again, it goes on from here"
            ) from error
        self.cancelled.wait(self.pause_seconds)
        self.pause_seconds = min(2 * self.pause_seconds, MAX_RETRY_SECONDS)


def fetch_small_file(source: Source, path: str, timeout_seconds: float) -> bytes | None:
    """Return a small file of a source, None when it is not there. Raises `FetchError` when it does not come in time."""
    patience = RetryBackoff(timeout_seconds, f"{source.name}/{path}")
    while True:
        try:
            return source.read_small_file(path)
        except OSError as error:
            patience.wait_or_raise(error)


def fetch_manifest(source: Source, split: str, timeout_seconds: float) -> SourceManifest:
    """Return a split's manifest. Raises `FetchError` when there is none, or it does not come in so many seconds."""
    path = f"{split}/{MANIFEST_FILE}"
    raw = fetch_small_file(source, path, timeout_seconds)
    if raw is None:
        raise FetchError(source.describe_missing(split))
    return SourceManifest.parse(raw, f"{source.name}/{path}")


class ByteCounter:
    """Counts bytes for whoever looks, from several threads."""

    def __init__(self, done: int, total: int, progress: ProgressCallback | None) -> None:
        self.done, self.total, self.progress, self.lock = done, total, progress, threading.Lock()

    def add(self, count: int) -> None:
        """So many more are there."""
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


class SplitDownload:
    """What is fetched of one split, and how: ranges of `step` bytes, `at_once` in flight, `seconds` of patience."""

    def __init__(
        self,
        source: Source,
        split: str,
        partial: PartialSplit,
        range_bytes: int,
        max_parallel: int,
        stall_timeout: float,
    ) -> None:
        self.source, self.split, self.partial = source, split, partial
        self.range_bytes, self.max_parallel, self.stall_timeout = range_bytes, max_parallel, stall_timeout
        self.cancelled, self.lock = threading.Event(), threading.Lock()
        self.ranges_left: dict[str, int] = {}  # ranges that a file still waits for
        self.errors: list[BaseException] = []

    def run(self, counter: ByteCounter) -> None:
        """Fetch all that is missing, then write the manifest, unless the source has another one by now."""
        self._run_threads(self._pending_ranges(), counter)
        if fetch_manifest(self.source, self.split, self.stall_timeout).raw != self.partial.manifest.raw:
            raise FetchError(
                f"{self.source.name}/{self.split}: was changed while it was fetched; when it is finished, fetch again: "
                "only what differs is fetched"
            )
        self.partial.write_manifest()

    def _pending_ranges(self) -> Iterator[tuple[str, int, int]]:
        found = []
        for name, came in self.partial.received_ranges.items():
            ranges = list(missing_ranges(self.partial.files[name].bytes, came, self.range_bytes)) or [(0, 0)]
            self.ranges_left[name] = len(ranges)
            found += [(name, begin, end) for begin, end in ranges]
        return iter(found)

    def _run_threads(self, pending: Iterator[tuple[str, int, int]], counter: ByteCounter) -> None:
        """Do all ranges; the first error ends all. A thread that hangs in the kernel ends with the process."""
        threads = [
            threading.Thread(target=self._worker_loop, args=(pending, counter), daemon=True)
            for _ in range(self.max_parallel)
        ]
        for one in threads:
            one.start()
        try:
            while any(one.is_alive() for one in threads) and not self.errors:
                for one in threads:
                    one.join(0.05)
        finally:
            self.cancelled.set()
        for one in threads:
            one.join(THREAD_JOIN_SECONDS)
        if self.errors:
            raise self.errors[0]

    def _worker_loop(self, pending: Iterator[tuple[str, int, int]], counter: ByteCounter) -> None:
        try:
            while not self.cancelled.is_set():
                with self.lock:
                    one = next(pending, None)
                if one is None:
                    return
                self._download_range(*one, counter)
                self._finish_range(one[0])
        except BaseException as error:
            self.errors.append(error)
            self.cancelled.set()

    def _download_range(self, name: str, begin: int, end: int, counter: ByteCounter | None = None) -> None:
        """Fetch a range into the file, and write down that it is there."""
        path, part, at = f"{self.split}/{name}", self.partial.partial_path(name), begin
        patience = RetryBackoff(
            self.stall_timeout, f"{self.source.name}/{path}, bytes {begin} to {end}", self.cancelled
        )
        handle = self._on_local_disk(part, lambda: os.open(part, os.O_WRONLY | os.O_CREAT, 0o644))
        try:
            while at < end and not self.cancelled.is_set():
                try:
                    for piece in self.source.read_range(path, at, end - at, self.partial.files[name].bytes):
                        self._write_all(part, handle, piece, at)
                        at += len(piece)
                        patience.reset()
                        if counter:
                            counter.add(len(piece))
                        if self.cancelled.is_set():
                            return
                    if at < end:
                        raise ConnectionError("it ended early")
                except OSError as error:
                    patience.wait_or_raise(error)
        finally:
            os.close(handle)
        if at == end > begin:
            self._on_local_disk(part, lambda: self.partial.record(name, begin=begin, end=end))

    def _finish_range(self, name: str) -> None:
        """After the last range of a file: is it what the manifest says? Else once more from its beginning."""
        if self.cancelled.is_set():
            return
        with self.lock:
            self.ranges_left[name] -= 1
            last = self.ranges_left[name] == 0
        part = self.partial.partial_path(name)
        if not last or self._on_local_disk(part, lambda: self.partial.verify_and_commit(name)):
            return
        for begin, end in missing_ranges(self.partial.files[name].bytes, (), self.range_bytes):
            self._download_range(name, begin, end)
        if not self.cancelled.is_set() and not self._on_local_disk(part, lambda: self.partial.verify_and_commit(name)):
            part.unlink()
            raise FetchError(
                f"{self.source.name}/{self.split}/{name}: its checksum is not that of the manifest, twice: the source "
                "is damaged, or somebody writes there; look: imgnet-cluster data verify"
            )

    def _write_all(self, path: Path, handle: int, chunk: bytes, offset: int) -> None:
        """Write all of it, which one call need not do."""
        view = memoryview(chunk)
        while view:
            count = self._on_local_disk(path, lambda here=offset, what=view: os.pwrite(handle, what, here))  # type: ignore[misc]
            view, offset = view[count:], offset + count

    def _on_local_disk(self, path: Path, operation: Callable[[], Answer]) -> Answer:
        """Do something on our own disk, whose errors do not pass. Raises `FetchError`."""
        try:
            return operation()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            then = "what has come stays: make room, and fetch again" if full else "what has come stays"
            raise FetchError(f"{path}: {error.strerror}; {then}") from error
