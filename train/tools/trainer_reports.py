"""What a trainer reports to the agent of its machine: its state, its numbers, and why it failed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class TrainerState(StrEnum):
    """What a trainer does at the moment."""

    STARTING = "starting"
    INDEXING = "indexing"
    JOINING = "joining"
    WARMING = "warming"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVED = "saved"
    DONE = "done"


class Fault(StrEnum):
    """The cause of a failure."""

    NONE = ""  # nothing failed, or another machine was the cause
    OWN = "own"  # the trainer itself
    PEER = "peer"  # another process disappeared
    CHECKPOINT = "checkpoint"  # the checkpoint to resume from cannot be read
    FINAL = "final"  # the trainer itself, and every further attempt would fail too
    INPUT = "input"  # the recipe, the options or the images: until they are changed, every attempt fails
    MACHINE = "machine"  # the machine: its driver hangs or a GPU is lost, so only another machine can go on


@dataclass(frozen=True, kw_only=True)
class TrainingNumbers:
    """How far training is, as a trainer reports it. None: not known yet.

    `busy` has the share of the last seconds' steps in which each rank of the machine did not wait for other ranks.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    images_per_second: float | None = None
    lr: float | None = None
    loss: float | None = None
    top1: float | None = None
    top5: float | None = None
    busy: tuple[float | None, ...] | None = None
    where: dict[str, Any] | None = None  # Any: the breakdown of train.metrics.time_breakdown, passed on as it is


@dataclass(frozen=True, kw_only=True)
class TrainerProgress(TrainingNumbers):
    """The content of progress.json. `ticks` changes while there is nothing else to report.

    `keeps_state` says that the trainer would keep its state if another process disappeared now.
    """

    state: TrainerState
    ticks: int = 0
    keeps_state: bool = False


@dataclass(frozen=True, kw_only=True)
class KeptStateReport:
    """The content of kept-3.json: the finished steps of a trainer that waits for the next attempt.

    `has_saved` says whether it waits because it was asked to save; else another process is gone, as `reason` says.
    """

    step: int
    has_saved: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainerFailure:
    """The content of failed-3.json. `time` is in seconds since 1970."""

    rank: int
    reason: str
    fault: Fault = Fault.OWN
    time: float
