"""The images of a job, before its machine trains: the built-in set is drawn, a packed set may be fetched."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.connectors.local import python
from cluster.state.spec import Spec
from train.recipe.schema import FULL, reads_full
from train.tools import process

# An address of one's own at EC2 may need a moment to give out the machine's credentials (botocore tries once).
METADATA = {"AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5", "AWS_METADATA_SERVICE_TIMEOUT": "5"}


class DrawError(Exception):
    """The set could not be drawn, or not be fetched; one line."""


def prepare(spec: Spec, log: Path, going_on: Callable[[str, str], None]) -> None:
    """Draw or fetch what the job wants to be drawn or fetched; `going_on` as in `draw`. Raises `DrawError`."""
    if spec.draw:
        draw(spec, log, going_on)
    elif spec.source:
        _run(f"fetching {spec.source}", log, going_on, *command(spec))


def draw(spec: Spec, log: Path, going_on: Callable[[str, str], None]) -> None:
    """Draw the set and the copies that its phases read; of several machines that share the folder one does.

    `going_on` is called all the time with what is being done and how far it is; what it raises ends the drawing.
    Raises `DrawError`.
    """
    _run("drawing the built-in set", log, going_on, "data", "sample", spec.data)
    sizes = ",".join(map(str, spec.recipe.copies))
    if sizes and spec.scale == 1:  # a rehearsal on a part of the images does as well without
        doing = f"making copies of {sizes} pixels"
        _run(doing, log, going_on, "data", "resize", "--anew", spec.data, spec.copies, "--sizes", sizes)


def _run(doing: str, log: Path, going_on: Callable[[str, str], None], *words: str) -> None:
    """Run one of our own commands, its output to the log."""
    child = process.start(python("cluster", *words), log, METADATA)
    try:
        while child.poll() is None:
            going_on(doing, last_line(log))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.kill([child], 10)
    if child.returncode:
        said = last_line(log).removeprefix("error: ")
        raise DrawError(f"{doing}: {said or f'exit code {child.returncode}'}")


def last_line(path: Path) -> str:
    """Return the last line of a log; of a progress bar its last state."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def command(spec: Spec) -> list[str]:
    """Return the words of our own command line that fetch a job's images on one of its machines."""
    sizes = ",".join([FULL, *map(str, spec.recipe.copies)])
    words = ["data", "fetch", spec.source, spec.data, "--sizes", sizes, "--else-full"]
    words += [] if reads_full(spec.recipe) else ["--index-only"]
    return words + (["--copies", spec.source_copies] if spec.source_copies else [])
