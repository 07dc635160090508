"""The numbers of an interval of steps, of an epoch and of a run. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from train.recipe.history import EpochResult
from train.recipe.schedule import Epoch

from .accuracy import Accuracy, has_top5


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
        "loss/train": totals.loss / totals.images,
        "accuracy/train_top1": 100 * totals.top1 / totals.images,
        "accuracy/train_top5": 100 * totals.top5 / totals.images,
        "sizes/lr": lr,
        "sizes/momentum": momentum,
        "sizes/image": epoch.scheduled_phase.size,
        "sizes/batch": epoch.scheduled_phase.phase.batch,
        "sizes/batch_total": epoch.scheduled_phase.global_batch,
        "sizes/world": world_size,
        "times/images_per_second": totals.images / totals.seconds,
    }


def epoch_result(
    epoch: Epoch, totals: StepTotals, accuracies: Mapping[str, Accuracy], val_seconds: float, classes: int
) -> EpochResult:
    """Return the result of an epoch, without its times by part and the time of its end.

    `accuracies` has the result of each view of the validation, the main view first; it is empty where the epoch was not
    validated. There is no top-5 where it says nothing (`has_top5`).
    """
    view, accuracy = next(iter(accuracies.items()), (None, None))
    square = accuracies.get("square")
    return EpochResult(
        epoch=epoch.number + 1,
        size=epoch.scheduled_phase.size,
        global_batch=epoch.scheduled_phase.global_batch,
        lr=epoch.lr_at(epoch.steps - 1),
        steps=epoch.steps,
        seconds=totals.seconds + val_seconds,
        train_seconds=totals.seconds,
        val_seconds=val_seconds,
        train_loss=totals.loss / totals.images,
        train_top1=100 * totals.top1 / totals.images,
        train_top5=100 * totals.top5 / totals.images,
        train_images=totals.images,
        val_loss=accuracy.loss if accuracy else None,
        val_images=accuracy.images if accuracy else None,
        view=view,
        top1=accuracy.top1 if accuracy else None,
        top5=accuracy.top5 if accuracy and has_top5(classes) else None,
        top1_square=square.top1 if square else None,
        top5_square=square.top5 if square and has_top5(classes) else None,
        images_per_second=totals.images / totals.seconds,
    )


def overall_images_per_second(epochs: Sequence[EpochResult]) -> float:
    """Return the images per second over the training of all epochs."""
    return sum(epoch.train_images for epoch in epochs) / sum(epoch.train_seconds for epoch in epochs)
