"""Random schedules of losses against the real agents and trainers, and whether the job came out as if nothing had been.

    .venv/bin/python benchmarks/elastic/trials.py --count 100 --parallel 2

Each trial is a small job of three or four machines on this computer, whose steps are slowed down so that it lasts half
a minute. Machines are killed (the head, two at once, inside a link or a save), trainers killed, machines frozen,
given notice, started again. Afterwards the job must have ended by itself as done; every image used once in every epoch
along the chain of attempts; weights and momentum equal, bit for bit, to a run of one process that nobody disturbed;
and nothing of it may run any more. A trial that fails leaves its folder.

With --fork the processes are forked from one that has loaded torch, ten times cheaper (elastic_faults.py).
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["TrialBench", "TrialPlan", "checkpoint_differences", "run_trials", "table"]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic.bench import TrialBench
from benchmarks.elastic.fault_plan import EVENT_WEIGHTS, OTHER_FAULTS, TrialOutcome, TrialPlan
from benchmarks.elastic.trial import Trial, checkpoint_differences


def run_trials(
    bench: TrialBench,
    seeds: list[int],
    max_parallel: int,
    report_outcome: Callable[[TrialOutcome], None] = lambda _: None,
) -> list[TrialOutcome]:
    """Run the trials of these seeds, so many at a time."""

    def one(seed: int) -> TrialOutcome:
        outcome = Trial(bench, TrialPlan.from_seed(seed, bench.small)).run()
        report_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(max_parallel) as pool:
        return list(pool.map(one, seeds))


def table(outcomes: list[TrialOutcome]) -> Iterator[str]:
    """Yield the rows of what was done in all, and of what went wrong."""
    total = sum((one.event_counts for one in outcomes), Counter[str]())
    yield from ("| | |", "|---|---|")
    for name in (*EVENT_WEIGHTS, *OTHER_FAULTS):
        yield f"| {name} | {total[name]} |"
    yield f"| attempts | {sum(one.attempts for one in outcomes)} |"
    yield f"| good trials | {sum(not one.problems for one in outcomes)} of {len(outcomes)} |"
    for one in outcomes:
        if one.problems:
            yield f"| seed {one.plan.seed}, {one.folder} | {'; '.join(one.problems[:3])} |"


def main() -> int:
    """Run them and print the table. Returns 1 when a trial failed."""
    parser = argparse.ArgumentParser(description="Random schedules of losses against real agents and trainers.")
    parser.add_argument("--count", type=int, default=100, help="how many trials (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's; each next one's is one more")
    parser.add_argument("--parallel", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--fork", action="store_true", help="fork all processes from one that has loaded torch")
    parser.add_argument("--small", action="store_true", help="shorter ones, as in the tests")
    parser.add_argument("--folder", type=Path, help="where they run and failures stay (default: a new one in /tmp)")
    asked = parser.parse_args()
    bench = TrialBench((asked.folder or Path(tempfile.mkdtemp(prefix="trials-"))).resolve(), asked.fork, asked.small)

    def say(one: TrialOutcome) -> None:
        did = ", ".join(f"{name} {count}" for name, count in one.event_counts.items())
        print(
            f"{one.plan.seed:6} {one.seconds:5.0f} s  {one.attempts:2} attempts  {did}  {'; '.join(one.problems[:3])}",
            flush=True,
        )

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # all that was started dies with us
    try:
        found = run_trials(bench, list(range(asked.seed, asked.seed + asked.count)), asked.parallel, say)
    finally:
        bench.close()
    print("\n".join(table(found)))
    if not any(one.problems for one in found):
        shutil.rmtree(bench.folder, ignore_errors=True)
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    sys.exit(main())
