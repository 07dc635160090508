"""Tests of the experiments: numbers, tables, image sets, and a sweep that makes only the missing runs."""

import io
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.specs import TINY
from support.waiting import wait_for

import experiments
from experiments import run as all_experiments
from experiments.harness import cli, confidence, runs, sweep, table
from experiments.harness.claims import Arm, Claim, Experiment, make_side
from experiments.harness.images import FOLDS, ImageSet, prepare_photographs
from experiments.harness.runs import ExperimentRun
from experiments.harness.sweep import SweepLocation
from train.data.index import open as index_open
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
    """Return an arm that trains on the drawn images."""
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


def image_names(folder: Path, split: str) -> list[str]:
    """Return the names class/file of a split."""
    return index_open.load_index(folder, split).names()


def test_prepare_photographs_folds_are_disjoint_and_shapes_reveal_no_class(tmp_path: Path) -> None:
    (tmp_path / "photographs").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    for number in range(20):
        Image.fromarray(noise[:, : 200 + 10 * number]).save(tmp_path / f"photographs/{number}.JPEG")
    validated: list[str] = []
    for fold in range(FOLDS):
        folder = prepare_photographs(tmp_path / "photographs", tmp_path / "work", fold).folder
        files = {}
        for split in ("train", "val"):
            names = [name.split("/") for name in image_names(folder, split)]
            files[split] = {file for class_name, file in names if class_name == "upright"}
            assert {file for class_name, file in names if class_name == "turned"} == files[split]
        assert not files["train"] & files["val"] and len(files["train"] | files["val"]) == 20
        validated += files["val"]
        packed = index_open.load_index(folder, "val")
        contents = {name: packed.read(number) for number, name in enumerate(packed.names())}
        for file in files["val"]:
            turned, upright = (Image.open(io.BytesIO(contents[f"{name}/{file}"])) for name in ("turned", "upright"))
            assert (turned.size, turned.info.keys()) == (upright.size, upright.info.keys())
            assert turned.quantization == upright.quantization  # type: ignore[attr-defined]
            turned_back = turned.transpose(Image.Transpose.ROTATE_180)
            error = np.abs(np.asarray(turned_back, int) - np.asarray(upright, int)).mean()
            assert error < 20 < np.abs(np.asarray(turned, int) - np.asarray(upright, int)).mean()
    assert len(validated) == 20 == len(set(validated))  # each photograph is in one validation set


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


@pytest.mark.rehearsal
def test_run_sweep_real_trainer_resumes_and_another_diverges(images: Path, tmp_path: Path) -> None:
    drawn = ImageSet(images, "drawn", 10)
    run, diverging_run = ExperimentRun(make_arm(epochs=40), 0, drawn), ExperimentRun(make_arm("wild", 1e30), 0, drawn)
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
    assert row and row["steps"] == 320 and len(row["train_top1"]) == 40, row
    assert row["train_top1"][-1] > 2 * row["train_top1"][0], row
    diverged_row = runs.read_row(diverging_run, location.results)
    assert diverged_row and diverged_row["top1"] is None and "is nan at step" in diverged_row["diverged"]
