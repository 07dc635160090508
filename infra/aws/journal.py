"""Journal of intents: one JSON line for each mutating AWS call, synced to disk before the call is made."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """An append-only file of JSON lines. After a crash it tells which calls may have been made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str, **fields: Any) -> None:
        """Append a line of kind `what`, and return when it is on disk.

        Raises `OSError`. The caller must then not make the AWS call.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": time.time(), "what": what, **fields}, default=str)
        is_torn = self.path.exists() and self.path.stat().st_size and not self._ends_with_newline()
        with open(self.path, "a", opener=_open_private) as file:
            file.write(("\n" if is_torn else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self.path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(folder)
        os.close(folder)

    def _ends_with_newline(self) -> bool:
        """Whether the last line is complete. A full disk or a kill leaves a part of a line."""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def lines(self, *what: str) -> list[dict[str, Any]]:
        """Return the complete lines in order: all of them, or those of the given kinds."""
        lines: list[dict[str, Any]] = []
        if self.path.exists():
            for text in self.path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, Mapping) and (not what or line.get("what") in what):
                        lines.append(dict(line))
        return lines


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user may read: a recorded request holds the boot host key of its machines."""
    return os.open(path, flags, 0o600)
