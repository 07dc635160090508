"""Decides whether a checkpoint belongs to the run that wants to resume from it."""

from dataclasses import replace
from typing import Any

from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError
from train.tools.filesystem import json_roundtrip


def run_fingerprint(recipe: Recipe, schedule: Schedule) -> dict[str, Any]:
    """Return what makes a run the same run, as JSON data.

    Two parts of the recipe do not count: a compiled network is the same network, and a target changes when to stop,
    not what is trained.
    """
    recipe_json = replace(recipe, model=replace(recipe.model, compile=False)).to_json()
    fingerprint: dict[str, Any] = json_roundtrip(
        {
            "seed": recipe.seed,
            "images": schedule.images,
            "gpus": schedule.gpus,
            "max_steps": schedule.max_steps,
            # The recipe comes last, because the error names the first entry that differs.
            "recipe": {**recipe_json, "target": None},
        }
    )
    return fingerprint


def check_same_run(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `TrainingError` when a checkpoint's fingerprint is another run's.

    The resized copies that the phases read may differ: they may have been made since.
    """
    saved = _without_copies(saved)
    for name, value in _without_copies(expected).items():
        if saved.get(name) != value:
            raise TrainingError(
                f"the checkpoint belongs to a run with another {name}; resume with the recipe and options of that run"
            )


def _without_copies(fingerprint: dict[str, Any]) -> dict[str, Any]:
    phases = [{**phase, "copy": None} for phase in fingerprint["recipe"]["phases"]]
    return {**fingerprint, "recipe": {**fingerprint["recipe"], "phases": phases}}
