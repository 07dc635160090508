"""The numbers of an interval of steps, of an epoch and of a run as plain data. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from train.recipe.schedule import Epoch

from .accuracy import Accuracy


@dataclass(frozen=True)
class StepTotals:
    """Sums over some steps and all processes: loss, top-1 and top-5 hits, images, and seconds from first to last."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    images: int = 0
    seconds: float = 0.0

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(*(own + added for own, added in zip(astuple(self), astuple(other), strict=True)))


def interval_scalars(epoch: Epoch, totals: StepTotals, lr: float, momentum: float, world_size: int) -> dict[str, float]:
    """Return the scalars of an interval of steps by their names in TensorBoard: losses per image, hits in percent."""
    return {
        "train/loss": totals.loss / totals.images,
        "train/top1": 100 * totals.top1 / totals.images,
        "train/top5": 100 * totals.top5 / totals.images,
        "sizes/lr": lr,
        "sizes/momentum": momentum,
        "sizes/image": epoch.scheduled_phase.phase.size,
        "sizes/batch": epoch.scheduled_phase.phase.batch,
        "sizes/batch_total": epoch.scheduled_phase.global_batch,
        "sizes/world": world_size,
        "times/images_per_second": totals.images / totals.seconds,
    }


def epoch_row(
    epoch: Epoch, totals: StepTotals, accuracies: Mapping[str, Accuracy], val_seconds: float
) -> dict[str, Any]:
    """Return an epoch's row of result.json. "epoch" counts from 1.

    `accuracies` has the result of each view of the validation, the main view first; it is empty where the epoch was not
    validated. "top1" and "top5" are those of the main view, in percent. Values of a validation that was not made are
    None.
    """
    view, accuracy = next(iter(accuracies.items()), (None, None))
    square = accuracies.get("square")
    return {
        "epoch": epoch.number + 1,
        "size": epoch.scheduled_phase.phase.size,
        "global_batch": epoch.scheduled_phase.global_batch,
        "lr": epoch.lr_at(epoch.steps - 1),
        "steps": epoch.steps,
        "seconds": totals.seconds + val_seconds,
        "train_seconds": totals.seconds,
        "val_seconds": val_seconds,
        "train_loss": totals.loss / totals.images,
        "train_top1": 100 * totals.top1 / totals.images,
        "train_top5": 100 * totals.top5 / totals.images,
        "train_images": totals.images,
        "val_loss": accuracy and accuracy.loss,
        "val_images": accuracy and accuracy.images,
        "view": view,
        "top1": accuracy and accuracy.top1,
        "top5": accuracy and accuracy.top5,
        "top1_square": square and square.top1,
        "top5_square": square and square.top5,
        "images_per_second": totals.images / totals.seconds,
    }


def run_summary(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last epoch's accuracies, and the images per second over the training of all epochs."""
    last = epochs[-1]
    train_seconds = sum(row["train_seconds"] for row in epochs)
    return {
        "top1": last["top1"],
        "top5": last["top5"],
        "top1_square": last["top1_square"],
        "top5_square": last["top5_square"],
        "images_per_second": sum(row["train_images"] for row in epochs) / train_seconds,
    }
