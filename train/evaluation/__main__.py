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
from train.engine.options import fraction_type, non_negative_int, positive_int
from train.tools.errors import TrainingError, WorkerLost, is_peer_failure
from train.tools.filesystem import one_line_error

from .protocol import CROPS, EvalOptions, exit_with_error, parse_crops, parse_sizes


def parse_eval_options(argv: Sequence[str] | None = None) -> EvalOptions:
    """Read the command line; ends the program with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluation.__main__", description="Examine a checkpoint.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a file step-*.pt of a run")
    add("--crops", default="center,rect", metavar="NAME,NAME", help=", ".join(CROPS))
    add("--sizes", metavar="N,N", help="in pixels, with commas (default: that of the recipe's last phase)")
    add("--data", type=Path, metavar="DIR", help="train/<class>/* and val/<class>/* (default: the recipe's)")
    add("--copies", type=Path, metavar="DIR", help="prepared copies (default: the data folder's name with -sz)")
    add("--scale", type=fraction_type, default=1.0, metavar="F", help="this fraction of the images, as a run takes it")
    add("--procs", type=positive_int, metavar="N", help="processes (default: one per GPU, 1 without)")
    add("--workers", type=non_negative_int, metavar="N", help="loader processes of each (default: by the processors)")
    add("--skip-bad", action="store_true", help="leave out files that are not images instead of ending")
    add("--shown", type=non_negative_int, default=6, metavar="N", help="answers and boxes of so many images")
    words = vars(parser.parse_args(argv))
    try:
        words |= {"crops": parse_crops(words["crops"]), "sizes": parse_sizes(words["sizes"]) if words["sizes"] else ()}
    except ValueError as error:
        parser.error(str(error))
    return EvalOptions(**words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parse_eval_options(argv)
    if "RANK" not in os.environ:
        from train.engine.launcher import launch_ranks

        procs = options.procs or gpu_count() or 1
        if procs > 1:
            return launch_ranks(
                [sys.executable, "-m", "train.evaluation.__main__", *(sys.argv[1:] if argv is None else argv)], procs
            )
    try:
        from . import runner

        runner.evaluate_checkpoint(options)
    except (TrainingError, WorkerLost, DataError, OSError) as error:
        exit_with_error(one_line_error(error))
    except RuntimeError as error:
        if not is_peer_failure(type(error), str(error)):
            raise
        os._exit(1)  # the one that is gone has said why
    except KeyboardInterrupt:
        os._exit(130)
    return 0


def gpu_count() -> int:
    """Return how many GPUs this machine shows."""
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
