"""What makes a run this run and no other: what a checkpoint must agree on with the run that goes on from it."""

from dataclasses import replace
from typing import Any

from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError
from train.tools.filesystem import json_roundtrip


def run_fingerprint(recipe: Recipe, schedule: Schedule) -> dict[str, Any]:
    """Return it as JSON. A compiled network is the same one, and a target says when to look, not what is trained."""
    asked = replace(recipe, model=replace(recipe.model, compile=False)).to_json()
    found: dict[str, Any] = json_roundtrip(
        {
            "seed": recipe.seed,
            "images": schedule.images,
            "gpus": schedule.gpus,
            "max_steps": schedule.max_steps,
            "recipe": {**asked, "target": None},  # last: of what differs the first is named
        }
    )
    return found


def check_same_run(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `Expected` when a checkpoint is another run's. Copies of the images may have been made meanwhile."""
    for name, value in _comparable(expected).items():
        if _comparable(saved).get(name) != value:
            raise TrainingError(
                f"the checkpoint is of a run with another {name}; resume with the recipe and options of that run"
            )


def _comparable(fingerprint: dict[str, Any]) -> dict[str, Any]:
    phases = [{**phase, "copy": None} for phase in fingerprint["recipe"]["phases"]]
    return {**fingerprint, "recipe": {**fingerprint["recipe"], "phases": phases}}
