"""Tests of the rows of runs: those in results/ are found by their configurations, and RESULTS.md follows from them."""

import json
from pathlib import Path
from typing import Any

import experiments
from experiments import run as all_experiments
from experiments.harness import runs, table
from experiments.harness.claims import Arm
from experiments.harness.images import ImageSet
from experiments.harness.runs import ExperimentRun

FOLDER = Path(experiments.__path__[0])


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


def test_read_row_returns_only_the_same_configuration(tmp_path: Path, arm: Any) -> None:
    run = ExperimentRun(arm(), 0, ImageSet(Path("somewhere"), "abc", 10))
    assert runs.read_row(run, tmp_path) is None
    row = runs.write_row(run, tmp_path, {"top1": 50.0})
    assert runs.read_row(run, tmp_path) == row
    path = tmp_path / f"{run.key}.json"
    path.write_text(json.dumps({**row, "config": {**row["config"], "seed": 5}}))  # edited by hand, or copied
    assert runs.read_row(run, tmp_path) is None
    path.write_text(path.read_text()[:40])
    assert runs.read_row(run, tmp_path) is None
