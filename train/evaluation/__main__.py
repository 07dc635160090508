"""`python -m train.evaluation CHECKPOINT`: evaluates a checkpoint by several crops and image sizes.

Prints JSON lines to stdout: "begin", "progress" now and then, a "row" for each crop and size as soon as it is known,
"seen" with a few example images, or "error". Exit codes: 0 done, 1 error, 2 wrong usage. Importing this module does not
import torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.data.index.open import DataError
from train.engine.main import gpu_count
from train.recipe.components import MAX_VAL_FRACTION
from train.tools.errors import MachineTrouble, TrainingError, is_peer_failure
from train.tools.filesystem import one_line_error
from train.tools.option_fields import NumberRange, argument_type
from train.tools.process import launch_ranks

from .protocol import CROPS, EvalOptions, exit_with_error, parse_crops, parse_sizes


def parse_eval_options(argv: Sequence[str] | None = None) -> EvalOptions:
    """Parse the command line. Exits with code 2 and a usage message when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m train.evaluation", description="Evaluate a checkpoint by several crops and image sizes."
    )
    add = parser.add_argument
    fraction = argument_type(NumberRange(float, 0, 1, is_minimum_open=True).convert)
    val_fraction = argument_type(NumberRange(float, 0, MAX_VAL_FRACTION).convert)
    positive, not_negative = (argument_type(NumberRange(int, minimum).convert) for minimum in (1, 0))
    add("checkpoint", type=Path, help="checkpoint of a run, a file step-*.pt, or its weights, a file *.safetensors")
    add(
        "--crops",
        default="center,rect",
        metavar="NAME,NAME",
        help=f"crops, separated by commas: {', '.join(CROPS)} (default: center,rect)",
    )
    add("--sizes", metavar="N,N", help="image sizes in pixels, separated by commas (default: the last phase's)")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="data set with train/<class>/* and val/<class>/* (default: the recipe's)",
    )
    add(
        "--copies",
        type=Path,
        metavar="DIR",
        help="folder of the resized copies (default: the data folder's name + -sz)",
    )
    add("--val-fraction", type=val_fraction, metavar="F", help="without val/: the fraction of train/ that is held out")
    add("--scale", type=fraction, default=1.0, metavar="F", help="use the fraction of the images that a run would")
    add("--procs", type=positive, metavar="N", help="number of processes (default: one per GPU, or 1 without a GPU)")
    add(
        "--workers",
        type=not_negative,
        metavar="N",
        help="loader processes per process (default: by the processors)",
    )
    add("--skip-bad", action="store_true", help="skip files that are not valid images, instead of stopping")
    add("--model", metavar="NAME", help="accept only a file that contains this network")
    add("--shown", type=not_negative, default=6, metavar="N", help="number of example images (default: 6)")
    values = vars(parser.parse_args(argv))
    try:
        values["crops"] = parse_crops(values["crops"])
        values["sizes"] = parse_sizes(values["sizes"]) if values["sizes"] else ()
    except ValueError as error:
        parser.error(str(error))
    return EvalOptions(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parse_eval_options(argv)
    if "RANK" not in os.environ:
        procs = options.procs or gpu_count() or 1
        if procs > 1:
            return launch_ranks(
                [sys.executable, "-P", "-m", "train.evaluation", *(sys.argv[1:] if argv is None else argv)], procs
            )
    try:
        from . import runner

        runner.evaluate_checkpoint(options)
    except (TrainingError, MachineTrouble, DataError, OSError) as error:
        exit_with_error(one_line_error(error))
    except RuntimeError as error:
        if not is_peer_failure(type(error), str(error)):
            raise
        os._exit(1)  # the process that failed first has reported why
    except KeyboardInterrupt:
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
