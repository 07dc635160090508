"""The numbers of a stretch, an epoch and a run as plain data. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from train.recipe.schedule import Epoch

from .accuracy import Accuracy


@dataclass(frozen=True)
class StepTotals:
    """Over some steps and all processes: summed loss, hits, images, and seconds from first to last."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    images: int = 0
    seconds: float = 0.0

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def interval_scalars(epoch: Epoch, totals: StepTotals, lr: float, momentum: float, world_size: int) -> dict[str, float]:
    """Return a stretch of steps as TensorBoard's scalars."""
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
    """Return an epoch's row of the result; "top1" and "top5" are those of the first view, in percent.

    What only a validation knows is None after an epoch without one.
    """
    view, best = next(iter(accuracies.items()), (None, None))
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
        "val_loss": best and best.loss,
        "val_images": best and best.images,
        "view": view,
        "top1": best and best.top1,
        "top5": best and best.top5,
        "top1_square": square and square.top1,
        "top5_square": square and square.top5,
        "images_per_second": totals.images / totals.seconds,
    }


def run_summary(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last epoch's accuracies, and images per second over all training."""
    last, seconds = epochs[-1], sum(one["train_seconds"] for one in epochs)
    return {
        "top1": last["top1"],
        "top5": last["top5"],
        "top1_square": last["top1_square"],
        "top5_square": last["top5_square"],
        "images_per_second": sum(one["train_images"] for one in epochs) / seconds,
    }
