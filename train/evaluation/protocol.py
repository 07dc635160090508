"""Options and JSON events of the evaluation process."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from train.tools.filesystem import finite

CROPS = {
    "center": "the middle square, as in ordinary validation",
    "rect": "the middle rectangle, as long as the image's ratio allows in steps of 32 pixels, at most 1.5 to 1",
    "five": "four corners and the middle, mean of the softmax",
    "tta": "these five and their mirror images (Krizhevsky et al. 2012)",
}


SMALLEST, LARGEST = 16, 4096  # pixels


SAY_SECONDS = 2.0


_ours: TextIO | None = None  # stdout, while that is somebody else's


@dataclass(frozen=True)
class Options:
    """What to examine, and on what; no `sizes`: that of the recipe's last phase."""

    checkpoint: Path
    crops: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Path | None
    copies: Path | None
    scale: float
    procs: int | None
    workers: int | None
    skip_bad: bool
    shown: int


def crops(text: str) -> tuple[str, ...]:
    """Names of `CROPS` with commas. Raises `ValueError` with a line for the user."""
    found = tuple(dict.fromkeys(one.strip() for one in text.split(",")))
    for one in found:
        if one not in CROPS:
            raise ValueError(f"--crops: {one!r} is unknown; known are {', '.join(CROPS)}")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers of pixels with commas. Raises `ValueError` with a line for the user."""
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        found = (0,)
    if min(found) < SMALLEST or max(found) > LARGEST:
        raise ValueError(
            f"--sizes: must be whole numbers from {SMALLEST} to {LARGEST} with commas, such as 224,256, not {text!r}"
        )
    return found


def emit(kind: str, **values: Any) -> None:
    """Print one JSON line, the only thing on stdout."""
    print(json.dumps(finite({"kind": kind, **values})), file=_ours or sys.stdout, flush=True)


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """Let what others print, such as somebody's network, go to stderr."""
    global _ours
    _ours = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _ours = None


def progress(first: bool) -> Callable[[str, int, int], None]:
    """Return what tells now and then, by the first process only, how far it is in a pass."""
    last, shown = time.monotonic(), ("", 0)

    def say(what: str, done: int, total: int) -> None:
        nonlocal last, shown
        tenth = what, 10 * done // total
        if first and tenth != shown and time.monotonic() - last > SAY_SECONDS:
            last, shown = time.monotonic(), tenth
            print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

    return say


def fail(text: str) -> NoReturn:
    """Say what is wrong in one line, and end at once: peers may be in a collective, loader processes alive."""
    emit("error", error=text)
    os._exit(1)
