"""Where the wall time of a run went, as status files and results store it. Imports no torch.

The parts are explained in train/metrics/time_breakdown.py, which measures them.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class TimePart(StrEnum):
    """A part of the wall time."""

    STEPS = "steps"
    WAITS = "waits"
    VALIDATION = "validation"
    SWITCHES = "switches"
    CHECKPOINTS = "checkpoints"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """The seconds of a part, the epoch with most of them (0: none), and the seconds of that epoch."""

    seconds: float
    epoch: int
    most: float


@dataclass(frozen=True, kw_only=True)
class EpochGap:
    """The gap before the first step of an epoch, in steps."""

    steps: float
    epoch: int


@dataclass(frozen=True, kw_only=True)
class TimeTable:
    """Where the wall time went, in seconds.

    `wall` lasts from the first step to the last. `gap` is the widest gap between two epochs. `start` has the seconds
    before the first step by what they were spent on. `slower` are the seconds by which steps and batches, with their
    waits, were slower than the median of their shape; they lie in the parts from steps to switches. Only a finished run
    has them. `pauses` are the seconds that losses of machines took; only a job knows them.
    """

    wall: float
    parts: dict[TimePart, PartTime]
    gap: EpochGap | None = None
    start: dict[str, float] = field(default_factory=dict)
    slower: float | None = None
    pauses: float = 0.0

    def __post_init__(self) -> None:
        if missing := set(TimePart) - set(self.parts):
            raise ValueError(f"parts: {min(missing)} is missing")
