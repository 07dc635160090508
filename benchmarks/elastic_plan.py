"""What a seed of trials.py stands for, and what became of it."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import elastic_faults

EVENTS = {"kill": 4, "kill two": 2, "kill head": 3, "kill trainer": 2, "freeze": 3, "notice": 3}  # with their weights
BESIDES = ("join", "kill in link", "kill in save", "kill at result")
OWN_FAULTS = 2  # the third of one machine, or at one step, ends a job by design


@dataclass(frozen=True)
class Plan:
    """What a seed stands for. `kill` is for machine 0, which is the head at first: it makes the links and saves."""

    seed: int
    machines: int
    procs: int
    standby: bool
    kill: str
    events: tuple[tuple[float, str, float], ...]  # seconds after the one before, what, and a random number for whom

    @classmethod
    def of(cls, seed: int, small: bool = False) -> "Plan":
        """Draw one; small: fewer machines and events."""
        dice = random.Random(seed)
        names, weights = zip(*EVENTS.items(), strict=True)
        count = 2 if small else dice.randint(3, 6)
        events = [(dice.uniform(0.3, 3.0), dice.choices(names, weights)[0], dice.random()) for _ in range(count)]
        point = dice.choice(elastic_faults.POINTS)
        turn = 1 if point.startswith("result") else dice.randint(1, 2 if small else 3)
        who = "trainer" if point.startswith("save") and dice.random() < 0.3 else "machine"
        return cls(
            seed, dice.choice((3, 4)), 1 if small else dice.choice((1, 1, 2)), dice.random() < 0.8,
            f"{point} {turn} {who}" if dice.random() < 0.75 else "", tuple(events),
        )  # fmt: skip


@dataclass
class Outcome:
    """What became of a trial: what was done to it, and what is wrong with it, nothing when all is well."""

    plan: Plan
    folder: Path
    done: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
