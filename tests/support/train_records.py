"""Made-up records of a run for tests: epochs, lines of metrics, and the trainers' result."""

from typing import Any

from train.metrics.records import ROW_KINDS, EpochRow, MetricsRow, RunClock, StepRow, TrainResult
from train.metrics.time_table import PartTime, TimePart, TimeTable
from train.recipe.history import EpochResult
from train.tools.records import encode

EPOCH_FIELDS: dict[str, Any] = {
    "epoch": 1, "size": 32, "global_batch": 8, "lr": 0.05, "steps": 8, "seconds": 11.5, "train_seconds": 10.0,
    "val_seconds": 1.5, "train_loss": 2.5, "train_top1": 20.0, "train_top5": 60.0, "train_images": 60,
    "images_per_second": 6.0,
}  # fmt: skip
NO_TIME = PartTime(seconds=0.0, epoch=0, most=0.0)


def make_epoch(**fields: Any) -> EpochResult:
    """Return the result of an epoch, without a validation unless the fields say so."""
    return EpochResult(**{**EPOCH_FIELDS, **fields})


def make_result(*epochs: EpochResult, **fields: Any) -> TrainResult:
    """Return the result of a run of these epochs."""
    last = epochs[-1]
    defaults: dict[str, Any] = {
        "recipe": "tiny", "top1": last.top1, "top5": last.top5, "top1_square": None, "top5_square": None,
        "images_per_second": 7.5, "images": 60, "steps": 8, "target": None,
        "clock": RunClock(begun=0.0, seconds=last.clock), "train_images": 60, "seconds": {"training": 4.0},
        "goodput": 0.9, "where": TimeTable(wall=0.0, parts=dict.fromkeys(TimePart, NO_TIME)), "procs": 1,
        "precision": "float32", "device": "cpu", "seed": 0, "schedule": (), "schedule_gpus": 1, "versions": {},
        "git_commit": "of the trainers",
    }  # fmt: skip
    return TrainResult(epochs=epochs, **{**defaults, **fields})


def metrics_line(row: MetricsRow) -> dict[str, Any]:
    return {"kind": ROW_KINDS[type(row)], **encode(row)}


def step_line(
    step: int, time: float = 0.0, images: int | None = None, attempt: int = 1, epoch: int = 1, **scalars: Any
) -> dict[str, Any]:
    """Return the line of an interval of steps. A scalar's name has "__" in place of "/"."""
    named = {name.replace("__", "/"): value for name, value in scalars.items()}
    images = step if images is None else images
    return metrics_line(StepRow(attempt=attempt, time=time, step=step, images=images, epoch=epoch, scalars=named))


def epoch_line(
    step: int, time: float = 0.0, images: int | None = None, attempt: int = 1, **fields: Any
) -> dict[str, Any]:
    place = {"attempt": attempt, "time": time, "step": step, "images": step if images is None else images}
    return metrics_line(EpochRow(**{**EPOCH_FIELDS, **place, **fields}))
