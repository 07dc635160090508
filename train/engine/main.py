"""Command line of the trainer: one process per GPU, or one rank under torchrun or the agent."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from train.data.index.open import DataError
from train.recipe.files import RecipeError, load, select
from train.recipe.schema import Recipe
from train.tools.errors import Expected, Lost
from train.tools.filesystem import one_line

from .agent_channel import Report
from .launcher import _gpus, be_parent
from .options import Options, parse


def main(argv: Sequence[str] | None = None, dataset: Any = None) -> int:
    """Run the command line; `dataset` is what a standby has opened.

    Returns the exit code: 0 done, 1 failed, 3 saved and ended because it was asked to.
    """
    options = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may be no text, and what is said of it goes on
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        found = select(load(options.recipe), [options.only] if options.only else [])
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(found) > 1:
        print(
            f"error: {options.recipe} has {len(found)} recipes; choose with --only: {', '.join(r.name for r in found)}",
            file=sys.stderr,
        )
        return 2
    recipe = found[0].at(options.machines)
    if options.seed is not None:
        try:
            recipe = replace(recipe, seed=options.seed)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if "RANK" in os.environ:
        return be_one(options, recipe, dataset)
    procs = options.procs or _gpus() or 1
    if procs == 1:
        return be_one(options, recipe)
    return be_parent([sys.executable, "-m", "train", *(sys.argv[1:] if argv is None else argv)], procs)


def be_one(options: Options, recipe: Recipe, dataset: Any = None) -> int:
    """Be one process of the run."""
    report = Report()
    sys.excepthook = report.last_words
    report.say("starting")
    from . import run  # torch takes seconds: the agent hears from us first

    try:
        return run.run(options, recipe, report, dataset)
    except (Expected, Lost, DataError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        report.fail(one_line(error), "own" if isinstance(error, Lost) else "final")
        sys.stderr.flush()
        os._exit(1)  # peers may be in a collective, loader processes alive: nothing here waits for them
