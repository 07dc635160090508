"""Seconds from a loss to the next training step of four machines on this computer, compared with torchrun elastic.

    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --results FILE        # about 60 minutes
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --results FILE --minutes 4   # a part; again and again
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --way in-place --quick worker notice
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --results FILE --losses 7     # goodput, a loss a minute
    .venv/bin/python benchmarks/elastic/recovery.py --results FILE --report          # writes the section of RESULTS.md

DIR holds CIFAR-10 as JPEG files: train/<class>/*.jpg and val/... Nothing else should run on the computer. Each
measurement is a line of JSON in FILE at once, and a measurement that is there is not made again. With `--minutes` none
begins later; the longest, of torchrun, takes four to five minutes.

The time of a kill is taken by our clock. The time of the next step is that of the first line of the next attempt's
metrics, which rank 0 writes after its first step. Where no process is killed, the pause begins with the last line of
the previous attempt: before a planned end that line is written after the last step. Each case waits until all four
machines train, their standbys are ready, and an epoch is in its middle, because validation is not to be measured.
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.ssh_machines import MARK_VARIABLE

from benchmarks.elastic.local_agents import RECIPE, SAVE_SECONDS, STALL_SECONDS, LocalJob, kill_processes
from benchmarks.elastic.torchrun_peer import MACHINES, TorchrunElastic
from benchmarks.measure import goal_verdict, write_section
from cluster.state.timeline import read_timeline

ROUNDS = 5
SILENT_ROUNDS = 3  # of torchrun's defaults, whose rounds end without a step, after four minutes
EXIT_UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h
LOSS_INTERVAL_SECONDS = 60.0
GOODPUT_GOAL = 0.95
OUR_WAYS = ("in-place", "restart")  # with --in-place on and off
WAYS = {
    "in-place": "ours, in place",
    "restart": "ours, restart",
    "torchrun-defaults": "torchrun elastic, defaults",
    "torchrun-tuned": "torchrun elastic, tuned, its store elsewhere",
}
CASE_TITLES = {
    "worker": "a machine other than the head killed",
    "head": "the head machine killed",
    "two": "two machines killed at once, one of them the head",
    "second": "a second machine killed while the others regroup after the first",
    "frozen": "a machine frozen, without the 5 s of --lost-seconds",
    "frozen_trainer": f"a trainer frozen, without the {STALL_SECONDS} s of --stall-seconds",
    "notice": "a machine leaves after a notice: pause of the others",
    "crash": "a trainer crashes",
    "join": "a machine joins: pause of the others",
}


class Measurements:
    """The measurements so far: lines of JSON in a file, or with None in memory only."""

    def __init__(self, path: Path | None, end_time: float = math.inf) -> None:
        self.path, self.end_time = path, end_time
        self.load_before = os.getloadavg()[0]
        self.rows: list[dict[str, Any]] = []
        if path and path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def values(self, way: str, case: str) -> list[float | str]:
        """Return the seconds of a case, or a text for a round without a next step."""
        return [row["value"] for row in self.rows if (row["way"], row["case"]) == (way, case)]

    def lacks(self, way: str, case: str, rounds: int) -> bool:
        """Return whether a round is to be measured. Raises `SystemExit` when the time for that is over."""
        is_missing = len(self.values(way, case)) < rounds
        if is_missing and time.monotonic() > self.end_time:
            print(f"not finished: {way}, {case}; run this command again", flush=True)
            sys.exit(EXIT_UNFINISHED)
        return is_missing

    def add(self, way: str, case: str, value: float | str, steps_lost: int | None = None) -> None:
        """Add a measurement, print it, and write it to the file."""
        text = value if isinstance(value, str) else round(value, 4)
        loads = {"load_before": self.load_before, "load": os.getloadavg()[0]}
        self.rows.append(
            {"way": way, "case": case, "value": text, "steps_lost": steps_lost, **loads, "time": time.time()}
        )
        print(time.strftime("%H:%M:%S"), self.rows[-1], flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")


def measure_ours(
    measurements: Measurements, way: str, work_folder: Path, data: Path, cases: Sequence[str], rounds: int
) -> None:
    """Measure the rounds that are missing of each case, each on a new job. The pause of each join is measured too."""
    environment = process_environment(work_folder)
    for case in cases:
        if not measurements.lacks(way, case, rounds):
            continue
        with LocalJob(work_folder / f"{way}-{case}", data, environment, way == "in-place") as local_job:
            while measurements.lacks(way, case, rounds):
                seconds = measure_case(local_job, "worker" if case == "join" else case)
                if case != "join":
                    measurements.add(way, case, seconds, local_job.steps_lost)
                local_job.wait_until_ready()
                while local_job.join_pauses:
                    measurements.add(way, "join", local_job.join_pauses.pop())


def measure_case(local_job: LocalJob, case: str, max_tries: int = 3) -> float:
    """Measure a case once the job is ready; try again if another event interfered."""
    for tries_left in reversed(range(max_tries)):
        try:
            local_job.wait_until_ready()
            return float(getattr(local_job, case)())
        except (RuntimeError, ProcessLookupError) as error:
            print(f"{case}: {error}", flush=True)
            if not tries_left:
                raise
    raise AssertionError


def measure_torchrun(
    measurements: Measurements, way: str, work_folder: Path, data: Path, cases: Sequence[str], rounds: int
) -> None:
    """Measure the rounds that are missing of torchrun, for the loss of a worker and of the head."""
    arguments = [str(RECIPE), "--data", str(data), "--gpus", str(MACHINES), "--workers", "0", "--threads", "1"]
    arguments += ["--save-seconds", str(SAVE_SECONDS)]
    for case in sorted({"worker", "head"} & {*cases}):
        while measurements.lacks(way, case, rounds):
            folder = work_folder / f"{way}-{case}-{len(measurements.rows)}"
            is_tuned = way == "torchrun-tuned"
            with TorchrunElastic(folder, arguments, process_environment(work_folder), is_tuned) as run:
                run.wait_until_training()
                seconds = run.kill_agent(kill_head=case == "head")
            measurements.add(way, case, seconds)


def measure_goodput(measurements: Measurements, way: str, work_folder: Path, data: Path, losses: int) -> None:
    """Measure the goodput of a job that loses one of its four machines every minute."""
    with LocalJob(work_folder / way, data, process_environment(work_folder), way == "in-place") as local_job:
        local_job.wait_until_ready()
        for _ in range(losses):
            next_loss_time = time.monotonic() + LOSS_INTERVAL_SECONDS
            print(f"{time.strftime('%H:%M:%S')} {local_job.worker():.2f} s to the next step", flush=True)
            time.sleep(max(0.0, next_loss_time - time.monotonic()))
        goodput = read_timeline(local_job.running_job.run_folder).goodput or 0.0
    measurements.add(way, "goodput", goodput)
    print(f"{way}: {losses} losses, goal {GOODPUT_GOAL:.0%}: {goal_verdict(goodput, GOODPUT_GOAL)}", flush=True)


def process_environment(work_folder: Path) -> dict[str, str]:
    """Return the environment of all processes: a home and a tmux server of their own, and a mark to find them by."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TMUX", "IMGNET_RUNS")}
    own = {"HOME": str(work_folder), "TMUX_TMPDIR": str(work_folder), "TERM": "xterm", MARK_VARIABLE: str(work_folder)}
    return {**inherited, **own, "PYTHONPATH": str(ROOT)}


def format_cell(values: Sequence[float | str]) -> str:
    """Return median and range of the seconds, and the texts of rounds without a next step with their counts."""
    seconds = [value for value in values if not isinstance(value, str)]
    parts = []
    if seconds:
        parts = [f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}), {len(seconds)}"]
    failures = Counter(value for value in values if isinstance(value, str))
    return "; ".join(parts + [f"{text}: {count} of {len(values)}" for text, count in failures.items()])


def table(measurements: Measurements) -> Iterator[str]:
    """Yield the section of RESULTS.md."""
    import torch

    def median(key: str) -> float:
        return statistics.median([row[key] for row in measurements.rows] or [math.nan])

    def repeated(way: str) -> str:
        steps = [row["steps_lost"] for row in measurements.rows if row["way"] == way and row["steps_lost"] is not None]
        return f"{statistics.median(steps):.0f} ({min(steps)}-{max(steps)}), {len(steps)}" if steps else ""

    yield "## Seconds from a loss to the next training step, compared with torchrun elastic"
    yield ""
    yield (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo; load average {median('load_before'):.1f} before, {median('load'):.1f} with the "
        "job's four trainers and agents (medians). "
        f"`launch --local --machines {MACHINES} --workers 0 --save-seconds {SAVE_SECONDS}` with recipes/cifar10.py, of "
        "six times the epochs; torchrun with the same trainer, four agents, `--max-restarts=1000`. Median (min-max), "
        "and the number of rounds. torchrun starts all processes again in each case, and knows no notice: it is "
        "measured for one lost machine only. A frozen trainer has five seconds to leave before it is killed, so that "
        "the others lose no step; with a restart all trainers are killed at once. Written by "
        "`benchmarks/elastic/recovery.py`."
    )
    yield ""
    yield f"| | {' | '.join(WAYS.values())} |"
    yield f"|---|{'---|' * len(WAYS)}"
    for case, title in CASE_TITLES.items():
        yield f"| {title} | {' | '.join(format_cell(measurements.values(way, case)) for way in WAYS)} |"
    yield f"| steps that were done again | {' | '.join(map(repeated, WAYS))} |"
    goodputs = [[f"{value:.1%}" for value in measurements.values(way, "goodput")] for way in WAYS]
    yield f"| goodput with a loss a minute, goal {GOODPUT_GOAL:.0%} | {' | '.join(map(', '.join, goodputs))} |"


def main() -> int:
    """Measure and print, or write the section of RESULTS.md from the measurements of a file."""
    parser = argparse.ArgumentParser(description="Measure the seconds from a loss to the next training step.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASE_TITLES)} (default: all)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="CIFAR-10 as JPEG files")
    parser.add_argument("--way", choices=WAYS, action="append", help="measure this way only; may be repeated")
    parser.add_argument("--losses", type=int, metavar="N", help="measure the goodput with N losses, one a minute")
    parser.add_argument("--quick", action="store_true", help="run each case once")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no measurement later (default: no limit)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="measurements as lines of JSON: read, and added to"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, and write the section of RESULTS.md")
    options = parser.parse_args()
    if unknown_cases := set(options.cases) - set(CASE_TITLES):
        parser.error(f"no such case: {', '.join(sorted(unknown_cases))}; cases are {', '.join(CASE_TITLES)}")
    measurements = Measurements(options.results, time.monotonic() + 60 * options.minutes)
    if options.report:
        write_section("elastic/recovery.py", list(table(measurements)))
        return 0
    if not options.data:
        parser.error("--data is missing")
    cases = options.cases or list(CASE_TITLES)
    work_folder = Path(tempfile.mkdtemp(prefix=f"imgr-{uuid4().hex[:6]}-", dir="/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    common = work_folder, options.data.resolve()
    try:
        for way in options.way or WAYS:
            rounds = 1 if options.quick else SILENT_ROUNDS if way == "torchrun-defaults" else ROUNDS
            if options.losses:
                if way in OUR_WAYS and measurements.lacks(way, "goodput", 1):
                    measure_goodput(measurements, way, *common, options.losses)
            elif way in OUR_WAYS:
                measure_ours(measurements, way, *common, cases, rounds)
            else:
                measure_torchrun(measurements, way, *common, cases, rounds)
    except KeyboardInterrupt:
        return 130
    finally:
        kill_processes(process_environment(work_folder))
        shutil.rmtree(work_folder, ignore_errors=True)
    print("\n".join(["", *table(measurements)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
