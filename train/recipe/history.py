"""The row that a run keeps of each finished epoch: in its checkpoints, its metrics and its result. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """What an epoch trained and measured. `epoch` counts from 1; accuracies are in percent, losses are per image.

    `lr` is the learning rate of the last step. `view`, `top1` and `top5` are of the main view of the validation, the
    values that end in `_square` of its square centre crop; all are None where no validation was made. `at` is the Unix
    time of the epoch's end and `clock` the seconds since the run began to load its images. `where` has the seconds of
    the epoch by part (`TimePart`); `gap_steps` is the gap before its first step in steps, None without an epoch before.
    """

    epoch: int
    size: int
    global_batch: int
    lr: float
    steps: int
    seconds: float
    train_seconds: float
    val_seconds: float
    train_loss: float
    train_top1: float
    train_top5: float
    train_images: int
    val_loss: float | None = None
    val_images: int | None = None
    view: str | None = None
    top1: float | None = None
    top5: float | None = None
    top1_square: float | None = None
    top5_square: float | None = None
    images_per_second: float
    at: float | None = None
    clock: float | None = None
    where: dict[str, float] = field(default_factory=dict)
    gap_steps: float | None = None


def best_epoch(history: Sequence[EpochResult]) -> EpochResult | None:
    """Return the epoch of the highest top-1 in validation, the latest of equals; None when none was validated."""
    validated = [epoch for epoch in history if epoch.top1 is not None]
    return max(reversed(validated), key=lambda epoch: epoch.top1 or 0.0, default=None)
