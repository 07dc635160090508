"""Lock files that show whether a process lives: the kernel releases a flock when its holder dies."""

import contextlib
import fcntl
from pathlib import Path

AGENT_LOCK = "agent.lock"  # in an agent's work folder
SUPERVISOR_LOCK = ".supervisor.lock"  # in the run folder


def is_locked(path: Path) -> bool:
    """Return whether a process of this computer holds a lock file. A missing file is not locked."""
    with contextlib.suppress(FileNotFoundError), path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
