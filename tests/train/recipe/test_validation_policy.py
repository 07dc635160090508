"""Validation policies, and that the batch sampler requests validation batches only where the policy asks for them."""

from typing import Any

import pytest
from support.train_records import make_epoch
from support.trainer_in_process import RandomImages, make_sampler

from train.recipe import Data, Model, Phase, Recipe
from train.recipe.history import EpochResult
from train.recipe.schedule import Schedule
from train.recipe.validation_policy import should_validate


def make_schedule(*policies: str, max_steps: int | None = None, first_size: Any = 32) -> Schedule:
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
    assert decisions(make_schedule("each", "last", "never")) == [True, True, False, True, False, True]
    assert decisions(make_schedule("never", "last")) == [False, False, False, True]
    assert decisions(make_schedule("near")) == [False, True]
    growing = make_schedule("last", "each", first_size=(32, 64))
    assert decisions(growing) == [False, True, True, True], "after its largest size"


def test_should_validate_last_in_a_shortened_run() -> None:
    schedule = make_schedule("last", "last", "each", max_steps=6)  # of the two epochs of a phase only one is run
    assert [epoch.number for epoch in schedule.epochs] == [0, 2, 4]
    assert decisions(schedule) == [True, True, True]


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
    assert should_validate(make_schedule("near", "near", "near"), epoch, history) is expected


def test_all_requests_skips_epochs_that_are_not_validated() -> None:
    """While the policy is undecided the epoch is validated: tests/train/engine/test_runs.py."""

    def validated(schedule: Schedule, history: list[EpochResult]) -> list[int]:
        requests = make_sampler(schedule, RandomImages(32, 20)).all_requests(0, 0, history)
        return sorted({request.epoch for request in requests if request.split == "val"})

    assert validated(make_schedule("never", "last", "each"), []) == [3, 4, 5]
    assert validated(make_schedule("near", "near"), [row(None, 10.0)] * 5) == [3]
