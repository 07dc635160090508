"""A machine's checkpoint folder: restored before each attempt, and copied while it is at rest.

    restoring -> following -> finishing -> ended

One thread does all that takes long, so that the agent goes on with its heartbeats. A copy is taken when nothing in the
folder has changed for `REST_SECONDS`. A folder that is not at rest for so long is copied every `RESTLESS_SECONDS` at
a moment when no process of this user has a file of it open for writing: each file is whole then, but files that are
saved one after the other may be of different steps. For a file open longer than `LOG_SECONDS`, a log, no copy waits.
"""

import contextlib
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from train.tools.errors import one_line_error

from . import snapshot
from .snapshot import FolderChanged, Tree

POLL_SECONDS = 0.25
REST_SECONDS = 2.0
RESTLESS_SECONDS = 5.0
LOG_SECONDS = 300.0
RETRY_SECONDS = 10.0  # after a copy that failed, for example because the disk was full
SCAN_SHARE = 0.1  # of the time may go into scans of a folder with many files
FINAL_TRIES = 5  # of the copy after the end of an attempt


class CheckpointFolder:
    """The folder `IMGNET_CHECKPOINTS` of one machine in one attempt. Its thread starts with it; no method waits.

    `resume` is the version to begin with, relative to the shared folder; "": none. `is_writer` says that this machine's
    folder is the one that is copied. `previous` is the object of the attempt before, which ends first. `problem` is one
    line about the last thing that failed, "" when nothing did. `copied` counts the published versions. It `has_ended`
    when the last copy is there, or the folder is not restored (`is_restored`). `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        shared: Path,
        attempt: int,
        resume: str,
        is_writer: bool,
        previous: "CheckpointFolder | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.shared = shared
        self.attempt = attempt
        self.is_writer = is_writer
        self.clock = clock
        self.problem = ""
        self.copied = 0
        self.is_restored = False
        self.has_ended = False
        self._ended = threading.Event()
        self.decided = threading.Event()  # whether the folder is restored, or cannot be
        self._was_graceful = False
        self._tree: Tree = {}  # of the last scan
        self._copied_tree: Tree = {}
        self._changed_at = 0.0  # by the clock: when a scan last found a change
        self._copied_at = 0.0
        self._open_since: dict[str, float] = {}  # when each file that is open for writing was first seen so
        version = self.shared / resume if resume else None
        self._thread = threading.Thread(target=self._run, args=(version, previous), daemon=True)
        self._thread.start()

    def finish(self, was_graceful: bool) -> None:
        """Take a last copy, now that the processes of the attempt have ended, unless the newest one has it all.

        After a crash (not `was_graceful`) only a folder at rest is copied. Only the first call has an effect.
        """
        if not self._ended.is_set():
            self._was_graceful = was_graceful
            self._ended.set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the folder has ended. Returns whether it has."""
        self._thread.join(timeout_seconds)
        return self.has_ended

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self, version: Path | None, previous: "CheckpointFolder | None") -> None:
        try:
            if previous:
                previous.finish(was_graceful=False)
                previous.wait()
            try:
                snapshot.restore(version, self.folder)
                self._tree = self._copied_tree = snapshot.scan(self.folder)
            except Exception as error:  # else the command would begin without its checkpoint
                self.problem = f"the checkpoint folder cannot be restored: {_reason(error)}"
                return
            self._changed_at = self._copied_at = self.clock()
            self.is_restored = True
            self.decided.set()
            if self.is_writer:
                self._follow()
                self._copy_at_end()
            else:
                self._ended.wait()
        finally:
            self.has_ended = True
            self.decided.set()

    def _follow(self) -> None:
        pause_seconds = POLL_SECONDS
        while not self._ended.wait(pause_seconds):
            start = time.monotonic()
            copy_seconds = 0.0
            with self._noting_problems():
                self._look()
                scan_seconds = time.monotonic() - start
                if self.is_copy_due():
                    self._copy()
                    copy_seconds = time.monotonic() - start
                pause_seconds = max(POLL_SECONDS, scan_seconds / SCAN_SHARE, copy_seconds)
                continue
            self._ended.wait(RETRY_SECONDS)

    def _look(self) -> None:
        tree = snapshot.scan(self.folder)
        if tree != self._tree:
            self._tree, self._changed_at = tree, self.clock()

    def is_copy_due(self) -> bool:
        """Whether the folder, as last scanned, has something new and can be copied now."""
        if self._tree == self._copied_tree or not snapshot.has_files(self._tree):
            return False
        now = self.clock()
        if now - self._changed_at >= REST_SECONDS:
            self._open_since = {}
            return True
        if now - self._copied_at < RESTLESS_SECONDS:
            return False
        self._open_since = {path: self._open_since.get(path, now) for path in open_files(self.folder)}
        return all(now - since >= LOG_SECONDS for since in self._open_since.values())

    def _copy(self) -> None:
        with contextlib.suppress(FolderChanged):
            is_restless = not self._ended.is_set() and self.clock() - self._changed_at < REST_SECONDS
            snapshot.publish(self.folder, self.shared, self.attempt, self._tree, is_restless)
            self._copied_tree, self._copied_at = self._tree, self.clock()
            self.copied += 1
            self.problem = ""

    def _copy_at_end(self) -> None:
        with self._noting_problems():
            self._look()
            was_at_rest = self.clock() - self._changed_at >= REST_SECONDS
            for _ in range(FINAL_TRIES):
                is_new = self._tree != self._copied_tree and snapshot.has_files(self._tree)
                if not is_new or not (self._was_graceful or was_at_rest):
                    return
                self._copy()
                self._look()

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # else the thread would end, and nothing more would be copied
            self.problem = f"the checkpoint folder cannot be copied: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, FolderChanged):
        return "its files change meanwhile"
    return one_line_error(error) or type(error).__name__


def open_files(folder: Path) -> set[str]:
    """Return the files below a folder that a process of this user has open for writing; none but on Linux."""
    prefix = f"{folder.resolve()}/"
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    # The permissions of the link say how the file was opened.
                    path = str(handle.readlink())
                    if path.startswith(prefix) and handle.lstat().st_mode & stat.S_IWUSR:
                        found.add(path)
    return found
