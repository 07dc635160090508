"""What a run writes for others to read: the lines of its metrics, and its result. Imports no torch.

The lines of metrics/000007.jsonl are those of attempt 7. Each has its "kind": "start", "train" or "epoch".
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from train.recipe.history import EpochResult
from train.recipe.schedule import PhaseRow
from train.recipe.target import TargetOutcome
from train.tools.files import open_regular
from train.tools.records import DamagedRecord, decode_line, encode
from train.tools.text_files import line_blocks, lines_with, replace_nonfinite

from .time_table import TimeTable


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """A line of the metrics. `time` is a Unix time; `step` and `images` count from the start of the run."""

    attempt: int
    time: float
    step: int
    images: int


@dataclass(frozen=True, kw_only=True)
class StartRow(MetricsRow):
    """The first line of an attempt: where it starts, and what it runs on and with.

    `begun` is when the run's first attempt began to load the images, as a Unix time. `world` is the number of
    processes, `gpus` the number of GPUs of the schedule.
    """

    begun: float
    train_images: int
    val_images: int
    world: int
    gpus: int
    device: str
    processor: str
    precision: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StepRow(MetricsRow):
    """The scalars of an interval of steps, by name in TensorBoard; None: not a number. `epoch` counts from 1."""

    epoch: int
    scalars: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class EpochRow(EpochResult, MetricsRow):
    """A finished epoch."""


ROW_KINDS: dict[type[MetricsRow], str] = {StartRow: "start", StepRow: "train", EpochRow: "epoch"}
# What every line of a type contains, as the trainer writes it.
KIND_MARKERS = {row_type: f'"kind": "{kind}"'.encode() for row_type, kind in ROW_KINDS.items()}
RowT = TypeVar("RowT", bound=MetricsRow)


def row_line(row: MetricsRow) -> str:
    """Return a row as a JSON line with its kind. NaN and infinity become null."""
    return json.dumps(replace_nonfinite({"kind": ROW_KINDS[type(row)], **encode(row)})) + "\n"


def read_metrics_file(path: Path, row_type: type[RowT]) -> Iterator[RowT]:
    """Yield the rows of one type in a file, without damaged lines. Raises `OSError`, not for a missing file."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        for block, _ in line_blocks(file):
            for line in lines_with(KIND_MARKERS[row_type], block):
                if row := parse_row(line, row_type):
                    yield row


def parse_row(line: bytes, row_type: type[RowT]) -> RowT | None:
    """Return the row in a line of the metrics, None for a damaged or incomplete line and for other types of rows."""
    if KIND_MARKERS[row_type] not in line:
        return None
    try:
        return decode_line(row_type, line)
    except DamagedRecord:
        return None


# The names of a validation's scalars in TensorBoard, and their fields in `EpochResult`. TensorBoard sorts the names by
# the alphabet, so accuracy and loss come first.
VAL_SCALARS = {
    "accuracy/val_top1": "top1",
    "accuracy/val_top5": "top5",
    "accuracy/val_top1_square": "top1_square",
    "accuracy/val_top5_square": "top5_square",
    "loss/val": "val_loss",
    "times/val_seconds": "val_seconds",
}


def val_scalars(epoch: EpochResult) -> dict[str, float]:
    """Return the scalars of an epoch's validation by their names in TensorBoard. What was not measured is left out."""
    values = {name: getattr(epoch, field_name) for name, field_name in VAL_SCALARS.items()}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """When the run began to load its images, as a Unix time, and the seconds from then to its end."""

    begun: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What is known of a trained run; None for what is not.

    The trainers write it as their result.json when the schedule is done or the target is reached. The accuracies are
    those of the last epoch in percent; `images_per_second` is that of the training of all epochs. `seconds` has the
    seconds of "attempt", "training", "validation", "waiting for images", and "first step to last without losses".
    `procs` is the number of processes on all machines, `broken_images` that of images in whose place others were taken.
    """

    recipe: str = ""
    top1: float | None = None
    top5: float | None = None
    top1_square: float | None = None
    top5_square: float | None = None
    images_per_second: float | None = None
    images: int | None = None
    steps: int | None = None
    broken_images: int = 0
    epochs: tuple[EpochResult, ...]
    target: TargetOutcome | None = None
    clock: RunClock | None = None
    train_images: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    goodput: float | None = None
    where: TimeTable | None = None
    procs: int = 1
    precision: str | None = None
    device: str | None = None
    seed: int | None = None
    schedule: tuple[PhaseRow, ...] | None = None
    schedule_gpus: int | None = None
    versions: dict[str, str] | None = None
    git_commit: str | None = None
