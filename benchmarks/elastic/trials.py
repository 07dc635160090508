"""Runs random schedules of faults against real jobs, and checks that each job's result is unharmed.

    .venv/bin/python benchmarks/elastic/trials.py local --small --count 100 --results local.jsonl
    .venv/bin/python benchmarks/elastic/trials.py ssh --count 20 --results ssh.jsonl
    .venv/bin/python benchmarks/elastic/trials.py rented --seed 7 --count 1 --no-in-place     # one of them again
    .venv/bin/python benchmarks/elastic/trials.py local --regroups 200                        # one job, many kills
    .venv/bin/python benchmarks/elastic/trials.py --report *.jsonl              # writes their section of RESULTS.md

Each trial is a small job on two to four machines: agents on this computer, without a supervisor; over ssh, with a real
sshd for each machine; or rented on the simulated EC2. Its steps are slowed down so that it lasts half a minute to a
minute. Machines are killed (the head, two at once, within a link or a save), frozen, given notice, interrupted, cut
off, and come back; trainers, agents and the supervisor are killed; EC2 answers with errors, has no capacity, or refuses
the keys. Faults also strike while the job recovers from an earlier one.

Afterwards all of this must hold: the job has ended by itself as done; every image was used once in every epoch;
weights, batch-norm statistics and momentum after each step of each process, and in the last checkpoint, equal, bit for
bit, those of an undisturbed run of one process; a process that goes on in place repeats no step; a machine without a
fault keeps its processes; nothing is left that runs; and on rented machines `cost` says what the cloud's meter says. A
trial that fails keeps its folder.

With --results, each trial adds one line of JSON to a file, and those that are in it already are not run again. Local
processes are forked from one that has imported torch, which is ten times cheaper (faults.py).
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["Trial", "TrialBench", "TrialPlan", "run_trials"]
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.elastic.bench import TrialBench
from benchmarks.elastic.fault_plan import (
    RENTED_EVENT_WEIGHTS,
    SSH_EVENT_WEIGHTS,
    FaultTrial,
    LaunchedTrialPlan,
    TrialOutcome,
    TrialPlan,
)
from benchmarks.elastic.step_log import MANY_REGROUPS
from benchmarks.elastic.trial import Trial
from benchmarks.measure import describe_machine, write_section

Row = Mapping[str, Any]  # a line of a results file


def run_trials(
    make_trial: Callable[[int], FaultTrial],
    seeds: Iterable[int],
    max_parallel: int,
    report_outcome: Callable[[TrialOutcome], None] = lambda _: None,
) -> list[TrialOutcome]:
    """Run the trials of these seeds, at most `max_parallel` at a time, and return their outcomes in order."""

    def run_trial(seed: int) -> TrialOutcome:
        outcome = make_trial(seed).run()
        report_outcome(outcome)
        return outcome

    if max_parallel == 1:  # in this thread: processes that die with their parent die with the thread that started them
        return [run_trial(seed) for seed in seeds]
    with ThreadPoolExecutor(max_parallel) as pool:
        return list(pool.map(run_trial, seeds))


@contextlib.contextmanager
def trial_maker(options: argparse.Namespace, folder: Path) -> Iterator[Callable[[int], FaultTrial]]:
    """Give the function that makes the trial of a seed; end afterwards what all trials share."""
    bench = TrialBench(folder, options.small, options.in_place, options.regroups)
    cloud = None
    try:
        if options.place == "local":
            kills = options.regroups // 2
            yield lambda seed: Trial(
                bench, TrialPlan.of_kills_in_turn(seed, kills) if kills else TrialPlan.from_seed(seed, bench.small)
            )
            return
        from benchmarks.elastic.launched_trial import RentedTrial, SshTrial

        if options.place == "ssh":
            yield lambda seed: SshTrial(bench, LaunchedTrialPlan.from_seed(seed, SSH_EVENT_WEIGHTS, (3, 4)))
            return
        from support.simcloud.fixture import CloudProcess

        cloud = running_cloud = CloudProcess()
        yield lambda seed: RentedTrial(
            bench, LaunchedTrialPlan.from_seed(seed, RENTED_EVENT_WEIGHTS, (2, 3)), running_cloud
        )
    finally:
        bench.close()
        if cloud:
            cloud.close()


def as_row(outcome: TrialOutcome, options: argparse.Namespace) -> Row:
    """Return the line of a results file about a trial that has ended."""
    return {
        "place": options.title,
        "in_place": outcome.in_place,
        "seed": outcome.plan.seed,
        "seconds": round(outcome.seconds, 1),
        "load": round(os.getloadavg()[0], 1),
        "faults": dict(outcome.event_counts),
        "attempts": outcome.attempts,
        "attempts_in_place": outcome.attempts_in_place,
        **asdict(outcome.findings),
        "problems": outcome.problems,
        "folder": str(outcome.folder) if outcome.problems else "",
    }


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Return the lines of results files. A trial that was run again counts once, as it ended last."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return list({(row["place"], row["in_place"], row["seed"]): row for row in rows}.values())


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table with a column for each place and way."""
    columns: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        columns[f"{row['place']}, {'in place' if row['in_place'] else 'restart'}"].append(row)

    def line(title: str, cell: Callable[[list[Row]], object]) -> str:
        return f"| {title} | {' | '.join(str(cell(column)) for column in columns.values())} |"

    def total(key: str) -> Callable[[list[Row]], int]:
        return lambda column: sum(row[key] for row in column)

    def faults(column: list[Row]) -> str:
        counts = sum((Counter(row["faults"]) for row in column), Counter[str]())
        return ", ".join(f"{count} {name}" for name, count in counts.most_common())

    def usage(column: list[Row]) -> str:
        """Return what the process that regrouped most often has used: early on, in the middle, and at the end."""
        usage = max((row["usage"] for row in column if row["usage"]), key=lambda usage: usage[-1][0], default=[])
        is_long = bool(usage) and usage[-1][0] >= MANY_REGROUPS
        shown = [usage[len(usage) // 4], usage[len(usage) // 2], usage[-1]] if is_long else []
        return "; ".join(f"{number}: {fds}, {threads}, {mb:.0f}" for number, fds, threads, mb in shown)

    yield from (f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}")
    yield line("good schedules", lambda column: f"{sum(not row['problems'] for row in column)} of {len(column)}")
    yield line("faults", faults)
    yield line("attempts", total("attempts"))
    yield line("of them in place", total("attempts_in_place"))
    yield line("steps of all processes, each compared with the undisturbed run", total("steps"))
    yield line("steps that a process did again after going on in place", total("lost"))
    yield line("processes that went on in place as the same process", total("kept"))
    yield line("that were replaced (not good where no fault had hit their machine)", total("replaced"))
    yield line("regroups so far: file descriptors, threads, MB of the process with most of them", usage)
    yield line(
        "seconds a schedule: median (largest)",
        lambda column: "{:.0f} ({:.0f})".format(
            statistics.median(row["seconds"] for row in column), max(row["seconds"] for row in column)
        ),
    )
    yield line("load average: median", lambda column: round(statistics.median(row["load"] for row in column), 1))


def section(rows: list[Row]) -> list[str]:
    """Return the lines of the section of RESULTS.md."""
    failed = [
        f"- {row['place']}, seed {row['seed']}: {'; '.join(row['problems'][:3])}" for row in rows if row["problems"]
    ]
    return [
        "## Random schedules of faults",
        "",
        f'{describe_machine()}; `benchmarks/elastic/trials.py`, which says what has to hold. "rented" is the',
        "simulated EC2. The numbers of correctness do not depend on the load; the seconds do. We know no peer that",
        "promises this, so none is measured beside it.",
        "",
        *table(rows),
        *(["", "Not good:", "", *failed] if failed else []),
    ]


def main() -> int:
    """Run the trials and print the table, or write it to RESULTS.md. Return 1 if a trial failed."""
    parser = argparse.ArgumentParser(description="Run random schedules of faults against real jobs.")
    parser.add_argument("place", nargs="?", choices=("local", "ssh", "rented"), default="local", help="default: local")
    parser.add_argument("--count", type=int, default=20, help="number of trials (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial; each further trial adds one")
    parser.add_argument(
        "--in-place", action=argparse.BooleanOptionalAction, default=True, help="how trainers go on (default: in place)"
    )
    parser.add_argument("--parallel", type=int, default=2, help="local trials at a time (default: 2)")
    parser.add_argument("--small", action="store_true", help="local: shorter trials, as in the tests")
    parser.add_argument(
        "--regroups", type=int, default=0, metavar="N", help="local: instead, one job whose processes regroup N times"
    )
    parser.add_argument(
        "--folder", type=Path, help="where trials run and failed trials stay (default: a new folder in /tmp)"
    )
    parser.add_argument("--results", type=Path, help="file of JSON lines; trials that are in it are not run again")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="write the section of RESULTS.md")
    options = parser.parse_args()
    if options.report:
        rows = read_rows(options.report)
        write_section("elastic/trials.py", section(rows))
        print("\n".join(table(rows)))
        return 0
    options.title = f"{options.place}, regroups" if options.regroups else options.place
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="trials-"))).resolve()
    results = options.results or folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # local processes die with this one, others have to be ended
        signal.signal(number, lambda *_: os._exit(130) if options.place == "local" else sys.exit(130))

    def report_outcome(outcome: TrialOutcome) -> None:
        line = json.dumps(as_row(outcome, options))
        print(line, flush=True)
        with results.open("a") as file:
            file.write(line + "\n")

    done = {
        row["seed"]
        for row in read_rows([results])
        if (row["place"], row["in_place"]) == (options.title, options.in_place)
    }
    count = 1 if options.regroups else options.count
    seeds = [seed for seed in range(options.seed, options.seed + count) if seed not in done]
    parallel = options.parallel if options.place == "local" else 1
    with trial_maker(options, folder) as make_trial:
        outcomes = run_trials(make_trial, seeds, parallel, report_outcome)
    print("\n".join(table(read_rows([results]))))
    any_failed = any(outcome.problems for outcome in outcomes)
    if not any_failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
