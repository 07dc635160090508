"""The built-in data set, drawn by an agent before its machine trains."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from train import spawn

from .machine import python
from .spec import Spec


class DrawError(Exception):
    """The set could not be drawn; one line."""


def draw(spec: Spec, log: Path, going_on: Callable[[str, str], None]) -> None:
    """Draw the set and the copies that its phases read; of several machines that share the folder one does.

    `going_on` is called all the time with what is being done and how far it is; what it raises ends the drawing.
    Raises `DrawError`.
    """
    _run("drawing the built-in set", log, going_on, "data", "sample", spec.data)
    sizes = ",".join(map(str, spec.recipe.copies))
    if sizes and spec.scale == 1:  # a rehearsal on a part of the images does as well without
        doing = f"making copies of {sizes} pixels"
        _run(doing, log, going_on, "data", "resize", spec.data, spec.copies, "--sizes", sizes)


def _run(doing: str, log: Path, going_on: Callable[[str, str], None], *words: str) -> None:
    """Run one of our own commands, its output to the log."""
    child = spawn.start(python("cluster", *words), log)
    try:
        while child.poll() is None:
            going_on(doing, last_line(log))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            spawn.kill([child], 10)
    if child.returncode:
        raise DrawError(f"{doing}: {last_line(log) or f'exit code {child.returncode}'}")


def last_line(path: Path) -> str:
    """Return the last line of a log; of a progress bar its last state."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""
