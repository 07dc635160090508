"""Tests of the experiments: numbers, tables, image sets, and a sweep that makes only the missing runs."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.specs import TINY

import experiments
from experiments import run as all_experiments
from experiments.harness import cli, confidence, runs, table
from experiments.harness.claims import Arm, Claim, Experiment, make_side
from experiments.harness.images import ImageSet
from experiments.harness.runs import ExperimentRun
from experiments.harness.sweep import SweepLocation
from train.recipe import Optim, Phase

FOLDER = Path(experiments.__path__[0])
STUB = """
import json, pathlib, sys

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if options["--seed"] == "1" and pathlib.Path(__file__).with_name("full").exists():
    sys.exit("error: no space left")
epoch = {"train_images": 60, "size": 16, "train_seconds": 1.0, "train_top1": 50.0, "train_loss": 1.0}
result = {"epochs": [epoch], "top1": 60.0, "top1_square": 60.0, "steps": 8, "images": 60, "where": {"wall": 1.0}}
(pathlib.Path(options["--out"]) / "result.json").write_text(json.dumps(result))
"""


def make_arm(name: str = "a", lr: float = 0.05, epochs: int = 2) -> Arm:
    phase = Phase(epochs=(0, epochs), size=16, batch=8, lr=lr, validate="never")
    recipe = replace(TINY, machines=1, optim=Optim(nesterov=True), phases=[phase])
    return Arm(name=name, recipe=recipe)


@pytest.mark.parametrize("first, second, difference, half", [
    ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], -1.0, 2.306),  # equal variances of 2.5: error 1, 8 degrees
    ([1, 2, 3, 4, 5], [3, 3, 3, 3, 3], 0.0, 2.776 * math.sqrt(0.5)),  # all variance on one side: 4 degrees
    ([0, 2], [5, 5], -4.0, 12.706),  # error 1, 1 degree
])  # fmt: skip
def test_welch_interval_equals_examples_by_hand(first: Any, second: Any, difference: float, half: float) -> None:
    interval = confidence.welch_interval(first, second)
    assert interval is not None
    assert (interval.difference, interval.half_width) == pytest.approx((difference, half), abs=0.001)
    assert (interval.low + interval.high) / 2 == pytest.approx(difference)


def stored_rows(arm: Arm) -> list[Any]:
    """Return the rows in results/ of an arm, in the order of their seeds. The key of a run is the name of its file."""
    rows = []
    for path in FOLDER.glob("results/*.json"):
        row = json.loads(path.read_text())
        run = ExperimentRun(arm, row["seed"], ImageSet(Path(), row["config"]["data"], row["classes"]))
        if run.key == path.stem:
            assert runs.read_row(run, path.parent) == row
            rows.append(row)
    return sorted(rows, key=lambda row: int(row["seed"]))


def test_results_page_follows_from_the_stored_rows() -> None:
    """Else the keys have changed, which makes all rows worthless; if that is intended, increase `runs.FORMAT`."""
    studies = all_experiments.EXPERIMENTS
    rows = {study.name: {arm.name: stored_rows(arm) for arm in study.arms} for study in studies}
    assert table.render_results_page(studies, rows) == (FOLDER / "RESULTS.md").read_text()


def test_main_makes_the_missing_runs_and_prints_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stub.py").write_text(STUB)
    trainer = (sys.executable, str(tmp_path / "stub.py"))
    monkeypatch.setattr(cli, "SweepLocation", partial(SweepLocation, trainer=trainer))
    monkeypatch.setattr(cli, "HERE", tmp_path)
    monkeypatch.setattr(cli, "MIN_SEEDS", 2)
    claim = Claim(text="Slow is better than wild", first=make_side("slow"), second=make_side("wild"), cheaper=True)
    experiment = Experiment(
        name="toy",
        title="1. A toy",
        description="Two rates.",
        arms=(make_arm("slow"), make_arm("wild", lr=1e30)),
        claims=(claim,),
        images=lambda sources, seed: ImageSet(tmp_path, "drawn", 10),
    )
    argv = ["--data", "here", "--seeds", "2", "--work", str(tmp_path / "work"), "--results", str(tmp_path / "rows")]
    (tmp_path / "full").touch()
    assert cli.main([experiment], [*argv, "--jobs", "1"]) == 1
    output = capfd.readouterr()
    assert "4 runs, 4 of them missing" in output.out and "wild, seed 0: 60.00 %" in output.out
    assert "error: slow, seed 1: the trainer ended with exit code 1: error: no space left; its log: " in output.err
    assert not (tmp_path / "RESULTS.md").exists()
    (tmp_path / "full").unlink()
    assert cli.main([experiment], argv) == 0
    output = capfd.readouterr()
    assert "4 runs, 2 of them missing" in output.out and "| wild | 2 | 60.00 ± 0.00 |" in output.out
    assert (tmp_path / "pictures" / "toy.png").exists()
    assert "| slow | 2 | 60.00 ± 0.00 |" in (tmp_path / "RESULTS.md").read_text()
