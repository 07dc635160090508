"""The command line: from images to a table, pictures, and RESULTS.md."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from experiments.harness import cli as command
from experiments.harness import plots as picture
from experiments.harness import table
from experiments.harness.claims import Claim, Experiment, ImageSources, make_side
from experiments.harness.images import ImageSet
from experiments.harness.sweep import SweepLocation

ROOT = Path(__file__).resolve().parents[2]


def made_up(seed: int, top1: float | None, seconds: float = 100.0) -> dict[str, Any]:
    return {
        "name": f"x, seed {seed}", "seed": seed, "top1": top1, "top1_square": top1, "classes": 10,
        "diverged": None if top1 is not None else "the loss is nan", "train_loss": 1.0,
        "train_top1": [20.0, 30.0 + seed, 40.0 + seed] if top1 is not None else [12.0], "steps": 30,
        "images": 1000, "megapixels": 12.3, "train_seconds": seconds, "seconds": seconds + 10,
        "made": {"date": f"2026-01-0{1 + seed}", "machine": "2 cores (X)", "commit": "0123456789abcdef+changes"},
        "config": {"seed": seed, "top1": top1},
    }  # fmt: skip


@pytest.fixture
def experiment(blots: ImageSet, arm: Any) -> Experiment:
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


ROWS = {
    "toy": {
        "slow": [made_up(0, 60.0), made_up(1, 61.0), made_up(2, 62.0)],
        "wild": [made_up(0, 40.0, 50.0), made_up(1, None), made_up(2, 41.0, 52.0)],
    }
}


def test_the_table_is_made_of_the_rows(experiment: Experiment) -> None:
    head, _, slow, wild = table.experiment_table(experiment, ROWS["toy"])
    assert head == "| | n | top-1 % | least to most | to the first | steps | work | seconds |"
    assert slow == "| slow | 3 | 61.00 ± 1.00 | 60.00 to 62.00 |  | 30 | 12 MP | 100 ± 0 |"
    assert wild.startswith("| wild | 3, 1 diverged | 30.33 ± 17.62 | 10.00 to 41.00 | -30.67 (-74.2")
    assert wild.endswith(") | 30 | 12 MP | 51 ± 1 |")


def test_an_arm_without_runs_or_with_none_that_ended_is_a_row_too(experiment: Experiment) -> None:
    lines = list(table.experiment_table(experiment, {"slow": [], "wild": [made_up(0, None), made_up(1, None)]}))
    assert lines[2] == "| slow | 0 | | | | | | |"
    assert lines[3] == "| wild | 2, 2 diverged | 10.00 ± 0.00 | 10.00 to 10.00 |  |  |  |  |"
    assert {line.count("|") for line in lines} == {9}


def test_seconds_are_told_only_where_something_is_claimed_of_them(experiment: Experiment) -> None:
    plain = replace(experiment, claims=tuple(replace(one, cheaper=False) for one in experiment.claims))
    lines = list(table.experiment_table(plain, {**ROWS["toy"], "wild": [made_up(0, None)]}))
    assert lines[0] == "| | n | top-1 % | least to most | to the first | steps | work |"
    assert lines[2].endswith("|  | 30 | 12 MP |") and {line.count("|") for line in lines} == {8}


def test_two_views_are_two_columns(experiment: Experiment) -> None:
    mine = [row | {"top1_square": row["top1"] - 3} for row in ROWS["toy"]["slow"]]
    head, line, slow, wild = table.experiment_table(experiment, {"slow": mine, "wild": []})
    assert "top-1 %, squares" in head and "| 58.00 ± 1.00 |" in slow
    assert {one.count("|") for one in (head, line, slow, wild)} == {10}


def test_the_page_says_when_where_and_how_long(experiment: Experiment) -> None:
    text = table.render_results_page([experiment], ROWS)
    assert "6 different runs, 2026-01-01 to 2026-01-03, 0.2 hours of one thread in all. Made on\n2 cores (X).\n" in text
    assert "Commits: 0123456789ab." in text and "![1. A toy](pictures/toy.png)" in text
    assert "- **Not seen at this scale.** Slow is better than wild" in text
    assert "No runs yet." in table.render_results_page([experiment], {"toy": {}})


def test_a_picture_has_a_line_for_each_arm(experiment: Experiment, tmp_path: Path) -> None:
    picture.draw_experiment(tmp_path / "a" / "toy.png", experiment, ROWS["toy"])
    picture.draw_experiment(tmp_path / "one.png", experiment, {"slow": ROWS["toy"]["slow"][:1], "wild": []})
    picture.draw_experiment(tmp_path / "none.png", experiment, {"slow": [], "wild": [made_up(0, None)]})
    with Image.open(tmp_path / "a" / "toy.png") as image, Image.open(tmp_path / "one.png") as small:
        assert image.size[1] - small.size[1] == picture.ROW_HEIGHT
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or ()}
    assert {tuple(bytes.fromhex(one[1:])) for one in picture.ARM_COLOURS[:2]} <= colours


@pytest.mark.parametrize("low, high", [(0, 100), (59.2, 61.4), (10, 10), (0.01, 0.02), (57.3, 98.0)])
def test_ticks_are_few_and_hold_the_values(low: float, high: float) -> None:
    found = picture.axis_ticks(low, high)
    assert found[0] <= low + 1e-6 and found[-1] >= high - 1e-6 and 2 <= len(found) <= 8


def test_an_experiment_is_one_command(
    experiment: Experiment, stub: Any, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SweepLocation", partial(SweepLocation, trainer=stub))
    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.setattr(command, "MIN_SEEDS", 2)
    words = ["--data", "here", "--seeds", "2", "--work", str(tmp_path / "work"), "--results", str(tmp_path / "rows")]
    assert command.main([experiment], [*words, "--list"]) == 0
    assert capfd.readouterr().out.count("slow, seed") == 2
    assert command.main([experiment], words) == 0
    said = capfd.readouterr().out
    assert "4 runs, 4 of them to be made" in said and "wild, seed 0: 60.00 %" in said
    assert "| wild | 2 | 60.00 ± 0.00 |" in said and (tmp_path / "pictures" / "toy.png").exists()
    assert not (tmp_path / "RESULTS.md").exists()  # that is of all experiments
    assert command.main([experiment, experiment], words) == 0  # all that is needed is there
    assert "4 runs, 0 of them to be made" in capfd.readouterr().out
    assert "| slow | 2 |" in (tmp_path / "RESULTS.md").read_text()


def test_what_is_missing_is_said_in_a_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([experiment], [])
    assert end.value.code == 2 and "say --data DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([experiment], ["--data", "x", "--seeds", "0"])


@pytest.mark.parametrize("script", ["run.py", "studies/rectangles.py"])
def test_a_script_runs_as_it_is_told_to(script: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "experiments" / script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--photographs" in done.stdout and not done.stderr
