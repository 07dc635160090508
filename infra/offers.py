"""What a cloud offers, and what a check of a launch finds.

The fields have the names that `offers -o json` and `check -o json` have.
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class CapacityBlockRow:
    """A block of reserved machines that can be bought."""

    type: str
    zone: str
    gpus: int
    gpu: str
    machines: int
    start: str
    end: str
    hours: float  # until the cloud ends the machines
    fee: float  # for the whole block, paid when it is bought
    currency: str
    offering: str  # its ID
    buy: str  # the shell command that buys the block


@dataclass(frozen=True)
class LaunchFinding:
    """What a check of a launch found."""

    level: str  # "error", "warning" or "ok"
    what: str
    type_next: str = ""  # a command that helps, "" if none does

    @classmethod
    def from_line(cls, level: str, line: str) -> Self:
        """Return a finding from the line of an error, which says what to type next after its last semicolon."""
        message, _, next_step = line.rpartition("; ")
        return cls(level, message or next_step, next_step.removeprefix("type: ") if message else "")
