"""A sweep makes what is missing and nothing else, goes on after any end, and keeps what went wrong."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.harness import runs, sweep
from experiments.harness.images import ImageSet
from experiments.harness.runs import ExperimentRun
from experiments.harness.sweep import RunFailed, SweepLocation

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0


class Bed:
    """A place with the stub, and runs for it by their seeds."""

    def __init__(self, path: Path, images: ImageSet, arm: Any, trainer: tuple[str, ...]) -> None:
        self.told, self.images, self.arm = path / "told", images, arm
        self.place = SweepLocation(path / "results", path / "work", trainer)
        self.said: list[str] = []

    def runs(self, *seeds: int) -> list[ExperimentRun]:
        return [ExperimentRun(self.arm, seed, self.images) for seed in seeds]

    def sweep(self, *seeds: int, at_once: int = 1) -> None:
        sweep.run_sweep(self.runs(*seeds), self.place, at_once, self.said.append)

    @property
    def began(self) -> list[int]:
        """The seeds of the trainers that were started."""
        file = self.told / "began"
        return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []

    def row(self, seed: int) -> Any:
        return runs.read_row(self.runs(seed)[0], self.place.results)


@pytest.fixture
def bed(tmp_path: Path, blots: ImageSet, arm: Any, stub: tuple[str, ...]) -> Bed:
    return Bed(tmp_path, blots, arm(), stub)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.01)
    return found


def test_each_different_run_is_made_once_and_never_again(bed: Bed) -> None:
    bed.sweep(0, 1, 0, 1, 2)
    assert bed.began == [0, 1, 2] and bed.row(1)["top1"] == 60.0
    assert not list((bed.place.work / "runs").iterdir())
    bed.sweep(0, 1, 2, 3)
    assert bed.began == [0, 1, 2, 3] and bed.said[-2] == "4 runs, 1 of them to be made, 1 at a time"


def test_a_row_tells_when_where_and_by_which_code_it_was_made(bed: Bed) -> None:
    bed.sweep(0, at_once=3)
    made = bed.row(0)["made"]
    assert made["date"] == time.strftime("%Y-%m-%d") and "3 at a time, torch 2." in made["machine"]
    assert set(made) == {"date", "machine", "commit"}


def test_as_many_are_made_at_a_time_as_was_said(bed: Bed) -> None:
    for seed in range(3):
        (bed.told / f"hold-{seed}").touch()
    worker = threading.Thread(target=bed.sweep, args=(0, 1, 2, 3), kwargs={"at_once": 2})
    worker.start()
    try:
        wait_for(lambda: len(list(bed.told.glob("busy-*"))) == 2)
        assert sorted(bed.began) == [0, 1]
        (bed.told / "hold-0").unlink()
        wait_for(lambda: len(bed.began) == 3)
        assert bed.row(0) and bed.row(1) is None
    finally:
        for hold in bed.told.glob("hold-*"):
            hold.unlink()
        worker.join(DEADLINE)
    assert sorted(bed.began) == [0, 1, 2, 3]


def other(bed: Bed, *seeds: int) -> "subprocess.Popen[bytes]":
    """A sweep in a process of its own."""
    code = """
import pickle, sys
from experiments.harness import sweep
runs, place = pickle.loads(sys.stdin.buffer.read())
sweep.run_sweep(runs, place, 1)
"""
    import pickle

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
    assert process.stdin
    process.stdin.write(pickle.dumps((bed.runs(*seeds), bed.place)))
    process.stdin.close()
    return process


def test_a_killed_sweep_takes_its_trainer_along_and_goes_on_where_it_was(bed: Bed) -> None:
    (bed.told / "hold-1").touch()
    killed = other(bed, 0, 1, 2)
    try:
        wait_for(lambda: bed.began == [0, 1])
    finally:
        killed.kill()
        killed.wait()
    trainer = int((bed.told / "began").read_text().split()[-1])
    wait_for(lambda: not Path(f"/proc/{trainer}/cmdline").exists() or not Path(f"/proc/{trainer}/cmdline").read_bytes())
    before = (bed.place.results / f"{bed.runs(0)[0].key}.json").stat()
    (bed.told / "hold-1").unlink()
    bed.sweep(0, 1, 2)
    assert bed.began == [0, 1, 1, 2]
    after = (bed.place.results / f"{bed.runs(0)[0].key}.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_two_sweeps_do_not_work_in_one_place(bed: Bed) -> None:
    (bed.told / "hold-0").touch()
    first = other(bed, 0)
    try:
        wait_for(lambda: bed.began == [0])
        with pytest.raises(BlockingIOError):
            bed.sweep(1)
        (bed.told / "hold-0").unlink()
        assert first.wait(DEADLINE) == 0
    finally:
        first.kill()
        first.wait()
    assert bed.began == [0] and bed.row(0)


def test_a_run_that_diverged_is_a_row(bed: Bed) -> None:
    (bed.told / "say-0").write_text("error: the loss is nan at step 4 (epoch 1, rate 9); lower the rate")
    bed.sweep(0)
    assert bed.row(0)["top1"] is None
    assert bed.row(0)["diverged"] == "the loss is nan at step 4 (epoch 1, rate 9); lower the rate"
    assert bed.said[-1] == "1 of 1: a, seed 0: diverged; about 0 minutes left"


def test_any_other_end_stops_the_sweep_and_keeps_the_folder(bed: Bed) -> None:
    (bed.told / "say-0").write_text("error: no space left")
    (bed.told / "hold-0").touch()
    (bed.told / "hold-1").touch()

    def let_it_fail() -> None:
        wait_for(lambda: len(bed.began) == 2)
        (bed.told / "hold-0").unlink()

    threading.Thread(target=let_it_fail).start()
    with pytest.raises(RunFailed, match=r"a, seed 0: ended with code 1: error: no space left; all it said: .*/log"):
        bed.sweep(0, 1, 2, at_once=2)
    assert bed.row(0) is None and (bed.place.folder(bed.runs(0)[0]) / "log").exists()
    pids = [line.split()[1] for line in (bed.told / "began").read_text().splitlines()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and 2 not in bed.began
    for one in bed.told.iterdir():
        one.unlink()
    bed.sweep(0, 1, 2)
    assert bed.row(0) and bed.row(1) and bed.row(2)


@pytest.mark.rehearsal
def test_a_real_run_goes_on_after_an_interruption_and_another_diverges(
    tmp_path: Path, blots: ImageSet, arm: Any
) -> None:
    run, wild = ExperimentRun(arm(epochs=60), 0, blots), ExperimentRun(arm("wild", lr=1e30), 0, blots)
    place = SweepLocation(tmp_path / "results", tmp_path / "work")
    process, metrics = sweep.start_run(run, place), place.folder(run) / "metrics" / "000001.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count('"epoch"') > 2)
        assert process.poll() is None
    finally:
        sweep.stop_trainers([process])
    assert process.returncode == 3
    sweep.run_sweep([run, wild], place, 2, lambda _: None)
    row, other = (runs.read_row(one, place.results) for one in (run, wild))
    assert row and row["top1"] == 100.0 and row["steps"] == 180 and len(row["train_top1"]) == 60
    assert other and other["top1"] is None and "is nan at step" in other["diverged"]
