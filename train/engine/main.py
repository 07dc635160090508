"""The trainer's command line: starts one process per GPU, or is one rank under torchrun or the agent."""

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.data.index.open import DataError
from train.recipe.recipe_files import RecipeError, import_folder, read_recipes, select_recipes
from train.recipe.schema import Recipe
from train.tools.agent_protocol import MODULE_FOLDERS_VARIABLE, Fault, TrainerState
from train.tools.errors import HandoverFailed, MachineTrouble, TrainingError, UnreadableCheckpoint, one_line_error
from train.tools.process import launch_ranks

from .agent_channel import AgentChannel
from .options import RunOptions, parse_run_options

if TYPE_CHECKING:
    from .run import Prepared


def main(argv: Sequence[str] | None = None, prepared: "Prepared | None" = None) -> int:
    """Run the trainer's command line.

    `prepared` is what a standby process has made ready. Returns the exit code: 0 done, 1 failed, 2 wrong
    usage, 3 a checkpoint was written and the run ended because it was asked to.
    """
    options = parse_run_options(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name may be no valid text, and messages quote file names
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        recipe = choose_recipe(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.recipe.endswith(".json"):  # no agent has named the folders
        os.environ.setdefault(MODULE_FOLDERS_VARIABLE, str(import_folder(options.recipe)))
    if "RANK" in os.environ:
        return run_rank(options, recipe, prepared)
    procs = options.procs or gpu_count() or 1
    if procs == 1:
        return run_rank(options, recipe)
    return launch_ranks([sys.executable, "-P", "-m", "train", *(sys.argv[1:] if argv is None else argv)], procs)


def gpu_count() -> int:
    """Return the number of GPUs that torch sees on this machine."""
    import torch  # takes seconds to import; a parent that was given --procs does not need it

    return torch.cuda.device_count()


def choose_recipe(options: RunOptions) -> Recipe:
    """Return the recipe that the options name, with the fields, the seed and others that they replace.

    Raises `RecipeError` when there is none, more than one, or a value is out of range.
    """
    recipes = select_recipes(read_recipes(options.recipe), [options.only] if options.only else [])
    if len(recipes) > 1:
        names = ", ".join(recipe.name for recipe in recipes)
        raise RecipeError(f"{options.recipe} has {len(recipes)} recipes; choose one with --only: {names}")
    recipe = recipes[0].for_machines(options.machines)
    try:
        return options.changed_recipe(recipe)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def run_rank(options: RunOptions, recipe: Recipe, prepared: "Prepared | None" = None) -> int:
    """Run this process's rank of the training run. Returns its exit code."""
    agent_channel = AgentChannel()
    sys.excepthook = agent_channel.excepthook
    agent_channel.report_state(TrainerState.STARTING)
    from . import run  # torch takes seconds to import; the agent gets the report above first

    try:
        return run.run_attempt(options, recipe, agent_channel, prepared)
    except (TrainingError, MachineTrouble, DataError, OSError) as error:
        message = one_line_error(error)
        print(f"error: {message}", file=sys.stderr, flush=True)
        faults = {
            HandoverFailed: Fault.PEER,
            MachineTrouble: Fault.OWN,
            UnreadableCheckpoint: Fault.CHECKPOINT,
            FileNotFoundError: Fault.FINAL,
            PermissionError: Fault.FINAL,
            # A full disk may have room again, a file server may answer again, and other machines may have memory.
            OSError: Fault.OWN,
        }
        fault = next((fault for kind, fault in faults.items() if isinstance(error, kind)), Fault.INPUT)
        agent_channel.report_failure(message, fault)
        sys.stderr.flush()
        os._exit(1)  # a regular exit would wait for loader processes, and for peers in a collective
