"""Decides whether a checkpoint belongs to the run that wants to resume from it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

from torch import nn

from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError
from train.tools.text_files import json_roundtrip

CHECKPOINT_FORMAT = 6  # version of `Trainer.state`; raise it when an older checkpoint can no longer be restored


def check_version(number: object) -> None:
    """Raise `TrainingError` when a checkpoint has another format."""
    if number != CHECKPOINT_FORMAT:
        raise TrainingError(
            "the checkpoint was written by another version of imgnet-cluster; resume with that version, or start from "
            "the beginning with --resume none"
        )


class RunFingerprint(TypedDict):
    """What a run and the checkpoint that it resumes from must have in common. An error names the first difference."""

    seed: int
    images: int
    gpus: int
    max_steps: int | None
    recipe: dict[str, Any]  # Any: the fields of the recipe


def run_fingerprint(recipe: Recipe, schedule: Schedule) -> RunFingerprint:
    """Return the fingerprint of a run, as JSON data. A run resumes only from a checkpoint with an equal fingerprint.

    Seven parts of the recipe are left out: a compiled network is the same network, a target, patience and `max_bad` say
    when to stop, not what is trained, and the machines of a later attempt may compute in another precision, search
    kernels, or replay CUDA graphs.
    """
    recipe_json = replace(recipe, model=replace(recipe.model, compile=False)).to_json()
    del recipe_json["kernel_search"], recipe_json["graphs"], recipe_json["max_bad"]
    if recipe.comm.hook == "auto":  # the default was "none"
        recipe_json["comm"]["hook"] = "none"
    fingerprint: RunFingerprint = json_roundtrip(
        {
            "seed": recipe.seed,
            "images": schedule.images,
            "gpus": schedule.gpus,
            "max_steps": schedule.max_steps,
            "recipe": {**recipe_json, "target": None, "patience": None, "precision": "auto"},
        }
    )
    return fingerprint


def check_same_run(saved: RunFingerprint, expected: RunFingerprint) -> None:
    """Raise `TrainingError` when a checkpoint belongs to another run: its fingerprint differs.

    The resized copies that the phases read may differ: they may have been made after the checkpoint. Phases after those
    of the checkpoint may have been added, unless `max_steps` distributes the steps over all of them.
    """
    saved = _without_copies(saved)
    if expected["max_steps"] is None:
        phases = expected["recipe"]["phases"][: len(saved["recipe"]["phases"])]
        expected = {**expected, "recipe": {**expected["recipe"], "phases": phases}}
    for name, value in _without_copies(expected).items():
        if saved.get(name) != value:
            raise TrainingError(
                f"the checkpoint belongs to a run with another {name}; resume with the recipe and options of that run"
            )


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:  # Any: a model's extra state is no tensor
    """Load a checkpoint's weights into the model. Raises `TrainingError` when the user's model has changed since."""
    own, saved = (
        {name: list(getattr(value, "shape", ())) for name, value in tensors.items()}
        for tensors in (model.state_dict(), weights)
    )
    for name in {**saved, **own}:
        if own.get(name) != saved.get(name):
            raise TrainingError(
                f"the model has changed since the checkpoint: {name} is {saved.get(name, 'missing')} there and "
                f"{own.get(name, 'missing')} here; undo the change, or launch a new job"
            )
    model.load_state_dict(weights)


def _without_copies(fingerprint: RunFingerprint) -> RunFingerprint:
    phases = [{**phase, "copy": None} for phase in fingerprint["recipe"]["phases"]]
    return {**fingerprint, "recipe": {**fingerprint["recipe"], "phases": phases}}
