"""What was about to be asked of AWS, a line of JSON each, written and synced before the call."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """The lines of one file. Whoever comes after a crash reads what may have been done, and looks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str, **fields: Any) -> None:
        """Add a line, and return when it is on the disk. Raises `OSError`: then nothing must be asked of AWS."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": time.time(), "what": what, **fields}, default=str)
        torn = self.path.exists() and self.path.stat().st_size and not self._ends_with_newline()
        with open(self.path, "a", opener=_open_private) as file:
            file.write(("\n" if torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self.path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            os.fsync(folder)
        os.close(folder)

    def _ends_with_newline(self) -> bool:
        """Whether the last line was written to its end; a full disk, or a kill, leaves a part of it."""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def lines(self, *what: str) -> list[dict[str, Any]]:
        """Return the whole lines in order, those of some kinds when they are named."""
        found: list[dict[str, Any]] = []
        if self.path.exists():
            for text in self.path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    one = json.loads(text)
                    if isinstance(one, Mapping) and (not what or one.get("what") in what):
                        found.append(dict(one))
        return found


def _open_private(path: str, flags: int) -> int:
    """Open for us alone: a frozen request holds the host key with which a machine boots."""
    return os.open(path, flags, 0o600)
