"""`imgnet-cluster plan` as a person types it: the forecast in tables, JSON and a picture, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

Fixture = Any
ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes/resnet50_18min.py")
TERMS = {"compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start"}


def told(place: Fixture, *words: str, recipe: str = RECIPE) -> Any:
    ran = place.cli("plan", "-o", "json", *words, recipe)
    assert ran.code == 0 and ran.err == "", ran
    return json.loads(ran.out)


def test_several_machines_and_types_are_a_row_each_with_knee_and_prices(place: Fixture) -> None:
    ran = place.cli("plan", "--machines", "1,8,16", "--type", "p4d.24xlarge,p5e.48xlarge", RECIPE)
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert len([one for one in lines if one.startswith("p4d.24xlarge ")]) == 3
    assert all("unknown price" in one for one in lines if one.startswith("p5e.48xlarge "))
    assert [one.split(":")[0] for one in lines if " buy" in one] == ["p4d.24xlarge", "p5e.48xlarge"]
    assert "constants: presets" in ran.out and "compute 0-28" in ran.out


def test_json_carries_minutes_dollars_terms_and_phases(place: Fixture) -> None:
    found = told(place, "--machines", "8,16", "--type", "p4d.24xlarge", "--type", "p5.48xlarge")
    assert [(one["type"], one["machines"]) for one in found] == [
        ("p4d.24xlarge", 8), ("p4d.24xlarge", 16), ("p5.48xlarge", 8), ("p5.48xlarge", 16),
    ]  # fmt: skip
    for one in found:
        said = one["forecast"]
        assert set(said["terms"]) == TERMS and said["minutes"] == pytest.approx(sum(said["terms"].values()) / 60)
        assert said["dollars"]["on_demand"] > 0 and said["dollars"]["spot"] is None
        assert [row["start"] for row in said["phases"]] == [row["start"] for row in one["phases"]]
        assert all(row["most"] in TERMS for row in said["phases"]) and 0 < said["efficiency"] <= 1
        assert said["target"]["epochs"] == (30 if one["machines"] == 8 else 38)
        assert said["target"]["dollars"] < said["dollars"]["on_demand"]


def test_a_plain_plan_has_the_forecast_of_the_first_type_that_there_is(place: Fixture) -> None:
    one = told(place, "--machines", "8")
    assert (one["type"], one["machines"], one["gpus"]) == ("p4d.24xlarge", 8, 64) and one["forecast"]["minutes"] > 0
    assert one["notes"] == []
    ran = place.cli("plan", "--machines", "8", RECIPE)
    assert "forecast on 8 x p4d.24xlarge:" in ran.out and "on demand" in ran.out and "spot unknown price" in ran.out
    other = place.cli("plan", "-o", "json", place.recipe(2))
    assert "forecast" not in json.loads(other.out)  # it names no type


def test_one_row_is_shown_term_by_term_and_the_first_epochs_alone_when_asked(place: Fixture) -> None:
    ran = place.cli("plan", "--type", "p4d.24xlarge", "--machines", "8", "--epochs", "20", RECIPE)
    assert ran.code == 0 and "17-20" in ran.out and "23-29" not in ran.out
    assert "before the first step, in seconds: boot 120, setup 60, fetch" in ran.out
    whole, first = (
        told(place, "--type", "p4d.24xlarge", "--machines", "8", *more) for more in ((), ("--epochs", "20"))
    )
    assert first["steps"] < whole["steps"] and first["forecast"]["minutes"] < whole["forecast"]["minutes"]


def test_the_trainer_of_2018_on_its_machines(place: Fixture) -> None:
    found = told(place, "--machines", "8,16", "--type", "p3.16xlarge", "--trainer", "imagenet18")
    starts = [one["forecast"]["start"] for one in found]
    before = [sum(one[name] for name in ("boot", "setup", "fetch")) / 60 for one in starts]
    assert min(before) > 3  # on demand, they are paid for too
    assert [one["forecast"]["target"]["minutes"] - more for one, more in zip(found, before, strict=True)] == [
        pytest.approx(18.88, rel=0.1), pytest.approx(18.09, rel=0.1)
    ]  # fmt: skip
    ran = place.cli("plan", "--machines", "8,16", "--type", "p3.16xlarge", "--trainer", "imagenet18", RECIPE)
    assert "AWS stopped listing p3.16xlarge in 2026; for comparison only" in ran.out


def test_a_row_is_chosen_and_its_launch_can_be_typed(place: Fixture) -> None:
    some = ("--machines", "1,4,16", "--type", "p4d.24xlarge")
    for how, count in (("--cheapest", 1), ("--fastest", 16), ("--within=30min", 4), ("--within=25$", 4)):
        found = told(place, *some, how)
        (chosen,) = [one for one in found if one["chosen"]]
        assert chosen["machines"] == count
        assert chosen["launch"] == f"imgnet-cluster launch --machines {count} --type p4d.24xlarge {RECIPE}"
    both = told(place, *some, "--cheapest", recipe=str(ROOT / "recipes/resnet50_2026.py"))
    only = [one["launch"].split()[-3:-1] for one in both if one["chosen"]]
    assert only == [["--only", "resnet50_2026"], ["--only", "resnet50_2026_lars"]]  # else both would be launched
    ran = place.cli("plan", *some, "--fastest", RECIPE)
    assert ran.out.splitlines()[-1].strip() == chosen["launch"].replace("machines 4", "machines 16")
    ran = place.cli("launch", *ran.out.splitlines()[-1].split()[2:-1], "--dry-run", RECIPE)
    assert ran.code == 0 and "rents 16 x p4d.24xlarge" in ran.out, ran
    assert "with boot and set-up (a forecast from presets)" in ran.out


def test_a_picture_is_drawn(place: Fixture) -> None:
    ran = place.cli("plan", "--machines", "1,2", "--type", "p4d.24xlarge", "--plot", "out.png", RECIPE)
    assert ran.code == 0 and "drawn: out.png" in ran.out
    assert (place.path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--machines", "0"], 2, "--machines"), (["--machines", "1,x"], 2, "such as 1,2,4,8"),
    (["--machines", ""], 2, "--machines"), (["--type", "q9.large"], 2, "q9.large: is not in the shipped table"),
    (["--epochs", "0"], 2, "--epochs"), (["--type", "p4d.24xlarge", "--epochs", "99"], 2, "has 50 on 16 machines"),
    (["--within", "soon"], 2, "30min, 2h or 40$"), (["--cheapest", "--within", "1h"], 2, "all choose"),
    (["--plot", "x.jpg"], 2, "ends in .png"), (["--plot", "x.png", "--type", "p6-b200.48xlarge"], 2, "no forecast"),
    (["--trainer", "nobody"], 2, "--trainer"), (["--from", "job-9"], 102, "job-9: no such job"),
    (["--from", "job-9", "--trainer", "imagenet18"], 2, "both say whose"),
    (["--epochs", "5", "--within", "40$"], 2, "--epochs forecasts a part"),
    (["--trainer", "imagenet18", "--fastest"], 2, "is not what a launch would train"),
    (["--within", "1min"], 1, "no row is within"), (["--cheapest"], 2, "there is one row"),
    (["--cheapest", "--fastest"], 2, "all choose"),
    (["--plot", "nowhere/x.png"], 1, "nowhere"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(place: Fixture, words: list[str], code: int, said: str) -> None:
    ran = place.cli("plan", *words, RECIPE)
    assert ran.code == code and said in ran.err, ran
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert not list(place.path.glob("*.png"))


def test_a_recipe_without_types_is_asked_for_one(place: Fixture) -> None:
    ran = place.cli("plan", "--machines", "1,2", place.recipe(2))
    assert ran.code == 2 and "say one: --type p4d.24xlarge" in ran.err


def test_the_constants_of_a_job_are_used_and_its_forecast_stands_in_status(finished: Fixture) -> None:
    result = json.loads(finished.cli("status", "-o", "json").out)["result"]
    assert result["forecast"]["source"] == "presets" and result["constants"]["batch_timings"]
    assert [row["term"] for row in result["against"]] == ["steps", "loader", "validation", "fixed", "start", "all"]
    assert result["against"][-1]["actual"] > 0
    shown = finished.cli("status").out
    assert "took" in shown and "error" in shown
    own = finished.recipe(3)
    ran = finished.cli("plan", "-o", "json", "--from", "job-1", own)
    assert ran.code == 0, ran
    said = json.loads(ran.out)
    assert said["type"] == "as job-1's" and said["forecast"]["source"] == "job-1"
    assert said["forecast"]["dollars"]["on_demand"] == 0
    assert "that others send more between them is left out" not in finished.cli("plan", "--from", "job-1", own).out
    several = finished.cli("plan", "--machines", "1,2", "--from", "job-1", own)
    assert "job-1 ran on 1: that others send more between them is left out" in several.out, several
    other = finished.path / "other.py"
    other.write_text(Path(finished.path / own).read_text().replace("resnet10_tiny", "resnet18"))
    refused = finished.cli("plan", "--from", "job-1", str(other))
    assert refused.code == 2 and "it trained resnet10_tiny, whose seconds say nothing of resnet18" in refused.err
    (size, batch, seconds) = result["constants"]["batch_timings"][0]
    steps = sum(row["steps"] for row in said["phases"])
    assert (size, batch) == (32, 8) and said["forecast"]["terms"]["compute"] == pytest.approx(steps * seconds, rel=0.2)
