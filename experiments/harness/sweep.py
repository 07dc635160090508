"""Makes the runs that have no row yet: several at a time, each by `python -m train` on one thread.

A sweep may be killed at any moment. The next one continues: finished runs have their row, and an unfinished run has its
folder with checkpoints, from which the trainer resumes by itself.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import describe_processor
from experiments.harness.runs import ExperimentRun, ResultRow, diverged_values, read_row, result_values, write_row
from train.tools import process as tools_process
from train.tools.files import locked, write_atomic
from train.tools.host import git_commit, package_versions
from train.tools.text_files import read_json, read_json_lines, to_json_bytes

ROOT = Path(__file__).resolve().parents[2]
SAVE_TIMEOUT_SECONDS = 60.0  # for a trainer to write a checkpoint when it is asked to end
POLL_SECONDS = 0.05
DIVERGENCE_MESSAGES = ("error: the loss is ", "error: the validation loss is not a number")
Log = Callable[[str], None]


class RunFailed(Exception):
    """A run that ended with neither a result nor a divergence. The text is one line."""


@dataclass(frozen=True)
class SweepLocation:
    """The folder of the rows, the folder to work in, and the command of the trainer."""

    results: Path
    work: Path
    trainer: tuple[str, ...] = (sys.executable, "-m", "train")

    def folder(self, run: ExperimentRun) -> Path:
        """Return the folder of a run that is in progress."""
        return self.work / "runs" / run.key


def missing_runs(runs: Iterable[ExperimentRun], results: Path) -> list[ExperimentRun]:
    """Return the runs that have no row. Each is returned once, although experiments share arms."""
    run_by_key = {run.key: run for run in runs}
    return [run for run in run_by_key.values() if read_row(run, results) is None]


def run_sweep(runs: Sequence[ExperimentRun], location: SweepLocation, max_parallel: int, log: Log = print) -> None:
    """Make all runs that have no row yet, `max_parallel` at a time.

    Raises `RunFailed`, and `BlockingIOError` while another sweep uses the same work folder.
    """
    location.work.mkdir(parents=True, exist_ok=True)
    with locked(location.work / "lock", 0):
        missing = missing_runs(runs, location.results)
        log(f"{len({run.key for run in runs})} runs, {len(missing)} of them missing, {max_parallel} at a time")
        _run_all(missing, location, max_parallel, log)


def _run_all(runs: Sequence[ExperimentRun], location: SweepLocation, max_parallel: int, log: Log) -> None:
    waiting = deque(runs)
    running: dict[str, tuple[ExperimentRun, subprocess.Popen[bytes], float]] = {}  # with the time of its start
    done_count = 0
    sweep_start = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < max_parallel:
                run = waiting.popleft()
                running[run.key] = (run, start_run(run, location), time.monotonic())
            for run, process, run_start in list(running.values()):
                if process.poll() is None:
                    continue
                del running[run.key]
                row = finish_run(run, location, process.returncode, time.monotonic() - run_start, max_parallel)
                done_count += 1
                minutes_left = (time.monotonic() - sweep_start) / done_count * (len(runs) - done_count) / 60
                outcome = "diverged" if row["top1"] is None else f"{row['top1']:.2f} % in {row['seconds']:.0f} s"
                log(f"{done_count} of {len(runs)}: {run.name}: {outcome}; about {minutes_left:.0f} minutes left")
            time.sleep(POLL_SECONDS)
    finally:
        stop_trainers([process for _, process, _ in running.values()])


def start_run(run: ExperimentRun, location: SweepLocation) -> subprocess.Popen[bytes]:
    """Start the trainer of a run. It resumes by itself where the run's folder has a checkpoint."""
    folder = location.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "recipe.json", to_json_bytes(run.arm.recipe.to_json()))
    run_options = ["--data", run.images.folder, "--out", folder, "--seed", run.seed, "--gpus", run.arm.gpus]
    # One thread: the numbers are the same to the bit, however many runs are made at a time.
    thread_options = ["--procs", 1, "--threads", 1, "--workers", 0]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # to compile the modules once, not in each run, saves 5 s a run
    }
    argv = [*location.trainer, str(folder / "recipe.json"), *map(str, [*run_options, *thread_options])]
    return tools_process.start_process(argv, folder / "log", environment)


def finish_run(
    run: ExperimentRun, location: SweepLocation, exit_code: int, seconds: float, max_parallel: int
) -> ResultRow:
    """Write the row of a run whose trainer has ended, remove the run's folder, and return the row.

    Raises `RunFailed` when there is neither a result nor a divergence; then the folder stays.
    """
    folder = location.folder(run)
    classes = run.images.classes
    result = read_json(folder / "result.json")
    log_lines = (folder / "log").read_text(errors="replace").splitlines() or [""]
    last_line = log_lines[-1]
    if exit_code == 0 and result:
        values = result_values(result, classes)
        seconds = max(seconds, result["where"]["wall"])
    elif last_line.startswith(DIVERGENCE_MESSAGES):
        epoch_rows = read_json_lines(folder / "metrics" / "000001.jsonl", "epoch", "train_top1")
        row_by_epoch = {row["epoch"]: row for row in epoch_rows}  # after a resume, the later row of an epoch counts
        values = diverged_values(last_line.removeprefix("error: "), list(row_by_epoch.values()), classes)
    else:
        raise RunFailed(
            f"{run.name}: the trainer ended with exit code {exit_code}: {last_line}; its log: {folder / 'log'}"
        )
    machine = f"{describe_processor()}, {max_parallel} at a time, torch {package_versions()['torch']}"
    origin = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "commit": git_commit()}
    row = write_row(run, location.results, {**values, "seconds": round(seconds, 1), "made": origin})
    shutil.rmtree(folder, ignore_errors=True)
    return row


def stop_trainers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask trainers to write a checkpoint and end, wait for them, and kill what is left after a timeout."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        tools_process.kill_process_groups(processes)
