"""What a seed of trials.py stands for, and what became of it."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic import faults

EVENT_WEIGHTS = {
    "kill": 4,
    "kill two": 2,
    "kill head": 3,
    "kill trainer": 2,
    "freeze": 3,
    "notice": 3,
}  # with their weights
OTHER_FAULTS = ("join", "kill in link", "kill in save", "kill at result")
MAX_TRAINER_KILLS = 2  # the third of one machine, or at one step, ends a job by design


@dataclass(frozen=True)
class TrialPlan:
    """What a seed stands for. `kill` is for machine 0, which is the head at first: it makes the links and saves."""

    seed: int
    machines: int
    procs: int
    standby: bool
    kill_point: str
    events: tuple[tuple[float, str, float], ...]  # seconds after the one before, what, and a random number for whom

    @classmethod
    def from_seed(cls, seed: int, is_small: bool = False) -> "TrialPlan":
        """Draw one; small: fewer machines and events."""
        dice = random.Random(seed)
        names, weights = zip(*EVENT_WEIGHTS.items(), strict=True)
        count = 2 if is_small else dice.randint(3, 6)
        events = [(dice.uniform(0.3, 3.0), dice.choices(names, weights)[0], dice.random()) for _ in range(count)]
        point = dice.choice(faults.KILL_POINTS)
        turn = 1 if point.startswith("result") else dice.randint(1, 2 if is_small else 3)
        who = "trainer" if point.startswith("save") and dice.random() < 0.3 else "machine"
        return cls(
            seed, dice.choice((3, 4)), 1 if is_small else dice.choice((1, 1, 2)), dice.random() < 0.8,
            f"{point} {turn} {who}" if dice.random() < 0.75 else "", tuple(events),
        )  # fmt: skip


@dataclass
class TrialOutcome:
    """What became of a trial: what was done to it, and what is wrong with it, nothing when all is well."""

    plan: TrialPlan
    folder: Path
    event_counts: Counter[str] = field(default_factory=Counter)
    log_lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
