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

from train.tools.filesystem import replace_nonfinite

CROPS = {
    "center": "the middle square, as in ordinary validation",
    "rect": "the middle rectangle, as long as the image's ratio allows in steps of 32 pixels, at most 1.5 to 1",
    "five": "four corners and the middle, mean of the softmax",
    "tta": "these five and their mirror images (Krizhevsky et al. 2012)",
}


MIN_SIZE_PIXELS, MAX_SIZE_PIXELS = 16, 4096  # pixels


PROGRESS_SECONDS = 2.0


_protocol_stdout: TextIO | None = None  # stdout, while that is somebody else's


@dataclass(frozen=True)
class EvalOptions:
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


def parse_crops(text: str) -> tuple[str, ...]:
    """Names of `CROPS` with commas. Raises `ValueError` with a line for the user."""
    found = tuple(dict.fromkeys(one.strip() for one in text.split(",")))
    for one in found:
        if one not in CROPS:
            raise ValueError(f"--crops: {one!r} is unknown; known are {', '.join(CROPS)}")
    return found


def parse_sizes(text: str) -> tuple[int, ...]:
    """Whole numbers of pixels with commas. Raises `ValueError` with a line for the user."""
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        found = (0,)
    if min(found) < MIN_SIZE_PIXELS or max(found) > MAX_SIZE_PIXELS:
        raise ValueError(
            f"--sizes: must be whole numbers from {MIN_SIZE_PIXELS} to {MAX_SIZE_PIXELS} with commas, such as 224,256, not {text!r}"
        )
    return found


def emit_json_line(kind: str, **values: Any) -> None:
    """Print one JSON line, the only thing on stdout."""
    print(json.dumps(replace_nonfinite({"kind": kind, **values})), file=_protocol_stdout or sys.stdout, flush=True)


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Let what others print, such as somebody's network, go to stderr."""
    global _protocol_stdout
    _protocol_stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _protocol_stdout = None


def progress_printer(is_first_process: bool) -> Callable[[str, int, int], None]:
    """Return what tells now and then, by the first process only, how far it is in a pass."""
    last, shown = time.monotonic(), ("", 0)

    def say(what: str, done: int, total: int) -> None:
        nonlocal last, shown
        tenth = what, 10 * done // total
        if is_first_process and tenth != shown and time.monotonic() - last > PROGRESS_SECONDS:
            last, shown = time.monotonic(), tenth
            print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

    return say


def exit_with_error(text: str) -> NoReturn:
    """Say what is wrong in one line, and end at once: peers may be in a collective, loader processes alive."""
    emit_json_line("error", error=text)
    os._exit(1)
