"""The folder for the temporary files of an agent's trainers, and the removal of those that killed agents left behind.

    /tmp/.imgnet-agent-k3j9x2ab/        TMPDIR of the trainers
    /tmp/.imgnet-agent-k3j9x2ab/lock    the agent holds a flock on it while it lives

A folder belongs to nobody when its lock is free. The kernel releases the lock of a dead process, also for a reader in
another container, where process ids mean nothing. Anything else in /tmp is left alone. Where /tmp cannot be written,
the folder lies in TMPDIR, or in the agent's work folder.

The agent also holds a flock on the folder itself: systemd-tmpfiles, which on many systems removes what has lain in /tmp
for ten days, leaves such a folder alone (tmpfiles.d(5)).
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".imgnet-agent-"
LOCK_FILE = "lock"
DEFAULT_PARENT = "/tmp"


class TempFolder:
    """A new folder for temporary files. Its path is short, because the loaders' sockets lie in it."""

    def __init__(self, work: Path) -> None:
        """Make the folder in the first of these that can be written: /tmp, whose path is short, TMPDIR, `work`.

        Raises `OSError` of the last one.
        """
        parents = [Path(DEFAULT_PARENT), *([Path(os.environ["TMPDIR"])] if os.environ.get("TMPDIR") else []), work]
        for number, parent in enumerate(parents, 1):
            try:
                self._make(parent)
                return
            except OSError:
                if number == len(parents):
                    raise

    def _make(self, parent: Path) -> None:
        remove_abandoned_folders(parent)
        self._stack = contextlib.ExitStack()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            # Another agent that starts at this moment may find the lock free and remove the folder.
            with contextlib.suppress(FileNotFoundError):
                (self.path / LOCK_FILE).touch()
                if self._stack.enter_context(_lock_if_free(self.path)):
                    return

    def remove(self) -> None:
        """Remove the folder, then release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._stack.close()


def remove_abandoned_folders(parent: Path) -> None:
    """Remove the folders of this user's agents that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _lock_if_free(folder) as is_free:
            if is_free:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock_if_free(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder while the `with` block runs.

    Yields False when the folder is another user's, or its agent lives. Raises `OSError` when there is no lock file.
    """
    folder_handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_handle = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_handle)
        try:
            statuses = (os.fstat(folder_handle), os.fstat(lock_handle))
            is_own = all(status.st_uid == os.getuid() for status in statuses) and stat.S_ISREG(statuses[1].st_mode)
            if not is_own:
                yield False
                return
            try:
                fcntl.flock(lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            with contextlib.suppress(OSError):  # some file systems lock no folders
                fcntl.flock(folder_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock file that was removed after it had been opened protects nothing.
            yield os.fstat(lock_handle).st_nlink > 0
        finally:
            os.close(lock_handle)
    finally:
        os.close(folder_handle)
