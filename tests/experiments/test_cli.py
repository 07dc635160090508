"""Tests of the experiments' command line, tables and pictures."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.harness import cli
from experiments.harness.claims import Claim, Experiment, ImageSources, make_side
from experiments.harness.images import ImageSet
from experiments.harness.sweep import SweepLocation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def experiment(blots: ImageSet, arm: Any) -> Experiment:
    """An experiment of two arms, of which one diverges."""

    def images(sources: ImageSources, seed: int) -> ImageSet:
        return blots

    return Experiment(
        name="toy",
        title="1. A toy",
        description="Two rates.",
        arms=(arm("slow"), arm("wild", lr=1e30)),
        claims=(
            Claim(text="Slow is better than wild", first=make_side("slow"), second=make_side("wild"), cheaper=True),
        ),
        images=images,
    )


def test_main_makes_runs_and_prints_tables(
    experiment: Experiment, stub_trainer: Any, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SweepLocation", partial(SweepLocation, trainer=stub_trainer))
    monkeypatch.setattr(cli, "HERE", tmp_path)
    monkeypatch.setattr(cli, "MIN_SEEDS", 2)
    argv = ["--data", "here", "--seeds", "2", "--work", str(tmp_path / "work"), "--results", str(tmp_path / "rows")]
    other = replace(experiment, name="other", required_source="photographs")
    assert cli.main([experiment, other], argv) == 0
    output = capfd.readouterr().out
    assert "other: left out; it needs --photographs" in output
    assert "4 runs, 4 of them missing" in output and "wild, seed 0: 60.00 %" in output
    assert "| wild | 2 | 60.00 ± 0.00 |" in output and (tmp_path / "pictures" / "toy.png").exists()
    assert not (tmp_path / "RESULTS.md").exists()  # an experiment is missing
    assert cli.main([experiment], [*argv, "toy"]) == 0  # all runs have rows already
    assert "4 runs, 0 of them missing" in capfd.readouterr().out
    assert "| slow | 2 |" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize("argv", [[], ["--data", "x", "--seeds", "0"], ["--data", "x", "lost"]])
def test_missing_images_no_seeds_or_an_unknown_name_is_a_usage_error(experiment: Experiment, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([experiment], argv)
    assert end.value.code == 2


def test_script_runs_from_any_folder(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, ROOT / "experiments" / "run.py", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert completed.returncode == 0 and "--photographs" in completed.stdout and not completed.stderr
