"""The random fault plan that a seed of trials.py stands for, and the outcome of its trial."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic import faults

EVENT_WEIGHTS = {  # events, with the weights by which they are drawn
    "kill": 4,
    "kill two": 2,
    "kill head": 3,
    "kill trainer": 2,
    "freeze": 3,
    "notice": 3,
}
OTHER_FAULTS = ("join", "kill in link", "kill in save", "kill at result")
MAX_TRAINER_KILLS = 2  # a third crash on one machine, or at one step, ends a job by design


@dataclass(frozen=True)
class TrialPlan:
    """What happens in the trial of a seed: the job's shape, one kill at a point of a write, and timed events.

    `kill_point` is "<point> <occurrence> <victim>", such as "attempt before 2 machine", or "" (see faults.py). It
    applies to machine 0, the head of the first attempt, which links the attempt files and saves the checkpoints.
    """

    seed: int
    machines: int
    procs: int
    standby: bool
    kill_point: str
    events: tuple[tuple[float, str, float], ...]  # seconds after the previous event, kind, random number for the victim

    @classmethod
    def from_seed(cls, seed: int, is_small: bool = False) -> "TrialPlan":
        """Draw the plan of a seed; a small plan has fewer processes and events."""
        rng = random.Random(seed)
        names, weights = zip(*EVENT_WEIGHTS.items(), strict=True)
        event_count = 2 if is_small else rng.randint(3, 6)
        events = [(rng.uniform(0.3, 3.0), rng.choices(names, weights)[0], rng.random()) for _ in range(event_count)]
        point = rng.choice(faults.KILL_POINTS)
        occurrence = 1 if point.startswith("result") else rng.randint(1, 2 if is_small else 3)
        victim = "trainer" if point.startswith("save") and rng.random() < 0.3 else "machine"
        # The order of the draws below is that of the fields: another order would change what a seed stands for.
        return cls(
            seed,
            rng.choice((3, 4)),
            1 if is_small else rng.choice((1, 1, 2)),
            rng.random() < 0.8,
            f"{point} {occurrence} {victim}" if rng.random() < 0.75 else "",
            tuple(events),
        )


@dataclass
class TrialOutcome:
    """What was done to a trial, how often, and what is wrong with its result (`problems`, empty for a good trial)."""

    plan: TrialPlan
    folder: Path
    event_counts: Counter[str] = field(default_factory=Counter)
    log_lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
