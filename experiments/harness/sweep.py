"""Runs are made, so many at a time, each by `python -m train` on one thread; what is there already is not made again.

A sweep may be killed at any moment. Called again it goes on: finished runs have their row, and one that was under way
has its folder with checkpoints, from which the trainer goes on by itself.
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
from typing import Any

from benchmarks.measure import core_count, cpu_name
from experiments.harness.runs import ExperimentRun, ResultRow, diverged_values, read_row, result_values, write_row
from train.tools import process as tools_process
from train.tools.filesystem import locked, read_json, read_json_lines, to_json_bytes, write_atomic
from train.tools.provenance import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[2]
SAVE_TIMEOUT_SECONDS = 60.0  # seconds for a trainer to save when it is asked to end
DIVERGENCE_MESSAGES = ("error: the loss is ", "error: the validation loss is not a number")
Log = Callable[[str], None]


class RunFailed(Exception):
    """A run that ended otherwise than by a result or by diverging; the text is one line."""


@dataclass(frozen=True)
class SweepLocation:
    """Where rows are kept, where runs are made, and what command trains."""

    results: Path
    work: Path
    trainer: tuple[str, ...] = (sys.executable, "-m", "train")

    def folder(self, run: ExperimentRun) -> Path:
        """Return the folder in which a run is made."""
        return self.work / "runs" / run.key


def missing_runs(runs: Iterable[ExperimentRun], results: Path) -> list[ExperimentRun]:
    """Return the runs that have no row, each once: experiments share arms."""
    different = {run.key: run for run in runs}
    return [run for run in different.values() if read_row(run, results) is None]


def run_sweep(runs: Sequence[ExperimentRun], location: SweepLocation, max_parallel: int, log: Log = print) -> None:
    """Make all runs that have no row yet. Raises `Failed`, and `BlockingIOError` while another sweep works there."""
    location.work.mkdir(parents=True, exist_ok=True)
    with locked(location.work / "lock", 0):
        todo = missing_runs(runs, location.results)
        log(f"{len({run.key for run in runs})} runs, {len(todo)} of them to be made, {max_parallel} at a time")
        _run_all(todo, location, max_parallel, log)


def _run_all(runs: Sequence[ExperimentRun], location: SweepLocation, max_parallel: int, log: Log) -> None:
    waiting, began, done = deque(runs), time.monotonic(), 0
    running: dict[str, tuple[ExperimentRun, subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max_parallel:
                run = waiting.popleft()
                running[run.key] = (run, start_run(run, location), time.monotonic())
            for run, process, since in list(running.values()):
                if process.poll() is None:
                    continue
                del running[run.key]
                row = finish_run(run, location, process.returncode, time.monotonic() - since, max_parallel)
                done += 1
                left = (time.monotonic() - began) / done * (len(runs) - done)
                log(f"{done} of {len(runs)}: {run.name}: {describe_outcome(row)}; about {left / 60:.0f} minutes left")
            time.sleep(0.05)
    finally:
        stop_trainers([process for _, process, _ in running.values()])


def start_run(run: ExperimentRun, location: SweepLocation) -> subprocess.Popen[bytes]:
    """Start the trainer of a run, or go on with it where its folder is."""
    folder = location.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "recipe.json", to_json_bytes(run.arm.recipe.to_json()))
    words = ["--data", run.images.folder, "--out", folder, "--seed", run.seed, "--gpus", run.arm.gpus]
    fixed = ["--procs", 1, "--threads", 1, "--workers", 0]  # one thread: the same bits however many are made at a time
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }  # compiled once: 5 s a run
    argv = [*location.trainer, str(folder / "recipe.json"), *map(str, [*words, *fixed])]
    return tools_process.start_process(argv, folder / "log", environment)


def finish_run(
    run: ExperimentRun, location: SweepLocation, exit_code: int, seconds: float, max_parallel: int
) -> ResultRow:
    """Keep the row of a run whose trainer ended, and remove its folder. Raises `Failed`, and leaves it."""
    folder, classes = location.folder(run), run.images.classes
    result = read_json(folder / "result.json")
    lines = (folder / "log").read_text(errors="replace").splitlines() or [""]
    if exit_code == 0 and result:
        values, seconds = result_values(result, classes), max(seconds, result["where"]["wall"])
    elif lines[-1].startswith(DIVERGENCE_MESSAGES):
        epochs = {
            row["epoch"]: row for row in read_json_lines(folder / "metrics" / "000001.jsonl", "epoch", "train_top1")
        }
        values = diverged_values(lines[-1].removeprefix("error: "), list(epochs.values()), classes)
    else:
        raise RunFailed(f"{run.name}: ended with code {exit_code}: {lines[-1]}; all it said: {folder / 'log'}")
    row = write_row(run, location.results, {**values, "seconds": round(seconds, 1), "made": run_origin(max_parallel)})
    shutil.rmtree(folder, ignore_errors=True)
    return row


def run_origin(max_parallel: int) -> dict[str, Any]:
    """Return when, where and by which code a run was made."""
    machine = f"{core_count()} cores ({cpu_name()}), {max_parallel} at a time, torch {package_versions()['torch']}"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "commit": git_commit()}


def describe_outcome(row: ResultRow) -> str:
    """Say how a run came out."""
    return f"{row['top1']:.2f} % in {row['seconds']:.0f} s" if row["top1"] is not None else "diverged"


def stop_trainers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask trainers to save and end, and wait for them."""
    for one in processes:
        one.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
    try:
        for one in processes:
            one.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        tools_process.kill_process_groups(processes)
