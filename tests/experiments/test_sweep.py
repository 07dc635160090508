"""Tests of the sweep: it makes only the missing runs, continues after any end, and keeps the folder of a failed run."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from experiments.harness import runs, sweep
from experiments.harness.images import ImageSet
from experiments.harness.runs import ExperimentRun
from experiments.harness.sweep import RunFailed, SweepLocation
from train.tools.filesystem import locked

ROOT = Path(__file__).resolve().parents[2]
SWEEP_CODE = """
import pickle, sys
from experiments.harness import sweep
runs, location = pickle.loads(sys.stdin.buffer.read())
sweep.run_sweep(runs, location, 1)
"""


class SweepBed:
    """A sweep with the stand-in for the trainer. Runs are called by their seeds; `control` is the stand-in's folder."""

    def __init__(self, path: Path, images: ImageSet, arm: Any, trainer: tuple[str, ...]) -> None:
        self.control = path / "control"
        self.location = SweepLocation(path / "results", path / "work", trainer)
        self.runs = [ExperimentRun(arm, seed, images) for seed in (0, 1, 2, 0)]  # experiments share runs

    def sweep(self, max_parallel: int = 1) -> None:
        """Make the runs in this process."""
        sweep.run_sweep(self.runs, self.location, max_parallel, lambda _: None)

    @property
    def started_trainers(self) -> list[tuple[int, int]]:
        """The seeds and PIDs of the trainers that were started, in order."""
        file = self.control / "started"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(seed), int(pid)) for seed, pid in (line.split() for line in lines)]

    def row(self, seed: int) -> Any:
        return runs.read_row(self.runs[seed], self.location.results)


@pytest.fixture
def bed(tmp_path: Path, blots: ImageSet, arm: Any, stub_trainer: tuple[str, ...]) -> SweepBed:
    return SweepBed(tmp_path, blots, arm(), stub_trainer)


def test_run_sweep_killed_takes_trainer_along_and_continues(bed: SweepBed) -> None:
    (bed.control / "hold-1").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SWEEP_CODE], stdin=subprocess.PIPE, env=environment) as killed_sweep:
        assert killed_sweep.stdin
        killed_sweep.stdin.write(pickle.dumps((bed.runs, bed.location)))
        killed_sweep.stdin.close()
        try:
            wait_for(lambda: [seed for seed, _ in bed.started_trainers] == [0, 1])
        finally:
            killed_sweep.kill()
    command_line = Path(f"/proc/{bed.started_trainers[-1][1]}/cmdline")
    wait_for(lambda: not command_line.exists() or not command_line.read_bytes())  # a zombie's is empty
    (bed.control / "hold-1").unlink()
    bed.sweep()
    assert [seed for seed, _ in bed.started_trainers] == [0, 1, 1, 2] and bed.row(0)["top1"] == 60.0
    assert not list((bed.location.work / "runs").iterdir())


def test_run_sweep_refuses_work_folder_of_another_sweep(bed: SweepBed) -> None:
    bed.location.work.mkdir()
    with locked(bed.location.work / "lock", 0), pytest.raises(BlockingIOError):
        bed.sweep()
    assert bed.started_trainers == []


def test_run_sweep_failed_run_stops_sweep_and_keeps_folder(bed: SweepBed) -> None:
    (bed.control / "error-0").write_text("error: no space left")
    (bed.control / "hold-0").touch()
    (bed.control / "hold-1").touch()

    def let_first_run_fail() -> None:
        wait_for(lambda: len(bed.started_trainers) == 2)
        (bed.control / "hold-0").unlink()

    threading.Thread(target=let_first_run_fail).start()
    message = r"a, seed 0: the trainer ended with exit code 1: error: no space left; its log: .*/log"
    with pytest.raises(RunFailed, match=message):
        bed.sweep(max_parallel=2)
    assert bed.row(0) is None and (bed.location.folder(bed.runs[0]) / "log").exists()
    assert not any(Path(f"/proc/{pid}").exists() for _, pid in bed.started_trainers)
    assert 2 not in [seed for seed, _ in bed.started_trainers]
    for path in bed.control.iterdir():
        path.unlink()
    bed.sweep()
    assert all(bed.row(seed) for seed in range(3))


@pytest.mark.rehearsal
def test_run_sweep_real_trainer_resumes_and_another_diverges(tmp_path: Path, blots: ImageSet, arm: Any) -> None:
    run = ExperimentRun(arm(epochs=60), 0, blots)
    diverging_run = ExperimentRun(arm("wild", lr=1e30), 0, blots)
    location = SweepLocation(tmp_path / "results", tmp_path / "work")
    process = sweep.start_run(run, location)
    metrics = location.folder(run) / "metrics" / "000001.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count('"epoch"') > 2)
        assert process.poll() is None
    finally:
        sweep.stop_trainers([process])
    assert process.returncode == 3
    sweep.run_sweep([run, diverging_run], location, 2, lambda _: None)
    row = runs.read_row(run, location.results)
    assert row and row["top1"] == 100.0 and row["steps"] == 180 and len(row["train_top1"]) == 60
    diverged_row = runs.read_row(diverging_run, location.results)
    assert diverged_row and diverged_row["top1"] is None and "is nan at step" in diverged_row["diverged"]
