"""Downloads one split of a packed set: byte ranges in threads, retries, checksums, and the manifest last."""

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

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 10.0
THREAD_POLL_SECONDS = 0.05
THREAD_JOIN_SECONDS = 5.0  # for the other threads to notice that one has failed
ProgressCallback = Callable[[int, int], None]  # bytes present, bytes in all
Answer = TypeVar("Answer")


class RetryBackoff:
    """Decides whether a failed read is retried, with growing pauses, until nothing was received for a timeout.

    `subject` is what is being read, for the error. An event in `cancelled` ends a pause early.
    """

    def __init__(self, timeout_seconds: float, subject: str, cancelled: threading.Event | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self.subject = subject
        self.cancelled = cancelled or threading.Event()
        self.reset()

    def reset(self) -> None:
        """Restart the timeout, because something was received."""
        self.deadline = time.monotonic() + self.timeout_seconds
        self.pause_seconds = FIRST_RETRY_SECONDS

    def wait_or_raise(self, error: OSError) -> None:
        """Wait before the next try. Raises `FetchError` when the timeout would pass meanwhile."""
        if time.monotonic() + self.pause_seconds > self.deadline:
            raise FetchError(
                f"{self.subject}: {one_line_error(error)}; nothing was received for {self.timeout_seconds:.0f} s; "
                "fetch again: it resumes from here"
            ) from error
        self.cancelled.wait(self.pause_seconds)
        self.pause_seconds = min(2 * self.pause_seconds, MAX_RETRY_SECONDS)


def fetch_small_file(source: Source, path: str, timeout_seconds: float) -> bytes | None:
    """Return a small file of a source, or None when it does not exist. Raises `FetchError` after the timeout."""
    backoff = RetryBackoff(timeout_seconds, f"{source.name}/{path}")
    while True:
        try:
            return source.read_small_file(path)
        except OSError as error:
            backoff.wait_or_raise(error)


def fetch_manifest(source: Source, split: str, timeout_seconds: float) -> SourceManifest:
    """Return the manifest of a split. Raises `FetchError` when there is none, and after the timeout."""
    path = f"{split}/{MANIFEST_FILE}"
    raw = fetch_small_file(source, path, timeout_seconds)
    if raw is None:
        raise FetchError(source.describe_missing(split))
    return SourceManifest.parse(raw, f"{source.name}/{path}")


class ByteCounter:
    """Counts received bytes from several threads and reports them to `progress`."""

    def __init__(self, done: int, total: int, progress: ProgressCallback | None) -> None:
        self.done = done
        self.total = total
        self.progress = progress
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add received bytes."""
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


class SplitDownload:
    """The download of one split: ranges of `range_bytes`, `max_parallel` of them in flight.

    A range fails when none of its bytes is received for `stall_timeout` seconds.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        partial: PartialSplit,
        range_bytes: int,
        max_parallel: int,
        stall_timeout: float,
    ) -> None:
        self.source = source
        self.split = split
        self.partial = partial
        self.range_bytes = range_bytes
        self.max_parallel = max_parallel
        self.stall_timeout = stall_timeout
        self.cancelled = threading.Event()
        self.lock = threading.Lock()
        self.ranges_left: dict[str, int] = {}  # by file: how many of its ranges are not done
        self.errors: list[BaseException] = []

    def run(self, counter: ByteCounter) -> None:
        """Fetch all that is missing, then write the manifest. Raises `FetchError` if the source changed meanwhile."""
        self._run_threads(self._pending_ranges(), counter)
        if fetch_manifest(self.source, self.split, self.stall_timeout).raw != self.partial.manifest.raw:
            raise FetchError(
                f"{self.source.name}/{self.split}: was changed while it was fetched; when the source is finished, "
                "fetch again: only what differs is fetched"
            )
        self.partial.write_manifest()

    def _pending_ranges(self) -> Iterator[tuple[str, int, int]]:
        """Return (file, begin, end) of every range to fetch. A file that lacks nothing gets one empty range."""
        pending = []
        for name, received in self.partial.received_ranges.items():
            ranges = list(missing_ranges(self.partial.files[name].bytes, received, self.range_bytes)) or [(0, 0)]
            self.ranges_left[name] = len(ranges)
            pending += [(name, begin, end) for begin, end in ranges]
        return iter(pending)

    def _run_threads(self, pending: Iterator[tuple[str, int, int]], counter: ByteCounter) -> None:
        """Fetch all ranges. The first error ends all threads; one that hangs in the kernel ends with the process."""
        threads = [
            threading.Thread(target=self._worker_loop, args=(pending, counter), daemon=True)
            for _ in range(self.max_parallel)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and not self.errors:
                for thread in threads:
                    thread.join(THREAD_POLL_SECONDS)
        finally:
            self.cancelled.set()
        for thread in threads:
            thread.join(THREAD_JOIN_SECONDS)
        if self.errors:
            raise self.errors[0]

    def _worker_loop(self, pending: Iterator[tuple[str, int, int]], counter: ByteCounter) -> None:
        try:
            while not self.cancelled.is_set():
                with self.lock:
                    next_range = next(pending, None)
                if next_range is None:
                    return
                name, begin, end = next_range
                self._download_range(name, begin, end, counter)
                self._finish_range(name)
        except BaseException as error:
            self.errors.append(error)
            self.cancelled.set()

    def _download_range(self, name: str, begin: int, end: int, counter: ByteCounter | None = None) -> None:
        """Fetch a range into the partial file, and record it in the journal."""
        path = f"{self.split}/{name}"
        partial_path = self.partial.partial_path(name)
        position = begin
        backoff = RetryBackoff(self.stall_timeout, f"{self.source.name}/{path}, bytes {begin} to {end}", self.cancelled)
        file_descriptor = self._on_local_disk(
            partial_path, lambda: os.open(partial_path, os.O_WRONLY | os.O_CREAT, 0o644)
        )
        try:
            while position < end and not self.cancelled.is_set():
                try:
                    for chunk in self.source.read_range(path, position, end - position, self.partial.files[name].bytes):
                        self._write_all(partial_path, file_descriptor, chunk, position)
                        position += len(chunk)
                        backoff.reset()
                        if counter:
                            counter.add(len(chunk))
                        if self.cancelled.is_set():
                            return
                    if position < end:
                        raise ConnectionError("the range ended early")
                except OSError as error:
                    backoff.wait_or_raise(error)
        finally:
            os.close(file_descriptor)
        if position == end > begin:
            self._on_local_disk(partial_path, lambda: self.partial.record(name, begin=begin, end=end))

    def _finish_range(self, name: str) -> None:
        """After the last range of a file, verify its checksum. A wrong file is fetched once more from its beginning."""
        if self.cancelled.is_set():
            return
        with self.lock:
            self.ranges_left[name] -= 1
            was_last = self.ranges_left[name] == 0
        if not was_last or self._verify_and_commit(name):
            return
        for begin, end in missing_ranges(self.partial.files[name].bytes, (), self.range_bytes):
            self._download_range(name, begin, end)
        if not self.cancelled.is_set() and not self._verify_and_commit(name):
            self.partial.partial_path(name).unlink()
            raise FetchError(
                f"{self.source.name}/{self.split}/{name}: its checksum is not that of the manifest, twice: the source "
                "is damaged, or is being written to; to check it: imgnet-cluster data verify"
            )

    def _verify_and_commit(self, name: str) -> bool:
        partial_path = self.partial.partial_path(name)
        return self._on_local_disk(partial_path, lambda: self.partial.verify_and_commit(name))

    def _write_all(self, path: Path, file_descriptor: int, chunk: bytes, offset: int) -> None:
        """Write a whole chunk: a single pwrite may write only a part of it."""
        remaining = memoryview(chunk)
        while remaining:
            written = self._pwrite(path, file_descriptor, remaining, offset)
            remaining = remaining[written:]
            offset += written

    def _pwrite(self, path: Path, file_descriptor: int, data: memoryview, offset: int) -> int:
        return self._on_local_disk(path, lambda: os.pwrite(file_descriptor, data, offset))

    def _on_local_disk(self, path: Path, operation: Callable[[], Answer]) -> Answer:
        """Run an operation on the local disk, whose errors are not transient. Raises `FetchError`."""
        try:
            return operation()
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "what was fetched stays: make room, and fetch again" if is_full else "what was fetched stays"
            raise FetchError(f"{path}: {error.strerror}; {hint}") from error
