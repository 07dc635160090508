"""A small disk of a test's own, the fixture `small_disk`: filled, and made larger."""

import contextlib
import subprocess
from pathlib import Path


def fill(disk: Path) -> Path:
    """Write to a disk until it is full. Returns the file: without it there is room again."""
    path = disk / "filling"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def enlarge(disk: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", disk], check=True)
