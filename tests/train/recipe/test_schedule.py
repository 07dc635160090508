"""The schedule of a recipe: numbers of steps, their images, their learning rates, and which epochs are validated."""

import random
from typing import Any

import pytest
from support.train_records import make_epoch
from support.trainer_in_process import RandomImages, learning_rates, make_phase, make_recipe, make_sampler

from train.recipe import Data, Model, Phase, Recipe
from train.recipe.history import EpochResult
from train.recipe.schedule import Schedule, with_more_epochs
from train.recipe.schema import LR_SHAPES, SINGLE_LR_SHAPES
from train.recipe.validation_policy import should_validate


def random_schedules() -> list[Schedule]:
    """Return thirty different schedules, half of them shortened, some with growing images; always the same ones."""
    schedules: list[Schedule] = []
    random_source = random.Random(5)
    while len(schedules) < 30:
        phases: list[Phase] = []
        end = 0
        for _ in range(random_source.randint(1, 5)):
            start, end = end, end + random_source.randint(1, 4)
            size = random_source.choice([64, (32, 64)]) if end - start > 1 else 64
            phases.append(make_phase((start, end), random_source.randint(1, 30), 0.1, size=size))
        images, gpus = random_source.randint(1, 400), random_source.randint(1, 9)
        recipe = make_recipe(*phases)
        whole = Schedule(recipe, images, gpus)
        rows = len(whole.table())  # one for each size of each phase
        schedules.append(whole)
        if whole.steps > rows:
            schedules.append(Schedule(recipe, images, gpus, random_source.randint(rows, whole.steps)))
    return schedules


SCHEDULES = random_schedules()


def test_schedule_on_other_gpus_has_a_note() -> None:
    recipe = make_recipe(make_phase((0, 2), 16, (0.4, 0.8)), machines=2, gpus=2)
    assert Schedule(recipe, 7680, 4).scaling_note == ""
    note = Schedule(recipe, 7680, 3).scaling_note
    assert "stated for 4 GPUs; on 3 processes" in note and note.count("0.75") == 2 and "--keep-batch" in note


def test_steps_at_and_images_at_agree_with_the_epochs() -> None:
    for schedule in SCHEDULES:
        steps = images = 0
        for number, epoch in enumerate(schedule.epochs):
            assert epoch.first_step == steps
            for step in range(epoch.steps):
                assert (schedule.steps_at(number, step), schedule.images_at(number, step)) == (steps, images)
                assert 1 <= epoch.images_in_step(step) <= epoch.scheduled_phase.global_batch
                images += epoch.images_in_step(step)
                steps += 1
        end = len(schedule.epochs)
        assert (schedule.steps_at(end, 0), schedule.images_at(end, 0)) == (steps, images)
        assert schedule.steps == steps == sum(row.steps for row in schedule.table())
        if schedule.max_steps is None:
            assert images == schedule.images * schedule.recipe.epochs
            assert [epoch.number for epoch in schedule.epochs] == list(range(schedule.recipe.epochs))


def test_max_steps_are_shared_out_over_all_phases() -> None:
    for schedule in SCHEDULES:
        if schedule.max_steps:
            full_schedule = Schedule(schedule.recipe, schedule.images, schedule.gpus)
            rows = list(zip(schedule.table(), full_schedule.table(), strict=True))
            assert sum(row.steps for row, _ in rows) == schedule.steps == schedule.max_steps
            for row, full in rows:
                assert 1 <= row.steps <= full.steps
                # In proportion to their length, as far as whole steps and at least one step each allow.
                assert abs(row.steps - schedule.max_steps * full.steps / full_schedule.steps) <= len(rows)


def test_schedule_refuses_too_few_steps_images_or_gpus() -> None:
    recipe = make_recipe(make_phase((0, 2), 16, 0.1), make_phase((2, 3), 16, 0.1))
    with pytest.raises(ValueError, match="--max-steps 1 is too few; the recipe has 2 phases"):
        Schedule(recipe, 100, 1, 1)
    for images, gpus in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one image and one GPU"):
            Schedule(recipe, images, gpus)


def validation_schedule(*policies: str, max_steps: int | None = None, first_size: Any = 32) -> Schedule:
    """Phases of two epochs of 4 steps each."""
    phases = [
        Phase(epochs=(2 * n, 2 * n + 2), size=64 if n else first_size, batch=8, lr=0.1, validate=policy)
        for n, policy in enumerate(policies)
    ]
    data = Data(name="some", root="some", train=32, val=20)
    recipe = Recipe(name="some", data=data, model=Model(name="resnet18"), gpus=1, phases=phases, target=93.0)
    return Schedule(recipe, 32, 1, max_steps)


def row(top5: float | None, train_top5: float = 0.0) -> EpochResult:
    return make_epoch(top5=top5, train_top5=train_top5)


def decisions(schedule: Schedule) -> list[bool | None]:
    return [should_validate(schedule, epoch_index, []) for epoch_index in range(len(schedule.epochs))]


def test_should_validate_each_last_never_needs_no_history() -> None:
    assert decisions(validation_schedule("each", "last", "never")) == [True, True, False, True, False, True]
    assert decisions(validation_schedule("never", "last")) == [False, False, False, True]
    assert decisions(validation_schedule("near")) == [False, True]
    growing = validation_schedule("last", "each", first_size=(32, 64))
    assert decisions(growing) == [False, True, True, True], "after its largest size"


@pytest.mark.parametrize("epoch, history, expected", [
    (1, [row(None, 89.99)], False),
    (1, [row(None, 90.0)], True),
    (1, [row(90.0, 10.0)], True),
    (2, [row(90.0), row(20.0)], True),  # once near, always near
    (3, [row(80.0), row(85.0, 89.0), row(None, 80.0)], False),
    (1, [], None),  # not decided until the epoch before is done
    (2, [row(10.0)], None),
    (2, [row(91.0)], True),
    (1, [row(10.0), row(95.0), row(95.0)], False),  # a process that asks late gets the same answer
])  # fmt: skip
def test_should_validate_near_depends_on_earlier_epochs(epoch: int, history: Any, expected: bool | None) -> None:
    assert should_validate(validation_schedule("near", "near", "near"), epoch, history) is expected


def test_all_requests_skips_epochs_that_are_not_validated() -> None:
    """While the policy is undecided the epoch is validated: tests/train/engine/test_runs.py."""

    def validated(schedule: Schedule, history: list[EpochResult]) -> list[int]:
        requests = make_sampler(schedule, RandomImages(32, 20)).all_requests(0, 0, history)
        return sorted({request.epoch for request in requests if request.split == "val"})

    assert validated(validation_schedule("never", "last", "each"), []) == [3, 4, 5]
    assert validated(validation_schedule("near", "near"), [row(None, 10.0)] * 5) == [3]


@pytest.mark.parametrize("shape", LR_SHAPES)
def test_added_epochs_leave_the_steps_before_as_they_were_and_keep_the_last_rate(shape: str) -> None:
    lr = 0.1 if shape in SINGLE_LR_SHAPES else (0.3, 0.1)
    last = Phase(epochs=(1, 3), size=(128, 160), batch=8, lr=lr, shape=shape, min_scale=0.3)
    recipe = make_recipe(make_phase((0, 1), 4, 0.07), last, gpus=2)
    before = Schedule(recipe, 50, 3)
    longer = Schedule(with_more_epochs(before, 4), 50, 3)
    rates = learning_rates(longer)
    assert list(rates[: before.steps]) == list(learning_rates(before))
    assert list(rates[before.steps :]) == pytest.approx([rates[before.steps - 1]] * (longer.steps - before.steps))
    assert [epoch.number for epoch in longer.epochs] == [*range(7)]
    row = longer.table()[-1]
    assert (row.start, row.end, row.size, row.batch, row.min_scale) == (3, 7, 160, 8, 0.3)
    assert longer.recipe.phases[:2] == recipe.phases
    other = Schedule(with_more_epochs(before, 4, 0.02), 50, 3)
    assert other.table()[-1].lr == pytest.approx((0.03, 0.03)), "stated for 2 GPUs, trained on 3"
