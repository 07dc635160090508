"""The arms of each experiment differ in what they say they differ in, and in nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import run as everything
from experiments.harness.claims import Arm, Claim, make_side
from experiments.harness.images import ImageSet
from experiments.harness.runs import ExperimentRun, training_config
from train.recipe.schedule import Schedule
from train.tools.filesystem import json_roundtrip

EXPERIMENTS = {one.name: one for one in everything.EXPERIMENTS}
IMAGES = ImageSet(Path("nowhere"), "abc", 10)
RAMP, RATES = {"phases.0.lr"}, {"phases.0.lr", "phases.1.lr"}
SIZES = {f"phases.{row}.size" for row in range(3)}
GROWTH = {"phases.2.batch", "phases.2.lr", "phases.3.batch", "phases.3.lr"}
DIFFERENT: dict[str, list[set[str]]] = {  # each arm's difference from the experiment's first
    "warmup": [{"--gpus"} | RAMP, {"--gpus"} | RAMP, {"--gpus"}],
    "scaling": [RATES, RATES, {"--gpus"}, {"--gpus"} | RATES, {"--gpus"} | RATES, {"--gpus", "optim.scaling"},
                {"--gpus", "optim.scaling"}],
    "lars": [{"--gpus"}, {"--gpus"} | RATES, {"--gpus", "optim.scaling"},
             *[{"--gpus", "optim.name", "optim.trust"}] * 3],
    "zero_gamma": [{"model.zero_gamma"}, {"--gpus"}, {"--gpus", "model.zero_gamma"}],
    "norm_decay": [{"optim.norm_decay"}, {"--gpus"}, {"--gpus", "optim.norm_decay"}],
    "progressive": [SIZES, GROWTH, SIZES | GROWTH],
    "rectangles": [{"phases.0.rect_train", "phases.1.rect_train"}],
}  # fmt: skip


def flat(value: Any, before: str = "") -> dict[str, Any]:
    """Nested data as one level, by dotted names."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        pairs = [flat(one, f"{before}.{name}" if before else str(name)) for name, one in items]
        is_pair = isinstance(value, list) and all(not isinstance(one, dict | list) for one in value)
        return {before: value} if is_pair else {name: one for pair in pairs for name, one in pair.items()}
    return {before: value}


def differences(one: Arm, other: Arm) -> set[str]:
    a, b = (flat(json_roundtrip({"--gpus": arm.gpus, **arm.recipe.to_json()})) for arm in (one, other))
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)} - {"name"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_differ_only_in_what_they_say(name: str) -> None:
    first, *others = EXPERIMENTS[name].arms
    assert [differences(first, one) for one in others] == DIFFERENT[name]


def test_steps_are_of_two_sizes_in_each_experiment_and_of_one_without_chunks() -> None:
    found = {name: {arm.gpus for arm in one.arms} for name, one in EXPERIMENTS.items()}
    assert found == {
        "warmup": {1, 32}, "scaling": {1, 32}, "lars": {1, 128}, "zero_gamma": {1, 32}, "norm_decay": {1, 32},
        "progressive": {1}, "rectangles": {1},
    }  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_two_arms_of_an_experiment_are_the_same_run(name: str) -> None:
    keys = [ExperimentRun(arm, 0, IMAGES).key for arm in EXPERIMENTS[name].arms]
    assert len(set(keys)) == len(keys)


def test_the_experiments_share_the_arms_that_are_equal() -> None:
    def key(name: str, number: int) -> str:
        return ExperimentRun(EXPERIMENTS[name].arms[number], 3, IMAGES).key

    assert key("warmup", 0) == key("scaling", 0) == key("zero_gamma", 1) == key("norm_decay", 0)
    assert key("warmup", 3) == key("scaling", 3) == key("zero_gamma", 3) == key("norm_decay", 2)
    different = {ExperimentRun(arm, 0, IMAGES).key for one in EXPERIMENTS.values() for arm in one.arms}
    assert len(different) == 27


def test_the_large_batch_is_32_times_the_base_batch_at_32_times_the_rate() -> None:
    base, large = EXPERIMENTS["warmup"].arms[0], EXPERIMENTS["warmup"].arms[3]
    one, other = (Schedule(arm.recipe, 8000, arm.gpus) for arm in (base, large))
    assert (one.scheduled_phases[1].global_batch, other.scheduled_phases[1].global_batch) == (8, 256)
    assert other.scheduled_phases[1].scaled_lr_endpoints[0] == pytest.approx(
        32 * one.scheduled_phases[1].scaled_lr_endpoints[0]
    )
    assert other.scheduled_phases[0].scaled_lr_endpoints == pytest.approx(
        (one.scheduled_phases[1].scaled_lr_endpoints[0], 32 * one.scheduled_phases[1].scaled_lr_endpoints[0])
    )  # from the base batch's rate
    assert {row.phase.batch for row in (*one.scheduled_phases, *other.scheduled_phases)} == {8}  # what batch norm sees


def test_rules_of_scaling_give_the_rates_they_are_named_by() -> None:
    rates = [
        Schedule(arm.recipe, 8000, arm.gpus).scheduled_phases[1].scaled_lr_endpoints[0]
        for arm in EXPERIMENTS["scaling"].arms
    ]
    base = rates[0]
    assert [rate / base for rate in rates] == pytest.approx([1, 0.5, 2, 32, 16, 64, 32**0.5, 1])


def test_a_growing_batch_has_the_rate_per_image_of_the_falling_rate() -> None:
    plain, _, growing, _ = (arm.recipe.phases for arm in EXPERIMENTS["progressive"].arms)
    for one, other in zip(plain, growing, strict=True):
        assert one.lr_endpoints[0] / one.batch == pytest.approx(other.lr_endpoints[0] / other.batch)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_its_script_is(name: str) -> None:
    one = EXPERIMENTS[name]
    script = (Path(everything.__file__).parent / "studies" / f"{name}.py").read_text()
    assert f"python experiments/studies/{name}.py --{one.required_source} " in script
    assert [list(EXPERIMENTS).index(name) + 1] == [int(one.title.partition(".")[0])]
    assert not any(claim.text.endswith(".") for claim in one.claims)


def test_a_claim_of_an_arm_that_is_not_there_is_refused() -> None:
    one = EXPERIMENTS["warmup"]
    with pytest.raises(ValueError, match="warmup: two arms of one name, or a claim of an arm"):
        replace(one, claims=(Claim(text="x", first=make_side("y"), second=make_side(one.arms[0].name)),))
    with pytest.raises(ValueError, match="warmup: two arms of one name"):
        replace(one, arms=(*one.arms, one.arms[0]))


def test_how_a_recipe_trains_is_plain_data() -> None:
    found = training_config(EXPERIMENTS["lars"].arms[-1].recipe)
    assert found["optim"]["name"] == "lars" and found["phases"][0]["epochs"] == [0, 2]
