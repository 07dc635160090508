"""The random fault plans that the seeds of trials.py stand for; a trial, and its outcome."""

import random
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic import faults
from benchmarks.elastic.step_log import StepFindings
from cluster.state.attempts import Attempt

EVENT_WEIGHTS = {  # events, with the weights by which they are drawn
    "kill": 4,
    "kill two": 2,
    "kill head": 3,
    "kill trainer": 2,
    "freeze": 3,
    "notice": 3,
}
KILL_IN_TURN = "kill in turn"
MAX_TRAINER_KILLS = 2  # a third crash at one step ends a job by design
SSH_EVENT_WEIGHTS = {  # events of a job over ssh
    "machine off": 4,
    "head off": 3,
    "two machines off": 2,
    "machine frozen": 3,
    "network cut": 2,
    "notice": 3,
    "trainer killed": 2,
    "agent killed": 3,
    "supervisor killed": 2,
}
RENTED_EVENT_WEIGHTS = {  # events of a job on rented machines
    "machine interrupted with notice": 4,
    "machine lost": 4,
    "all machines lost": 1,
    "machine frozen": 3,
    "trainer killed": 2,
    "agent killed": 3,
    "supervisor killed": 3,
    "EC2 answers with errors": 2,
    "EC2 limits the calls": 2,
    "no capacity": 2,
    "keys expired": 3,
}


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

    @classmethod
    def of_kills_in_turn(cls, seed: int, kills: int) -> "TrialPlan":
        """Return a plan that kills one of two machines after the other, each time all three train."""
        return cls(seed, 3, 1, True, "", ((0.1, KILL_IN_TURN, 0.0),) * kills)

    @property
    def kills_in_turn(self) -> bool:
        """Whether the trial asks what many regroups do to the process that is never killed."""
        return self.events[0][1] == KILL_IN_TURN


@dataclass(frozen=True)
class LaunchedTrialPlan:
    """What happens in the trial of a seed over ssh or on rented machines: their number, and timed events."""

    seed: int
    machines: int
    events: tuple[tuple[float, str, float], ...]  # seconds after the previous event, kind, random number for details

    @classmethod
    def from_seed(
        cls, seed: int, event_weights: Mapping[str, int], machine_counts: Sequence[int]
    ) -> "LaunchedTrialPlan":
        """Draw the plan of a seed."""
        rng = random.Random(seed)
        names, weights = zip(*event_weights.items(), strict=True)
        events = [
            (rng.uniform(0.5, 10.0), rng.choices(names, weights)[0], rng.random()) for _ in range(rng.randint(4, 6))
        ]
        return cls(seed, rng.choice(machine_counts), tuple(events))


@dataclass
class TrialOutcome:
    """What was done to a trial, how often, and what is wrong with its result (`problems`, empty for a good trial)."""

    plan: TrialPlan | LaunchedTrialPlan
    folder: Path
    in_place: bool
    event_counts: Counter[str] = field(default_factory=Counter)
    log_lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    attempts: int = 0
    attempts_in_place: int = 0  # of them, those that went on with the next step
    findings: StepFindings = field(default_factory=StepFindings)
    seconds: float = 0.0

    def note(self, history: Sequence[Attempt], findings: StepFindings) -> None:
        """Note the attempts, and what the log of the steps shows."""
        self.attempts = len(history)
        self.attempts_in_place = sum(attempt.live_step is not None for attempt in history)
        self.findings = findings
        self.problems += findings.problems[:5]


class FaultTrial(ABC):
    """One job, and the faults of its plan."""

    def __init__(self, outcome: TrialOutcome) -> None:
        self.outcome = outcome
        shutil.rmtree(outcome.folder, ignore_errors=True)  # of a trial that was killed
        self.start_time = time.monotonic()

    def run(self) -> TrialOutcome:
        """Run the trial, check its result, and return the outcome."""
        try:
            self.start_job()
            self.run_events()
            self.check_outcome()
        except Exception as error:
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self.clean_up()
        return self.outcome

    @abstractmethod
    def start_job(self) -> None:
        """Start the job."""

    @abstractmethod
    def run_events(self) -> None:
        """Inject the planned events, then wait for the job's end. Raises `TimeoutError` if the job hangs."""

    @abstractmethod
    def inject_event(self, kind: str, number: float) -> bool:
        """Inject an event of the plan; `number` is random, 0 to 1. Return False if that is not possible now."""

    @abstractmethod
    def check_outcome(self) -> None:
        """Check the job's result, and note the problems in the outcome."""

    @abstractmethod
    def clean_up(self) -> None:
        """End all processes of the trial; remove its folder unless there were problems."""

    def inject_next_event(self, events: list[tuple[float, str, float]]) -> None:
        """Inject the first of the events and remove it; one that cannot be injected now goes to the end."""
        event = events.pop(0)
        _, kind, number = event
        if self.inject_event(kind, number):
            self.outcome.event_counts[kind] += 1
        else:
            events.append(event)

    def add_log_line(self, text: str) -> None:
        """Add a line to the trial's log."""
        self.outcome.log_lines.append(f"{time.strftime('%H:%M:%S')} +{time.monotonic() - self.start_time:.1f} {text}")

    def write_log(self) -> None:
        """Write the plan, the log and the problems of the trial into its folder."""
        lines = [str(self.outcome.plan), *self.outcome.log_lines, *self.outcome.problems]
        (self.outcome.folder / "story.txt").write_text("\n".join(lines))
