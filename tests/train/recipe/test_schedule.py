"""From a recipe to steps: how many, how large, at which rate."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest

from train.recipe import IMAGENET, ONE_RATE, SHAPES, Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule, split_step


def recipe(*rows: Phase, **changes: Any) -> Recipe:
    data = Data(name="some", root="some", train=1000, val=10)
    return Recipe(**{"name": "some", "data": data, "model": Model(name="resnet18"), "phases": rows, **changes})


def row(start: int, end: int, batch: int = 16, lr: Any = 0.1, **more: Any) -> Phase:
    return Phase(epochs=(start, end), size=64, batch=batch, lr=lr, **more)


def rates(schedule: Schedule) -> list[float]:
    """The rate of every step, by going through them all."""
    return [epoch.lr_at(step) for epoch in schedule.epochs for step in range(epoch.steps)]


def some_schedules() -> list[Schedule]:
    """Thirty of all sorts, the same ones each time."""
    found, dice = [], random.Random(5)
    while len(found) < 30:
        rows, end = [], 0
        for _ in range(dice.randint(1, 5)):
            start, end = end, end + dice.randint(1, 4)
            rows.append(row(start, end, batch=dice.randint(1, 30)))
        images, gpus = dice.randint(1, 400), dice.randint(1, 9)
        whole = Schedule(recipe(*rows), images, gpus)
        found.append(whole)
        if whole.steps > len(rows):
            found.append(Schedule(recipe(*rows), images, gpus, dice.randint(len(rows), whole.steps)))
    return found


SOME = some_schedules()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_step_has_the_first_rate_and_the_last_step_the_last(shape: str) -> None:
    single = shape in ONE_RATE
    steps = rates(Schedule(recipe(row(0, 3, lr=0.5 if single else (0.5, 0.01), shape=shape), gpus=8), 1000, 8))
    start, end = {
        "gradual_warmup": (0.5 / k(8), 0.5), "constant_warmup": (0.5 / k(8), 0.5 / k(8)),
        "one_cycle": (0.5 / 25, 0.5 / 250_000),
    }.get(shape, (0.5, 0.01))  # fmt: skip
    assert len(steps) == 3 * 8
    assert (steps[0], steps[-1]) == (pytest.approx(start, rel=1e-12), pytest.approx(end, rel=1e-12))


def k(gpus: int, batch: int = 16) -> float:
    """How many times the global batch is Goyal's 256."""
    return max(1.0, gpus * batch / 256)


@pytest.mark.parametrize("gpus", [8, 32, 64])
@pytest.mark.parametrize(("shape", "start", "middle", "end"), [
    ("linear", 1.0, 0.6, 0.2),
    ("cosine", 1.0, 0.6, 0.2),
    ("polynomial", 1.0, 0.2 + 0.8 / 4, 0.2),
])  # fmt: skip
def test_shapes_join_the_two_rates(shape: str, start: float, middle: float, end: float, gpus: int) -> None:
    schedule = Schedule(recipe(row(0, 1, lr=(1.0, 0.2), shape=shape), gpus=gpus), 16 * gpus * 101, gpus)
    steps = rates(schedule)
    assert (steps[0], steps[50], steps[100]) == pytest.approx((start, middle, end))
    assert steps == sorted(steps, reverse=True)


def test_cosine_and_polynomial_bend_as_their_formulas_say() -> None:
    for shape, formula in (
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
        ("polynomial", lambda t: (1 - t) ** 2),
    ):
        steps = rates(Schedule(recipe(row(0, 1, lr=(0.8, 0.0), shape=shape), gpus=1), 16 * 81, 1))
        assert steps == pytest.approx([0.8 * formula(number / 80) for number in range(81)], abs=1e-12)


def test_gradual_warmup_ramps_from_the_rate_of_256_images_to_the_global_one() -> None:
    """Goyal et al. 2017: 0.1 at a batch of 256 leads to 3.2 at one of 8192."""
    schedule = Schedule(recipe(row(0, 5, batch=32, lr=3.2, shape="gradual_warmup"), gpus=256), 8192 * 21, 256)
    steps = rates(schedule)
    assert (steps[0], steps[52], steps[-1]) == pytest.approx((0.1, (0.1 + 3.2) / 2, 3.2))
    assert [b - a for a, b in pairwise(steps)] == pytest.approx([3.1 / 104] * 104)


def test_constant_warmup_holds_the_rate_of_256_images() -> None:
    schedule = Schedule(recipe(row(0, 1, batch=32, lr=3.2, shape="constant_warmup"), gpus=256), 8192 * 5, 256)
    assert rates(schedule) == pytest.approx([0.1] * 5)


@pytest.mark.parametrize("shape", ["gradual_warmup", "constant_warmup"])
def test_a_warmup_never_starts_above_its_rate(shape: str) -> None:
    assert rates(Schedule(recipe(row(0, 1, lr=0.1, shape=shape), gpus=1), 160, 1)) == [0.1] * 10


def test_a_phase_of_one_step_has_its_first_rate() -> None:
    assert rates(Schedule(recipe(row(0, 1, lr=(0.3, 0.1)), gpus=1), 16, 1)) == [0.3]


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8, 16])
def test_another_number_of_gpus_follows_the_linear_rule_and_says_so(gpus: int) -> None:
    schedule = Schedule(recipe(row(0, 2, lr=(0.4, 0.8)), machines=2, gpus=2), 16 * 480, gpus)
    (only,) = schedule.scheduled_phases
    assert only.global_batch == 16 * gpus
    assert only.scaled_lr_endpoints == pytest.approx((0.4 * gpus / 4, 0.8 * gpus / 4))
    per_256 = schedule.table()[0]["lr_per_256"]
    assert per_256 == pytest.approx([0.4 * 256 / 64, 0.8 * 256 / 64])  # what the rule keeps
    if gpus == 4:
        assert schedule.scaling_note == ""
    else:
        assert f"stated for 4 GPUs; on {gpus} " in schedule.scaling_note and f"{gpus / 4:g}" in schedule.scaling_note


def test_gradual_warmup_starts_at_the_same_rate_on_any_number_of_gpus() -> None:
    rows = recipe(row(0, 1, batch=256, lr=0.8, shape="gradual_warmup"), gpus=8)
    for gpus in (8, 16, 64):
        first, last = Schedule(rows, 10**6, gpus).scheduled_phases[0].scaled_lr_endpoints
        assert (first, last) == pytest.approx((0.1, 0.1 * gpus))


def test_the_last_step_of_an_epoch_takes_what_is_left() -> None:
    (epoch,) = Schedule(recipe(row(0, 1), gpus=2), 100, 2).epochs
    assert [epoch.images_in_step(step) for step in range(epoch.steps)] == [32, 32, 32, 4]


def test_rates_go_on_over_the_epochs_of_a_phase() -> None:
    schedule = Schedule(recipe(row(0, 2, lr=(0.0, 0.7)), row(2, 4, lr=(0.7, 0.0)), gpus=1), 64, 1)
    assert rates(schedule) == pytest.approx([n / 10 for n in (0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0)])


@pytest.mark.parametrize("schedule", SOME, ids=range(len(SOME)))
def test_steps_at_and_images_at_agree_with_going_through_the_epochs(schedule: Schedule) -> None:
    steps = images = 0
    for number, epoch in enumerate(schedule.epochs):
        assert epoch.first_step == steps
        for step in range(epoch.steps):
            assert (schedule.steps_at(number, step), schedule.images_at(number, step)) == (steps, images)
            assert 1 <= epoch.images_in_step(step) <= epoch.scheduled_phase.global_batch
            steps, images = steps + 1, images + epoch.images_in_step(step)
    end = len(schedule.epochs)
    assert (schedule.steps_at(end, 0), schedule.images_at(end, 0)) == (steps, images)
    assert schedule.steps == steps == sum(one["steps"] for one in schedule.table())
    if schedule.max_steps is None:
        assert images == schedule.images * schedule.recipe.epochs
        assert [epoch.number for epoch in schedule.epochs] == list(range(schedule.recipe.epochs))


@pytest.mark.parametrize("schedule", [one for one in SOME if one.max_steps], ids=str)
def test_max_steps_are_shared_out_and_meet_every_phase(schedule: Schedule) -> None:
    whole = Schedule(schedule.recipe, schedule.images, schedule.gpus)
    cut, full = ([one["steps"] for one in plan.table()] for plan in (schedule, whole))
    assert sum(cut) == schedule.steps == schedule.max_steps
    assert all(1 <= mine <= theirs for mine, theirs in zip(cut, full, strict=True))
    for mine, theirs in zip(cut, full, strict=True):  # by their length, as far as whole steps and one each allow
        assert abs(mine - schedule.max_steps * theirs / whole.steps) <= len(cut)


def test_more_max_steps_than_there_are_change_nothing() -> None:
    rows = recipe(row(0, 2), row(2, 3), gpus=1)
    assert Schedule(rows, 100, 1, 10**6).table() == Schedule(rows, 100, 1).table()


def test_fewer_max_steps_than_phases_and_no_images_or_gpus_are_refused() -> None:
    rows = recipe(row(0, 2), row(2, 3))
    with pytest.raises(ValueError, match="max_steps: 1 is too few; the recipe has 2 phases"):
        Schedule(rows, 100, 1, 1)
    for images, gpus in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one image and one GPU"):
            Schedule(rows, images, gpus)


@pytest.mark.parametrize("length", range(1, 70))
def test_a_step_is_cut_into_as_few_and_as_equal_chunks_as_the_batch_allows(length: int) -> None:
    for batch in (1, 2, 7, 16, 64):
        parts = [range(length)[part] for part in split_step(length, batch)]
        assert [number for part in parts for number in part] == list(range(length))
        assert len(parts) == math.ceil(length / batch)
        sizes = {len(part) for part in parts}
        assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1


def test_a_table_says_what_each_phase_does() -> None:
    rows = recipe(row(0, 2, copy=160), row(2, 3, batch=8, lr=(0.1, 0.0), rect_val=True, min_scale=0.5), gpus=2)
    first, second = Schedule(rows, 100, 2).table()
    assert first == {
        "start": 0, "end": 2, "size": 64, "batch": 16, "global_batch": 32, "lr": [0.1, 0.1],
        "lr_per_256": pytest.approx([0.8, 0.8]), "peak": 0.1, "shape": "linear", "steps": 8, "copy": 160,
        "min_scale": 0.08, "augment": True, "rect_train": False, "rect_val": False, "validate": "each",
    }  # fmt: skip
    assert (second["steps"], second["lr"], second["copy"], second["rect_val"]) == (7, [0.1, 0.0], None, True)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_peak_is_its_highest_rate(shape: str) -> None:
    rate = 0.5 if shape in ONE_RATE else (0.1, 0.5)
    plan = Schedule(recipe(row(0, 4, lr=rate, shape=shape), gpus=32), 16 * 64 * 100, 64)  # twice the GPUs
    assert plan.scheduled_phases[0].peak_lr == pytest.approx(max(rates(plan)), rel=1e-3)
    assert plan.table()[0]["peak"] == plan.scheduled_phases[0].peak_lr


def test_imagenet_counts_as_its_papers_say() -> None:
    assert (IMAGENET.train, IMAGENET.val) == (1_281_167, 50_000)
