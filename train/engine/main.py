"""Command line of the trainer: one process per GPU, or one rank under torchrun or the agent."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from train.data.index.open import DataError
from train.recipe.files import RecipeError, read_recipes, select_recipes
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError, WorkerLost
from train.tools.filesystem import one_line_error

from .agent_channel import AgentChannel
from .launcher import _gpu_count, launch_ranks
from .options import TrainOptions, parse_train_options


def main(argv: Sequence[str] | None = None, dataset: Any = None) -> int:
    """Run the command line; `dataset` is what a standby has opened.

    Returns the exit code: 0 done, 1 failed, 3 saved and ended because it was asked to.
    """
    options = parse_train_options(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may be no text, and what is said of it goes on
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        found = select_recipes(read_recipes(options.recipe), [options.only] if options.only else [])
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(found) > 1:
        print(
            f"error: {options.recipe} has {len(found)} recipes; choose with --only: {', '.join(r.name for r in found)}",
            file=sys.stderr,
        )
        return 2
    recipe = found[0].for_machines(options.machines)
    if options.seed is not None:
        try:
            recipe = replace(recipe, seed=options.seed)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if "RANK" in os.environ:
        return run_rank(options, recipe, dataset)
    procs = options.procs or _gpu_count() or 1
    if procs == 1:
        return run_rank(options, recipe)
    return launch_ranks([sys.executable, "-m", "train", *(sys.argv[1:] if argv is None else argv)], procs)


def run_rank(options: TrainOptions, recipe: Recipe, dataset: Any = None) -> int:
    """Be one process of the run."""
    report = AgentChannel()
    sys.excepthook = report.excepthook
    report.report_state("starting")
    from . import run  # torch takes seconds: the agent hears from us first

    try:
        return run.run_attempt(options, recipe, report, dataset)
    except (TrainingError, WorkerLost, DataError, OSError) as error:
        print(f"error: {one_line_error(error)}", file=sys.stderr, flush=True)
        report.report_failure(one_line_error(error), "own" if isinstance(error, WorkerLost) else "final")
        sys.stderr.flush()
        os._exit(1)  # peers may be in a collective, loader processes alive: nothing here waits for them
