"""`python -m train.evaluation.__main__ CHECKPOINT`: how good a saved network is by several crops and sizes.

Prints JSON lines: "begin", a "row" for each crop and size as soon as it is known, "seen" of a few images, or "error";
how far it is goes to stderr. Exit code: 0 done, 1 error, 2 wrong usage. Importing it imports no torch.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from train.data.index.base import DataError
from train.engine.options import fraction, natural, positive
from train.tools.errors import Expected, Lost, is_of_a_peer
from train.tools.filesystem import finite, one_line

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


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the program with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluation.__main__", description="Examine a checkpoint.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a file step-*.pt of a run")
    add("--crops", default="center,rect", metavar="NAME,NAME", help=", ".join(CROPS))
    add("--sizes", metavar="N,N", help="in pixels, with commas (default: that of the recipe's last phase)")
    add("--data", type=Path, metavar="DIR", help="train/<class>/* and val/<class>/* (default: the recipe's)")
    add("--copies", type=Path, metavar="DIR", help="prepared copies (default: the data folder's name with -sz)")
    add("--scale", type=fraction, default=1.0, metavar="F", help="this fraction of the images, as a run takes it")
    add("--procs", type=positive, metavar="N", help="processes (default: one per GPU, 1 without)")
    add("--workers", type=natural, metavar="N", help="loader processes of each (default: by the processors)")
    add("--skip-bad", action="store_true", help="leave out files that are not images instead of ending")
    add("--shown", type=natural, default=6, metavar="N", help="answers and boxes of so many images")
    words = vars(parser.parse_args(argv))
    try:
        words |= {"crops": crops(words["crops"]), "sizes": sizes(words["sizes"]) if words["sizes"] else ()}
    except ValueError as error:
        parser.error(str(error))
    return Options(**words)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parse(argv)
    if "RANK" not in os.environ:
        from train.engine.launcher import be_parent

        procs = options.procs or gpus() or 1
        if procs > 1:
            return be_parent(
                [sys.executable, "-m", "train.evaluation.__main__", *(sys.argv[1:] if argv is None else argv)], procs
            )
    try:
        from . import runner

        runner.examine(options)
    except (Expected, Lost, DataError, OSError) as error:
        fail(one_line(error))
    except RuntimeError as error:
        if not is_of_a_peer(type(error), str(error)):
            raise
        os._exit(1)  # the one that is gone has said why
    except KeyboardInterrupt:
        os._exit(130)
    return 0


def gpus() -> int:
    """Return how many GPUs this machine shows."""
    import torch

    return torch.cuda.device_count()


def fail(text: str) -> NoReturn:
    """Say what is wrong in one line, and end at once: peers may be in a collective, loader processes alive."""
    emit("error", error=text)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
