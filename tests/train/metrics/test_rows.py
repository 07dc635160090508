"""The numbers of an interval of steps, of an epoch and of a run."""

from dataclasses import replace
from typing import Any

import pytest
from support.trainer_in_process import make_phase, make_recipe

from train.metrics.accuracy import Accuracy
from train.metrics.rows import StepTotals, epoch_result, interval_scalars, overall_images_per_second
from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch, Schedule

SQUARE, RECT = Accuracy(2.0, 70.0, 90.0, 20), Accuracy(1.9, 71.0, 91.0, 20)


@pytest.fixture
def epoch() -> Epoch:
    """The second of two epochs: 4 steps of 32 images, of which the last has 4 images."""
    recipe = make_recipe(make_phase((0, 2), 16, (0.0, 0.7), size=64), gpus=2)
    return Schedule(recipe, 100, 2).epochs[1]


def test_interval_scalars_are_means_per_image_and_percent(epoch: Epoch) -> None:
    values = interval_scalars(epoch, StepTotals(64.0, 8, 16, 32, 0.5), 0.3, 0.9, 3)
    assert values == {
        "loss/train": 2.0, "accuracy/train_top1": 25.0, "accuracy/train_top5": 50.0,
        "sizes/lr": 0.3, "sizes/momentum": 0.9, "sizes/image": 64, "sizes/batch": 16, "sizes/batch_total": 32,
        "sizes/world": 3, "times/images_per_second": 64.0,
    }  # fmt: skip


@pytest.mark.parametrize(("accuracies", "view", "main"), [
    ({"square": SQUARE}, "square", SQUARE), ({"rect": RECT, "square": SQUARE}, "rect", RECT),
])  # fmt: skip
def test_epoch_row_reports_the_main_view_and_the_square_one(
    accuracies: Any, view: str, main: Accuracy, epoch: Epoch
) -> None:
    row = epoch_result(epoch, StepTotals(200.0, 25, 50, 100, 4.0), accuracies, 1.5)
    assert row == EpochResult(
        epoch=2, size=64, global_batch=32, steps=4, lr=row.lr,
        train_loss=2.0, train_top1=25.0, train_top5=50.0, train_images=100, images_per_second=25.0,
        view=view, top1=main.top1, top5=main.top5, val_loss=main.loss, val_images=20, top1_square=70.0,
        top5_square=90.0, seconds=5.5, train_seconds=4.0, val_seconds=1.5,
    )  # fmt: skip
    assert row.lr == pytest.approx(0.7), "of its last step"
    assert overall_images_per_second([row, replace(row, train_seconds=1.0)]) == 40.0, "of the training only"
