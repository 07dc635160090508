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
    """Whose fault a failure is."""

    NONE = ""  # nobody's: nothing failed, or another machine was the cause
    OWN = "own"
    PEER = "peer"  # another process disappeared
    CHECKPOINT = "checkpoint"  # nobody's: the checkpoint to resume from cannot be read
    FINAL = "final"  # its own, and every further attempt would fail too


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
    """The content of progress.json. `ticks` changes while there is nothing else to report."""

    state: TrainerState
    ticks: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainerFailure:
    """The content of failed-3.json. `time` is in seconds since 1970."""

    rank: int
    reason: str
    fault: Fault = Fault.OWN
    time: float
