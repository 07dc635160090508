"""Runs random schedules of faults against real agents and trainers, and checks that each job's result is unharmed.

    .venv/bin/python benchmarks/elastic/trials.py --count 100 --parallel 2

Each trial is a small job of three or four machines on this computer. Its steps are slowed down so that it lasts half a
minute. Machines are killed (the head, two at once, within a link or a save), frozen, given notice and started again;
trainers are killed. Afterwards all of this must hold: the job has ended by itself as done; every image was used once in
every epoch along the chain of attempts; weights and momentum equal, bit for bit, those of an undisturbed run of one
process; and no process of the job is left. A trial that fails keeps its folder.

With --fork the processes are forked from one that has imported torch, which is ten times cheaper (faults.py).
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["TrialBench", "TrialPlan", "checkpoint_differences", "print_outcome", "run_trials", "table"]
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.elastic.bench import TrialBench
from benchmarks.elastic.fault_plan import EVENT_WEIGHTS, OTHER_FAULTS, TrialOutcome, TrialPlan
from benchmarks.elastic.trial import Trial, checkpoint_differences

FAULT_NAMES = (*EVENT_WEIGHTS, *OTHER_FAULTS)


def run_trials(
    bench: TrialBench,
    seeds: list[int],
    max_parallel: int,
    report_outcome: Callable[[TrialOutcome], None] = lambda _: None,
) -> list[TrialOutcome]:
    """Run the trials of these seeds, at most `max_parallel` at a time, and return their outcomes in order."""

    def run_trial(seed: int) -> TrialOutcome:
        outcome = Trial(bench, TrialPlan.from_seed(seed, bench.small)).run()
        report_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(max_parallel) as pool:
        return list(pool.map(run_trial, seeds))


def table(outcomes: list[TrialOutcome], fault_names: Iterable[str] = FAULT_NAMES) -> Iterator[str]:
    """Yield the rows of a table: the faults of all trials, and what went wrong."""
    total_counts = sum((outcome.event_counts for outcome in outcomes), Counter[str]())
    yield from ("| | |", "|---|---|")
    for name in fault_names:
        yield f"| {name} | {total_counts[name]} |"
    yield f"| attempts | {sum(outcome.attempts for outcome in outcomes)} |"
    yield f"| of them in place | {sum(outcome.attempts_in_place for outcome in outcomes)} |"
    yield f"| good trials | {sum(not outcome.problems for outcome in outcomes)} of {len(outcomes)} |"
    for outcome in outcomes:
        if outcome.problems:
            yield f"| seed {outcome.plan.seed}, {outcome.folder} | {'; '.join(outcome.problems[:3])} |"


def print_outcome(outcome: TrialOutcome) -> None:
    """Print a line about a trial that has ended."""
    events = ", ".join(f"{name} {count}" for name, count in outcome.event_counts.items())
    problems = "; ".join(outcome.problems[:3])
    print(
        f"{outcome.plan.seed:6} {outcome.seconds:5.0f} s  {outcome.attempts:2} attempts, "
        f"{outcome.attempts_in_place:2} in place  {events}  {problems}",
        flush=True,
    )


def main() -> int:
    """Run the trials and print the table. Return 1 if a trial failed."""
    parser = argparse.ArgumentParser(description="Run random schedules of faults against real agents and trainers.")
    parser.add_argument("--count", type=int, default=100, help="number of trials (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial; each further trial adds one")
    parser.add_argument("--parallel", type=int, default=2, help="trials at a time (default: 2)")
    parser.add_argument("--fork", action="store_true", help="fork all processes from one that has imported torch")
    parser.add_argument("--small", action="store_true", help="shorter trials, as in the tests")
    parser.add_argument(
        "--recovery", choices=("in-place", "restart"), default="in-place", help="how trainers go on after a loss"
    )
    parser.add_argument(
        "--folder", type=Path, help="where trials run and failed trials stay (default: a new folder in /tmp)"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="trials-"))
    bench = TrialBench(folder.resolve(), options.fork, options.small, options.recovery == "in-place")
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # all child processes die with this one
    seeds = list(range(options.seed, options.seed + options.count))
    try:
        outcomes = run_trials(bench, seeds, options.parallel, print_outcome)
    finally:
        bench.close()
    print("\n".join(table(outcomes)))
    any_failed = any(outcome.problems for outcome in outcomes)
    if not any_failed:
        shutil.rmtree(bench.folder, ignore_errors=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
