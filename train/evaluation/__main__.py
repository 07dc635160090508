"""`python -m train.evaluation.__main__ CHECKPOINT`: how good a saved network is by several crops and sizes.

Prints JSON lines: "begin", a "row" for each crop and size as soon as it is known, "seen" of a few images, or "error";
how far it is goes to stderr. Exit code: 0 done, 1 error, 2 wrong usage. Importing it imports no torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.data.index.base import DataError
from train.engine.options import fraction, natural, positive
from train.tools.errors import Expected, Lost, is_of_a_peer
from train.tools.filesystem import one_line

from .protocol import CROPS, Options, crops, fail, sizes


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


if __name__ == "__main__":
    sys.exit(main())
