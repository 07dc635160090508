"""The accuracy that a run is for: what may be asked, when it is reached, and runs that end there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.forecast.calibration import compare_with_run, terms_until
from train.recipe import Phase, Recipe
from train.recipe.target import Target, describe_outcome, start_clock, target_outcome
from train.tools import checkpoint_io

ROWS: list[dict[str, Any]] = [
    {"epoch": 1, "top1": 10.0, "top5": 50.0, "at": 1060.0, "clock": 60.0, "view": "square"},
    {"epoch": 2, "top1": None, "top5": None, "at": 1120.0, "clock": 120.0, "view": None},
    {"epoch": 3, "top1": 30.0, "top5": 93.0, "at": 1180.0, "clock": 180.0, "view": "square"},
    {"epoch": 4, "top1": 40.0, "top5": 92.5, "at": 1240.0, "clock": 240.0, "view": "rectangle"},
]


@pytest.mark.parametrize(
    "text, metric, goal",
    [
        ("top5=93", "top5", 93.0),
        ("top1=76.1", "top1", 76.1),
        ("top5=100", "top5", 100.0),
        ("top1=17.0000001", "top1", 17.0000001),
    ],
)
def test_a_target_is_a_metric_and_percent(text: str, metric: str, goal: float) -> None:
    found = Target.parse(text)
    assert (found.metric, found.goal, found.stops_training) == (metric, goal, True) and str(found) == text


@pytest.mark.parametrize(
    "text", ["", "93", "top5", "top5=", "top5=x", "top5=0", "top5=101", "top5=nan", "top3=5", "top1=-1"]
)
def test_what_is_no_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="top5=93"):
        Target.parse(text)


def test_the_first_validation_at_the_goal_reaches_it_and_one_that_was_not_made_does_not() -> None:
    told = target_outcome(Target("top5", 93.0), ROWS)
    assert told == {
        "metric": "top5", "goal": 93.0, "stops": True, "reached": True, "epoch": 3, "at": 1180.0, "seconds": 180.0,
        "minutes": 3.0, "seconds_all": None, "dollars": None, "best": 93.0, "best_epoch": 3,
        "best_view": "square",
    }  # fmt: skip
    assert describe_outcome(told) == "top-5 of 93 % reached in epoch 3, 3.00 minutes after the start of loading"
    paid = {**told, "seconds_all": 300.0, "dollars": 1.5}
    assert describe_outcome(paid).endswith("loading, 5.00 after the launch, $1.50")


def test_what_was_not_reached_is_said_with_the_best_there_was() -> None:
    told = target_outcome(Target("top1", 76.1), ROWS)
    assert told and (told["reached"], told["epoch"], told["seconds"], told["best"]) == (False, None, None, 40.0)
    assert describe_outcome(told) == "top-1 of 76.1 % not reached; the best was 40.00 % in epoch 4 (rectangle)"
    assert describe_outcome(target_outcome(Target("top1", 76.1), []) or {}).endswith("nothing was validated")


def test_the_recipe_s_own_target_is_told_of_and_stops_nothing(tiny: Any) -> None:
    plain, own = tiny(), tiny(target=93.0)
    assert Target.from_options("", plain) is None and target_outcome(None, ROWS) is None
    assert Target.from_options("", own) == Target("top5", 93.0, stops_training=False)
    assert Target.from_options("top1=50", own) == Target("top1", 50.0)
    assert (
        Target.parse("top5=80").apply_to_recipe(own).target == 80.0
        and Target.parse("top1=80").apply_to_recipe(own).target == 93.0
    )


def test_the_clock_goes_on_over_attempts_and_begins_anew_with_a_new_run(tmp_path: Path) -> None:
    assert start_clock(tmp_path, 100.0, is_new_run=True) == 100.0
    assert start_clock(tmp_path, 150.0, is_new_run=False) == 100.0
    assert start_clock(tmp_path, 200.0, is_new_run=True) == 200.0
    other = tmp_path / "other"
    other.mkdir()
    assert start_clock(other, 150.0, is_new_run=False) == 150.0, "the first attempt never came so far"


def test_a_run_that_ended_at_its_target_is_held_against_the_forecast_of_what_it_ran() -> None:
    each = {"compute": 80.0, "validation": 8.0, "fixed": 4.0}
    phases = [{"start": 0, "end": 2, "terms": each}, {"start": 2, "end": 6, "terms": each}]
    told = {"terms": {**{name: 2 * one for name, one in each.items()}, "start": 10.0}, "phases": phases}
    assert terms_until(told, 6) == told["terms"]
    assert terms_until(told, 3) == {"compute": 100.0, "validation": 10.0, "fixed": 5.0, "start": 10.0}
    rows = [
        {"epoch": number, "where": {"steps": 25.0 if number == 3 else 40.0, "validation": 3.0, "other": 2.0}}
        for number in (1, 2, 3)
    ]
    found = {row["term"]: row for row in compare_with_run(told, {"epochs": rows, "seconds": {"attempt": 10.0}})}
    assert found["steps"]["forecast"] == 100.0 and found["steps"]["actual"] == 105.0
    assert found["all"]["forecast"] == 125.0


# --- whole runs -----------------------------------------------------------------------------------------------------

EASY = "top5=5"  # 20 images: whatever is said five times of ten classes hits one


def easy(tiny: Any) -> Recipe:
    rows = [Phase(epochs=(0, 4), size=32, batch=8, lr=0.01, min_scale=0.35, validate="each")]
    made: Recipe = tiny(name="easy", phases=rows)
    return made


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for path in sorted((out / "metrics").iterdir()) for line in path.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def reached(runs: Any, tiny: Any) -> Path:
    """Two processes that reach their target in the first epoch of four."""
    out: Path = runs.folder / "reached"
    runs.run(out, "--gpus", "2", "--target", EASY, world=2, recipe=runs.recipe(easy(tiny)))
    return out


def test_training_ends_after_the_validation_that_reaches_the_target_and_saves_it(reached: Path, runs: Any) -> None:
    got = result(reached)
    told, row = got["target"], got["epochs"][-1]
    assert (len(got["epochs"]), got["steps"], got["state"]) == (1, 4, "done")
    assert (told["reached"], told["epoch"], told["stops"], told["goal"]) == (True, 1, True, 5.0)
    assert told["seconds"] == row["clock"] == got["clock"]["seconds"] and told["at"] == row["at"]
    assert row["clock"] == pytest.approx(row["at"] - got["clock"]["begun"])
    assert row["train_seconds"] + row["val_seconds"] < row["clock"] <= got["seconds"]["attempt"] + 0.5
    path = checkpoint_io.newest_checkpoint(reached / "checkpoints/000001")
    assert path and checkpoint_io.load_checkpoint(path)["epoch"] == 1
    said = runs.said(reached)
    assert "top-5 of 5 % reached in epoch 1, " in said and "Traceback" not in said
    assert not runs.alive(reached)


def test_the_metrics_begin_with_what_the_attempt_is(reached: Path) -> None:
    (start,) = lines(reached, "start")
    assert (start["train_images"], start["val_images"], start["world"], start["gpus"]) == (50, 20, 2, 2)
    assert start["begun"] == result(reached)["clock"]["begun"] and start["versions"]["torch"] and start["step"] == 0


def test_a_resumed_run_that_had_reached_it_trains_no_more(reached: Path, runs: Any, tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(reached, out)
    before = len(lines(out, "train"))
    again = ("--gpus", "2", "--target", EASY, "--attempt", "2")
    runs.run(out, *again, world=2, recipe=runs.recipe(easy(tiny)))
    got, old = result(out), result(reached)
    assert len(lines(out, "train")) == before and got["epochs"][0]["clock"] == old["epochs"][0]["clock"]
    assert {**got["target"], "at": 0} == {**old["target"], "at": 0} and got["steps"] == 4
    assert got["clock"] == old["clock"]


def test_a_higher_target_lets_the_same_run_go_on_and_a_missed_one_is_no_failure(
    reached: Path, runs: Any, tiny: Any, tmp_path: Path
) -> None:
    out = tmp_path / "on"
    shutil.copytree(reached, out)
    runs.run(
        out, "--procs", "1", "--gpus", "2", "--target", "top1=100", "--attempt", "2", recipe=runs.recipe(easy(tiny))
    )
    got, old = result(out), result(reached)
    assert len(got["epochs"]) == 4 and got["target"]["reached"] is False and got["target"]["epoch"] is None
    assert got["clock"]["begun"] == old["clock"]["begun"], "the clock goes on"
    clocks = [row["clock"] for row in got["epochs"]]
    assert clocks[0] == old["epochs"][0]["clock"] and clocks == sorted(clocks)
    assert got["target"]["best"] == max(row["top1"] for row in got["epochs"])
    assert "top-1 of 100 % not reached" in runs.said(out)


def test_the_recipe_s_own_target_ends_nothing(runs: Any, tiny: Any, tmp_path: Path) -> None:
    out, own = tmp_path / "own", replace(easy(tiny), name="own", target=5.0)
    runs.run(out, "--gpus", "2", "--procs", "1", "--max-steps", "5", recipe=runs.recipe(own))
    got = result(out)
    assert len(got["epochs"]) == 2 and (got["target"]["reached"], got["target"]["stops"]) == (True, False)


def test_a_target_that_is_none_ends_the_command_with_an_example(runs: Any, tmp_path: Path) -> None:
    assert "look like top5=93" in runs.run(tmp_path / "none", "--target", "93", code=2)
