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

from benchmarks.measure import cores, cpu_name
from train.tools import process as tools_process
from train.tools.filesystem import as_json, json_lines, locked, read_json, replace
from train.tools.provenance import git_commit, versions

from .runs import Row, Run, broken, keep, measured, row_of

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60.0  # seconds for a trainer to save when it is asked to end
DIVERGED = ("error: the loss is ", "error: the validation loss is not a number")
Say = Callable[[str], None]


class Failed(Exception):
    """A run that ended otherwise than by a result or by diverging; the text is one line."""


@dataclass(frozen=True)
class Place:
    """Where rows are kept, where runs are made, and what command trains."""

    results: Path
    work: Path
    trainer: tuple[str, ...] = (sys.executable, "-m", "train")

    def folder(self, run: Run) -> Path:
        """Return the folder in which a run is made."""
        return self.work / "runs" / run.key


def missing(runs: Iterable[Run], results: Path) -> list[Run]:
    """Return the runs that have no row, each once: experiments share arms."""
    different = {run.key: run for run in runs}
    return [run for run in different.values() if row_of(run, results) is None]


def sweep(runs: Sequence[Run], place: Place, at_once: int, say: Say = print) -> None:
    """Make all runs that have no row yet. Raises `Failed`, and `BlockingIOError` while another sweep works there."""
    place.work.mkdir(parents=True, exist_ok=True)
    with locked(place.work / "lock", 0):
        todo = missing(runs, place.results)
        say(f"{len({run.key for run in runs})} runs, {len(todo)} of them to be made, {at_once} at a time")
        _all(todo, place, at_once, say)


def _all(todo: Sequence[Run], place: Place, at_once: int, say: Say) -> None:
    waiting, began, done = deque(todo), time.monotonic(), 0
    running: dict[str, tuple[Run, subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.popleft()
                running[run.key] = (run, start(run, place), time.monotonic())
            for run, process, since in list(running.values()):
                if process.poll() is None:
                    continue
                del running[run.key]
                row = finish(run, place, process.returncode, time.monotonic() - since, at_once)
                done += 1
                left = (time.monotonic() - began) / done * (len(todo) - done)
                say(f"{done} of {len(todo)}: {run.name}: {outcome(row)}; about {left / 60:.0f} minutes left")
            time.sleep(0.05)
    finally:
        end([process for _, process, _ in running.values()])


def start(run: Run, place: Place) -> subprocess.Popen[bytes]:
    """Start the trainer of a run, or go on with it where its folder is."""
    folder = place.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "recipe.json", as_json(run.arm.recipe.to_json()))
    words = ["--data", run.images.folder, "--out", folder, "--seed", run.seed, "--gpus", run.arm.gpus]
    fixed = ["--procs", 1, "--threads", 1, "--workers", 0]  # one thread: the same bits however many are made at a time
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }  # compiled once: 5 s a run
    argv = [*place.trainer, str(folder / "recipe.json"), *map(str, [*words, *fixed])]
    return tools_process.start(argv, folder / "log", environment)


def finish(run: Run, place: Place, code: int, seconds: float, at_once: int) -> Row:
    """Keep the row of a run whose trainer ended, and remove its folder. Raises `Failed`, and leaves it."""
    folder, classes = place.folder(run), run.images.classes
    result = read_json(folder / "result.json")
    lines = (folder / "log").read_text(errors="replace").splitlines() or [""]
    if code == 0 and result:
        values, seconds = measured(result, classes), max(seconds, result["where"]["wall"])
    elif lines[-1].startswith(DIVERGED):
        epochs = {row["epoch"]: row for row in json_lines(folder / "metrics" / "000001.jsonl", "epoch", "train_top1")}
        values = broken(lines[-1].removeprefix("error: "), list(epochs.values()), classes)
    else:
        raise Failed(f"{run.name}: ended with code {code}: {lines[-1]}; all it said: {folder / 'log'}")
    row = keep(run, place.results, {**values, "seconds": round(seconds, 1), "made": made(at_once)})
    shutil.rmtree(folder, ignore_errors=True)
    return row


def made(at_once: int) -> dict[str, Any]:
    """Return when, where and by which code a run was made."""
    machine = f"{cores()} cores ({cpu_name()}), {at_once} at a time, torch {versions()['torch']}"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "commit": git_commit()}


def outcome(row: Row) -> str:
    """Say how a run came out."""
    return f"{row['top1']:.2f} % in {row['seconds']:.0f} s" if row["top1"] is not None else "diverged"


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask trainers to save and end, and wait for them."""
    for one in processes:
        one.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    try:
        for one in processes:
            one.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        tools_process.kill(processes)
