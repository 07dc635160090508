"""Which epochs are validated, and that only these are decoded."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from train.data.order.batch_sampler import DistributedBatchSampler
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule
from train.recipe.validation_policy import should_validate


def schedule(*cadences: str, max_steps: int | None = None) -> Schedule:
    """Phases of two epochs of 4 steps each."""
    rows = [
        Phase(epochs=(2 * n, 2 * n + 2), size=32 * (n + 1), batch=8, lr=0.1, validate=one)
        for n, one in enumerate(cadences)
    ]
    data = Data(name="some", root="some", train=32, val=20)
    recipe = Recipe(name="some", data=data, model=Model(name="resnet18"), gpus=1, phases=rows, target=93.0)
    return Schedule(recipe, 32, 1, max_steps)


def row(top5: float | None, train_top5: float = 0.0) -> dict[str, Any]:
    return {"top5": top5, "train_top5": train_top5}


def decided(plan: Schedule) -> list[bool | None]:
    return [should_validate(plan, place, []) for place in range(len(plan.epochs))]


def test_each_last_and_never_are_known_from_the_start_and_the_last_epoch_is_always_validated() -> None:
    assert decided(schedule("each", "last", "never")) == [True, True, False, True, False, True]
    assert decided(schedule("never", "last")) == [False, False, False, True]
    assert decided(schedule("near")) == [None if place else False for place in ()] + [False, True]


def test_in_a_rehearsal_the_last_epoch_of_a_phase_is_the_last_that_is_run() -> None:
    plan = schedule("last", "last", "each", max_steps=6)  # of two epochs of a phase only one is begun
    assert [epoch.number for epoch in plan.epochs] == [0, 2, 4]
    assert decided(plan) == [True, True, True]


@pytest.mark.parametrize(
    "history, due",
    [
        ([row(None, 89.99)], False),
        ([row(None, 90.0)], True),
        ([row(90.0, 10.0)], True),
        ([row(90.0), row(20.0)], True),  # once near, always near
        ([row(None, 90.0), row(None, 70.0), row(50.0, 60.0)], True),
        ([row(80.0), row(85.0, 89.0), row(None, 80.0)], False),
    ],
)
def test_near_is_decided_by_the_epochs_before_and_stays(history: Any, due: bool) -> None:
    plan = schedule("near", "near", "near")
    assert should_validate(plan, len(history), history) is due


def test_near_is_open_until_the_epoch_before_is_done_but_for_a_target_that_was_reached() -> None:
    plan = schedule("near", "near")
    assert should_validate(plan, 1, []) is None and should_validate(plan, 2, [row(10.0)]) is None
    assert should_validate(plan, 2, [row(91.0)]) is True
    # What comes later does not change it: a process that is asked late answers as one that was asked early.
    assert should_validate(plan, 1, [row(10.0), row(95.0), row(95.0)]) is False


class Shapes:
    """An index of which only widths and heights are looked at."""

    widths = heights = np.full(20, 100)

    def __len__(self) -> int:
        return 20


def stream(plan: Schedule, history: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    feed = DistributedBatchSampler(plan, {("val", None): Shapes()}, 0, 0, 1)  # type: ignore[dict-item]
    return ((work.split, work.epoch) for work in feed.all_requests(0, 0, history))


def counted(found: list[tuple[str, int]], epochs: int) -> list[int]:
    return [found.count(("val", epoch)) for epoch in range(epochs)]


def test_what_is_not_validated_is_not_asked_for() -> None:
    assert counted(list(stream(schedule("never", "last", "each"), [])), 6) == [0, 0, 0, 3, 3, 3]
    far = [row(None, 10.0)] * 5
    assert counted(list(stream(schedule("near", "near"), far)), 4) == [0, 0, 0, 3]


def test_validation_is_handed_out_until_it_is_known_that_it_is_not_due() -> None:
    history: list[dict[str, Any]] = [row(None, 10.0)]
    works = stream(schedule("near", "each"), history)
    before = [next(works) for _ in range(4 + 4)]
    assert {split for split, _ in before} == {"train"}, "the first epoch's is known not to be due"
    history.append(row(None, 10.0))
    assert next(works) == ("train", 2)

    works = stream(schedule("near", "near"), history := [row(None, 10.0)])
    early = [next(works) for _ in range(4 + 4 + 4 + 1)]  # asked for the third epoch's before the second is done
    assert early[-1] == ("val", 2)
    history.append(row(None, 10.0))
    assert [next(works) for _ in range(4)] == [("train", 3)] * 4
