"""The folder for the temporary files of an agent's trainers, and the removal of those that killed agents left behind.

While an agent lives it holds a flock on its folder, such as /tmp/.imgnet-agent-k3j9x2ab: one that can be locked belongs
to nobody. The kernel releases the lock of a dead process, also for a reader in another container, where process ids
mean nothing. systemd-tmpfiles, which on many systems removes what has lain in /tmp for ten days, leaves a locked folder
alone (tmpfiles.d(5)). Anything else in /tmp is left alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = ".imgnet-agent-"
DEFAULT_PARENT = "/tmp"


class TempFolder:
    """A new folder for temporary files. Its path is short, because the loaders' sockets lie in it."""

    def __init__(self, work: Path) -> None:
        """Make the folder in the first that can be written: /tmp, TMPDIR, `work`. Raises `OSError` of the last one."""
        for parent in filter(None, [DEFAULT_PARENT, os.environ.get("TMPDIR")]):
            with contextlib.suppress(OSError):
                return self._make(Path(parent))
        self._make(work)

    def _make(self, parent: Path) -> None:
        remove_abandoned_folders(parent)
        self._handle: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self._handle = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):  # another agent takes it for abandoned
                continue
            except OSError:  # some file systems lock no folders
                return
            if self.path.exists():
                return

    def remove(self) -> None:
        """Remove the folder, then release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)


def remove_abandoned_folders(parent: Path) -> None:
    """Remove the folders of this user's agents that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder. Raises `OSError`, also for one of another user or agent."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
