"""Tests of the experiments' definitions: the arms differ in what the experiment is about, and in nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import run as all_experiments
from experiments.harness.claims import Arm, Claim, make_side
from experiments.harness.images import ImageSet
from train.recipe.schedule import Schedule
from train.tools.filesystem import json_roundtrip

EXPERIMENTS = {experiment.name: experiment for experiment in all_experiments.EXPERIMENTS}
IMAGES = ImageSet(Path("nowhere"), "abc", 10)
WARM_UP_RATE = {"phases.0.lr"}
RATES = {"phases.0.lr", "phases.1.lr"}
SIZES = {f"phases.{index}.size" for index in range(3)}
GROWING_BATCH = {"phases.2.batch", "phases.2.lr", "phases.3.batch", "phases.3.lr"}
DIFFERENCES: dict[str, list[set[str]]] = {  # the fields in which each arm differs from the first arm
    "warmup": [{"--gpus"} | WARM_UP_RATE, {"--gpus"} | WARM_UP_RATE, {"--gpus"}],
    "scaling": [RATES, RATES, {"--gpus"}, {"--gpus"} | RATES, {"--gpus"} | RATES, {"--gpus", "optim.scaling"},
                {"--gpus", "optim.scaling"}],
    "lars": [{"--gpus"}, {"--gpus"} | RATES, {"--gpus", "optim.scaling"},
             *[{"--gpus", "optim.name", "optim.trust"}] * 3],
    "zero_gamma": [{"model.zero_gamma"}, {"--gpus"}, {"--gpus", "model.zero_gamma"}],
    "norm_decay": [{"optim.norm_decay"}, {"--gpus"}, {"--gpus", "optim.norm_decay"}],
    "progressive": [SIZES, GROWING_BATCH, SIZES | GROWING_BATCH],
    "rectangles": [{"phases.0.rect_train", "phases.1.rect_train"}],
}  # fmt: skip


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested data as one dictionary with dotted names. A list of plain values, such as a range, stays a list."""
    is_plain_list = isinstance(value, list) and all(not isinstance(child, dict | list) for child in value)
    if is_plain_list or not isinstance(value, dict | list):
        return {path: value}
    flat: dict[str, Any] = {}
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        flat |= flatten(child, f"{path}.{name}" if path else str(name))
    return flat


def differing_fields(arm: Arm, other: Arm) -> set[str]:
    fields, other_fields = (
        flatten(json_roundtrip({"--gpus": each.gpus, **each.recipe.to_json()})) for each in (arm, other)
    )
    names = fields.keys() | other_fields.keys()
    return {name for name in names if fields.get(name) != other_fields.get(name)} - {"name"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_differ_only_in_what_the_experiment_tests(name: str) -> None:
    first, *others = EXPERIMENTS[name].arms
    assert [differing_fields(first, other) for other in others] == DIFFERENCES[name]


def test_scaling_rules_give_the_rates_of_their_names() -> None:
    rates = [
        Schedule(arm.recipe, 8000, arm.gpus).scheduled_phases[1].scaled_lr_endpoints[0]
        for arm in EXPERIMENTS["scaling"].arms
    ]
    assert [rate / rates[0] for rate in rates] == pytest.approx([1, 0.5, 2, 32, 16, 64, 32**0.5, 1])


def test_experiment_unknown_or_repeated_arm_is_refused() -> None:
    experiment = EXPERIMENTS["warmup"]
    first_arm = experiment.arms[0]
    with pytest.raises(ValueError, match="warmup: a claim names an unknown arm: y"):
        replace(experiment, claims=(Claim(text="x", first=make_side("y"), second=make_side(first_arm.name)),))
    with pytest.raises(ValueError, match="warmup: two arms have the same name"):
        replace(experiment, arms=(*experiment.arms, first_arm))
