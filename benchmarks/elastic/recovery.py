"""Seconds from a loss to the next training step of four machines on this computer, compared with torchrun elastic.

    .venv/bin/python benchmarks/elastic/recovery.py --data DIR      # about 45 minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --quick worker notice
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --losses 10      # goodput with a loss a minute

DIR holds CIFAR-10 as JPEG files: train/<class>/*.jpg and val/... Nothing else should run on the computer. The time of a
kill is taken by our clock. The time of the next step is that of the first line of the next attempt's metrics, which
rank 0 writes after its first step. Where no process is killed, the pause begins with the last line of the previous
attempt: before a planned end that line is written after the last step. Each case waits until all four machines train,
their standbys are ready, and an epoch is in its middle, because validation is not to be measured.
"""

import argparse
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.ssh_machines import MARK_VARIABLE, marked_pids, process_table, send_signal, wait_until

from benchmarks.elastic.local_agents import RECIPE, SAVE_SECONDS, STALL_SECONDS, LocalJob
from benchmarks.elastic.torchrun_peer import MACHINES, TorchrunElastic
from benchmarks.measure import goal_verdict, write_section

ROUNDS, PEER_ROUNDS = 5, 3
LOSS_INTERVAL_SECONDS = 60.0
GOODPUT_GOAL = 0.95
RECOVERY_WAYS = ("in place", "restart")  # with --in-place and --no-in-place
CASE_TITLES = {
    "worker": "a machine other than the head killed",
    "head": "the head machine killed",
    "two": "two machines killed at once, one of them the head",
    "second": "a second machine killed right after the recovery from the first",
    "frozen": "a machine frozen, without the 5 s of --lost-seconds",
    "frozen_trainer": f"a trainer frozen, without the {STALL_SECONDS} s of --stall-seconds",
    "notice": "a machine leaves after a notice: pause of the others",
    "crash": "a trainer crashes",
    "join": "a machine joins: pause of the others",
}


def measure_ours(
    work_folder: Path, data: Path, cases: Sequence[str], rounds: int, in_place: bool
) -> dict[str, list[float]]:
    """Return the seconds of each round of each case. `in_place` is the option of the launch."""
    seconds_by_case: dict[str, list[float]] = defaultdict(list)
    folder = work_folder / f"ours-{in_place}"
    with LocalJob(folder, data, process_environment(work_folder), in_place) as local_job:
        for case in cases:
            if case == "join":  # measured below: joins follow the losses
                continue
            # A machine whose trainers crash a second time is left out, and the job would not be whole again.
            for _ in range(min(rounds, MACHINES) if case == "crash" else rounds):
                seconds_by_case[case].append(measure_case(local_job, case))
                print_measurement(case, seconds_by_case[case][-1])
        if "join" in cases:
            while len(local_job.join_pauses) < rounds:
                local_job.wait_until_ready()
                if len(local_job.join_pauses) < rounds:
                    measure_case(local_job, "worker")
            seconds_by_case["join"] = local_job.join_pauses
    return seconds_by_case


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
    work_folder: Path, data: Path, cases: Sequence[str], rounds: int
) -> dict[tuple[str, bool], list[float | str]]:
    """Return torchrun's seconds, or a text for a round without a next step, by (case, whether torchrun is tuned).

    torchrun is measured for the loss of a worker and of the head.
    """
    seconds_by_case: dict[tuple[str, bool], list[float | str]] = defaultdict(list)
    arguments = [str(RECIPE), "--data", str(data), "--gpus", str(MACHINES), "--workers", "0", "--threads", "1"]
    arguments += ["--save-seconds", str(SAVE_SECONDS)]
    for round_number in range(rounds):
        for case in ("worker", "head"):
            if case not in cases:
                continue
            for is_tuned in (True, False):
                folder = work_folder / f"torchrun-{case}-{is_tuned}-{round_number}"
                with TorchrunElastic(folder, arguments, process_environment(work_folder), is_tuned) as run:
                    run.wait_until_training()
                    seconds = run.kill_agent(kill_head=case == "head")
                seconds_by_case[case, is_tuned].append(seconds)
                print_measurement(f"torchrun {'tuned' if is_tuned else 'defaults'}, {case}", seconds)
    return seconds_by_case


def print_goodput(work_folder: Path, data: Path, losses: int) -> None:
    """Print the goodput of a job that loses one of its four machines every minute, in both ways."""
    for way in RECOVERY_WAYS:
        environment = process_environment(work_folder)
        with LocalJob(work_folder / f"goodput-{way}", data, environment, way == "in place") as local_job:
            local_job.wait_until_ready()
            for number in range(losses):
                next_loss_time = time.monotonic() + LOSS_INTERVAL_SECONDS
                print_measurement(f"loss {number + 1}", local_job.worker())
                time.sleep(max(0.0, next_loss_time - time.monotonic()))
            goodput = local_job.running_job.status().goodput or 0.0
        verdict = goal_verdict(goodput, GOODPUT_GOAL)
        print(f"{way}: goodput {goodput:.1%} with {losses} losses, goal {GOODPUT_GOAL:.0%}: {verdict}", flush=True)


def process_environment(work_folder: Path) -> dict[str, str]:
    """Return the environment of all processes: a home and a tmux server of their own, and a mark to find them by."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TMUX", "IMGNET_RUNS")}
    own = {"HOME": str(work_folder), "TMUX_TMPDIR": str(work_folder), "TERM": "xterm", MARK_VARIABLE: str(work_folder)}
    return {**inherited, **own, "PYTHONPATH": str(ROOT)}


def kill_leftover_processes(work_folder: Path) -> None:
    """Kill all processes with our mark. Raises `TimeoutError` when some are still alive after five seconds."""

    def has_ended() -> bool:
        pids = marked_pids(str(work_folder), process_table())
        send_signal(sorted(pids), signal.SIGKILL)
        return not pids

    wait_until(has_ended, "no process of the benchmark is left", 5.0)


def print_measurement(description: str, seconds: float | str) -> None:
    """Print a measurement, with the time of day."""
    text = seconds if isinstance(seconds, str) else f"{seconds:.2f} s"
    print(f"{time.strftime('%H:%M:%S')} {description}: {text}", flush=True)


def format_cell(values: Sequence[float | str]) -> str:
    """Return median and range of the seconds, and the texts of rounds without a next step with their counts."""
    seconds = [value for value in values if not isinstance(value, str)]
    parts = [f"{statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"] if seconds else []
    failures = Counter(value for value in values if isinstance(value, str))
    return "; ".join(parts + [f"{text}: {count} of {len(values)}" for text, count in failures.items()])


def table(
    our_seconds: dict[str, dict[str, list[float]]],
    torchrun_seconds: dict[tuple[str, bool], list[float | str]],
    load_before: Sequence[float],
) -> Iterator[str]:
    """Yield the section of RESULTS.md."""
    import torch

    some_seconds = next(iter(our_seconds.values()))
    our_rounds = max((len(seconds) for case, seconds in some_seconds.items() if case != "join"), default=0)
    torchrun_rounds = max((len(seconds) for seconds in torchrun_seconds.values()), default=0)
    yield "## Seconds from a loss to the next training step, compared with torchrun elastic"
    yield ""
    yield (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo; load {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after. `launch --local "
        f"--machines {MACHINES} --workers 0 --save-seconds {SAVE_SECONDS} recipes/cifar10.py`; torchrun with the same "
        f"trainer, four agents, `--max-restarts=1000`. Median (min-max), n = {our_rounds}, torchrun {torchrun_rounds}, "
        f"joins {len(some_seconds.get('join', ()))}, crashes {len(some_seconds.get('crash', ()))}. "
        "Written by `benchmarks/elastic/recovery.py`."
    )
    yield ""
    ways = " | ".join(f"ours, {way}" for way in our_seconds)
    yield f"| | {ways} | torchrun elastic, defaults | torchrun elastic, tuned, its store elsewhere |"
    yield f"|---|{'---|' * len(our_seconds)}---|---|"
    for case, title in CASE_TITLES.items():
        if case in some_seconds:
            cells = (
                *(format_cell(seconds[case]) for seconds in our_seconds.values()),
                format_cell(torchrun_seconds.get((case, False), ())),
                format_cell(torchrun_seconds.get((case, True), ())),
            )
            yield f"| {title} | {' | '.join(cells)} |"


def main() -> int:
    """Measure and print; if everything was measured, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure the seconds from a loss to the next training step.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASE_TITLES)} (default: all)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="CIFAR-10 as JPEG files")
    parser.add_argument("--losses", type=int, metavar="N", help="measure the goodput with N losses, one a minute")
    parser.add_argument("--quick", action="store_true", help="run each case once, and write nothing")
    options = parser.parse_args()
    if unknown_cases := set(options.cases) - set(CASE_TITLES):
        parser.error(f"no such case: {', '.join(sorted(unknown_cases))}; cases are {', '.join(CASE_TITLES)}")
    cases = options.cases or list(CASE_TITLES)
    work_folder = Path(tempfile.mkdtemp(prefix=f"imgr-{uuid4().hex[:6]}-", dir="/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_before = os.getloadavg()
    data = options.data.resolve()
    try:
        if options.losses:
            print_goodput(work_folder, data, options.losses)
            return 0
        rounds = 1 if options.quick else ROUNDS
        our_seconds = {way: measure_ours(work_folder, data, cases, rounds, way == "in place") for way in RECOVERY_WAYS}
        torchrun_seconds = measure_torchrun(work_folder, data, cases, 1 if options.quick else PEER_ROUNDS)
    except KeyboardInterrupt:
        return 130
    finally:
        kill_leftover_processes(work_folder)
        shutil.rmtree(work_folder, ignore_errors=True)
    lines = list(table(our_seconds, torchrun_seconds, load_before))
    print("\n".join(["", *lines]))
    if not (options.cases or options.quick):
        write_section("elastic/recovery.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
