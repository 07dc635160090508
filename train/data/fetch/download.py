"""Downloads one split of a packed set: files in threads, retries, checksums, and the manifest last."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from train.data.manifest import FORMAT, MANIFEST_FILE, VERSION, FetchError, Manifest, ManifestError, OtherVersion
from train.tools.filesystem import one_line_error
from train.tools.process_log import Progress

from .resume import PartialSplit
from .sources import Source

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 10.0
THREAD_POLL_SECONDS = 0.05
THREAD_JOIN_SECONDS = 5.0  # for the other threads to notice that one has failed
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
                "fetch again: complete files are kept"
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


def fetch_manifest(source: Source, split: str, timeout_seconds: float) -> Manifest:
    """Return the manifest of a split. Raises `FetchError` when it is missing or unusable, and after the timeout."""
    path = f"{split}/{MANIFEST_FILE}"
    content = fetch_small_file(source, path, timeout_seconds)
    if content is None:
        raise FetchError(source.describe_missing(split))
    try:
        return Manifest.parse(content)
    except OtherVersion:
        raise FetchError(
            f"{source.name}/{path}: is of another format than {FORMAT!r} version {VERSION}; pack the set again with "
            "this version of imgnet-cluster"
        ) from None
    except ManifestError:
        raise FetchError(f"{source.name}/{path}: is not the manifest of a packed set, or is damaged") from None


class ByteCounter:
    """Counts received bytes from several threads and reports them to `progress`."""

    def __init__(self, done: int, total: int, progress: Progress) -> None:
        self.done = done
        self.total = total
        self.progress = progress
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add received bytes."""
        with self.lock:
            self.done += count
            self.progress(self.done, self.total)


class SplitDownload:
    """The download of one split, `max_parallel` files at once.

    It fails when nothing of a file is received for `stall_timeout` seconds.
    """

    def __init__(
        self, source: Source, split: str, partial: PartialSplit, max_parallel: int, stall_timeout: float
    ) -> None:
        self.source = source
        self.split = split
        self.partial = partial
        self.max_parallel = max_parallel
        self.stall_timeout = stall_timeout
        self.cancelled = threading.Event()
        self.lock = threading.Lock()
        self.errors: list[BaseException] = []

    def run(self, counter: ByteCounter) -> None:
        """Fetch all that is missing, then write the manifest. Raises `FetchError` if the source changed meanwhile."""
        self._run_threads(iter(self.partial.missing_files), counter)
        if fetch_manifest(self.source, self.split, self.stall_timeout) != self.partial.manifest:
            raise FetchError(
                f"{self.source.name}/{self.split}: was changed while it was fetched; when the source is finished, "
                "fetch again: only what differs is fetched"
            )
        self.partial.write_manifest()

    def _run_threads(self, pending_files: Iterator[str], counter: ByteCounter) -> None:
        """Fetch all files. The first error ends all threads; one that hangs in the kernel ends with the process."""
        threads = [
            threading.Thread(target=self._worker_loop, args=(pending_files, counter), daemon=True)
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

    def _worker_loop(self, pending_files: Iterator[str], counter: ByteCounter) -> None:
        try:
            while not self.cancelled.is_set():
                with self.lock:
                    name = next(pending_files, None)
                if name is None:
                    return
                self._fetch_file(name, counter)
        except BaseException as error:
            self.errors.append(error)
            self.cancelled.set()

    def _fetch_file(self, name: str, counter: ByteCounter) -> None:
        """Fetch a file and verify its checksum. A wrong file is fetched once more."""
        for byte_counter in (counter, None):  # bytes that are fetched twice count once
            self._download_file(name, byte_counter)
            if self.cancelled.is_set() or self._verify_and_commit(name):
                return
        self.partial.partial_path(name).unlink()
        raise FetchError(
            f"{self.source.name}/{self.split}/{name}: its checksum is not that of the manifest, twice: the source "
            "is damaged, or is being written to; to check it: imgnet-cluster data verify"
        )

    def _download_file(self, name: str, counter: ByteCounter | None) -> None:
        """Fetch a file under its partial name. After a transient error the download goes on at the same byte."""
        path = f"{self.split}/{name}"
        partial_path = self.partial.partial_path(name)
        size = self.partial.files[name].bytes
        position = 0
        backoff = RetryBackoff(self.stall_timeout, f"{self.source.name}/{path}", self.cancelled)
        file_descriptor = self._on_local_disk(
            partial_path, lambda: os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        )
        try:
            while position < size and not self.cancelled.is_set():
                try:
                    for chunk in self.source.read_range(path, position, size - position, size):
                        self._write_all(partial_path, file_descriptor, chunk, position)
                        position += len(chunk)
                        backoff.reset()
                        if counter:
                            counter.add(len(chunk))
                        if self.cancelled.is_set():
                            return
                    if position < size:
                        raise ConnectionError("the file ended early")
                except OSError as error:
                    backoff.wait_or_raise(error)
        finally:
            os.close(file_descriptor)

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
