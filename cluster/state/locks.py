"""Locks that say who lives: the kernel takes them back from the dead."""

import contextlib
import fcntl
from pathlib import Path

AGENT_LOCK, SUPERVISOR_LOCK = "agent.lock", ".supervisor.lock"


def is_locked(path: Path) -> bool:
    """Whether a process of this computer holds a lock file."""
    with contextlib.suppress(FileNotFoundError), path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
