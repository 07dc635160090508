"""The plan command: forecasts as tables, JSON and a plot, and refused options."""

import json
from pathlib import Path
from typing import Any

import pytest

Fixture = Any
ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes/resnet50_18min.py")
TERMS = {"compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start"}


def plan_json(sandbox: Fixture, *arguments: str, recipe: str = RECIPE) -> Any:
    """The parsed output of `plan -o json`."""
    ran = sandbox.cli("plan", "-o", "json", *arguments, recipe)
    assert ran.code == 0 and ran.err == "", ran
    return json.loads(ran.out)


def test_plan_cli_prints_a_row_per_type_and_machine_count(sandbox: Fixture) -> None:
    ran = sandbox.cli("plan", "--machines", "1,8,16", "--type", "p4d.24xlarge,p5e.48xlarge", RECIPE)
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert len([line for line in lines if line.startswith("p4d.24xlarge ")]) == 3
    assert all("unknown price" in line for line in lines if line.startswith("p5e.48xlarge "))
    assert [line.split(":")[0] for line in lines if " save" in line] == ["p4d.24xlarge", "p5e.48xlarge"]
    assert "constants: presets" in ran.out and "compute 0-28" in ran.out


def test_plan_json_has_minutes_dollars_terms_and_phases(sandbox: Fixture) -> None:
    rows = plan_json(sandbox, "--machines", "8,16", "--type", "p4d.24xlarge", "--type", "p5.48xlarge")
    assert [(row["type"], row["machines"]) for row in rows] == [
        ("p4d.24xlarge", 8), ("p4d.24xlarge", 16), ("p5.48xlarge", 8), ("p5.48xlarge", 16),
    ]  # fmt: skip
    for row in rows:
        forecast = row["forecast"]
        assert set(forecast["terms"]) == TERMS
        assert forecast["minutes"] == pytest.approx(sum(forecast["terms"].values()) / 60)
        assert forecast["dollars"]["on_demand"] > 0 and forecast["dollars"]["spot"] is None
        assert [phase["start"] for phase in forecast["phases"]] == [phase["start"] for phase in row["phases"]]
        assert all(phase["most"] in TERMS for phase in forecast["phases"]) and 0 < forecast["efficiency"] <= 1
        assert forecast["target"]["epochs"] == (30 if row["machines"] == 8 else 38)
        assert forecast["target"]["dollars"] < forecast["dollars"]["on_demand"]


def test_plan_without_type_forecasts_the_first_rentable_one(sandbox: Fixture) -> None:
    row = plan_json(sandbox, "--machines", "8")
    assert (row["type"], row["machines"], row["gpus"]) == ("p4d.24xlarge", 8, 64) and row["forecast"]["minutes"] > 0
    assert row["notes"] == []
    ran = sandbox.cli("plan", "--machines", "8", RECIPE)
    assert "forecast on 8 x p4d.24xlarge:" in ran.out and "on demand" in ran.out
    without_type = sandbox.cli("plan", "-o", "json", sandbox.write_recipe(2))
    assert "forecast" not in json.loads(without_type.out)


def test_plan_of_one_row_shows_terms_and_respects_epochs(sandbox: Fixture) -> None:
    ran = sandbox.cli("plan", "--type", "p4d.24xlarge", "--machines", "8", "--epochs", "20", RECIPE)
    assert ran.code == 0 and "17-20" in ran.out and "23-29" not in ran.out
    assert "before the first step, in seconds: boot 120, setup 60, fetch" in ran.out
    whole, first = (
        plan_json(sandbox, "--type", "p4d.24xlarge", "--machines", "8", *more) for more in ((), ("--epochs", "20"))
    )
    assert first["steps"] < whole["steps"] and first["forecast"]["minutes"] < whole["forecast"]["minutes"]


def test_plan_imagenet18_trainer_reproduces_its_times(sandbox: Fixture) -> None:
    rows = plan_json(sandbox, "--machines", "8,16", "--type", "p3.16xlarge", "--trainer", "imagenet18")
    starts = [row["forecast"]["start"] for row in rows]
    start_minutes = [sum(start[name] for name in ("boot", "setup", "fetch")) / 60 for start in starts]
    assert min(start_minutes) > 3  # these minutes are billed too
    assert [row["forecast"]["target"]["minutes"] - start for row, start in zip(rows, start_minutes, strict=True)] == [
        pytest.approx(18.88, rel=0.1), pytest.approx(18.09, rel=0.1)
    ]  # fmt: skip
    ran = sandbox.cli("plan", "--machines", "8,16", "--type", "p3.16xlarge", "--trainer", "imagenet18", RECIPE)
    assert "AWS stopped listing p3.16xlarge in 2026; for comparison only" in ran.out


def test_plan_chooses_a_row_and_prints_its_launch_command(sandbox: Fixture) -> None:
    machines = ("--machines", "1,4,16", "--type", "p4d.24xlarge")
    for option, count in (("--cheapest", 1), ("--fastest", 16), ("--within=30min", 4), ("--within=25$", 4)):
        rows = plan_json(sandbox, *machines, option)
        (chosen,) = [row for row in rows if row["chosen"]]
        assert chosen["machines"] == count
        assert chosen["launch"] == f"imgnet-cluster launch --machines {count} --type p4d.24xlarge {RECIPE}"
    both = plan_json(sandbox, *machines, "--cheapest", recipe=str(ROOT / "recipes/resnet50_2026.py"))
    only_options = [row["launch"].split()[-3:-1] for row in both if row["chosen"]]
    assert only_options == [
        ["--only", "resnet50_2026"],
        ["--only", "resnet50_2026_lars"],
    ]  # without it, both recipes would be launched
    ran = sandbox.cli("plan", *machines, "--fastest", RECIPE)
    assert ran.out.splitlines()[-1].strip() == chosen["launch"].replace("machines 4", "machines 16")
    ran = sandbox.cli("launch", *ran.out.splitlines()[-1].split()[2:-1], "--dry-run", RECIPE)
    assert ran.code == 0 and "rents 16 x p4d.24xlarge" in ran.out, ran
    assert "with boot and set-up (a forecast from presets)" in ran.out


def test_plan_plot_writes_a_png(sandbox: Fixture) -> None:
    ran = sandbox.cli("plan", "--machines", "1,2", "--type", "p4d.24xlarge", "--plot", "out.png", RECIPE)
    assert ran.code == 0 and "plot: out.png" in ran.out
    assert (sandbox.path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--machines", "0"], 2, "--machines"), (["--machines", "1,x"], 2, "such as 1,2,4,8"),
    (["--machines", ""], 2, "--machines"), (["--type", "q9.large"], 2, "q9.large: unknown machine type"),
    (["--epochs", "0"], 2, "--epochs"), (["--type", "p4d.24xlarge", "--epochs", "99"], 2, "has 50 epochs on 16"),
    (["--within", "soon"], 2, "30min, 2h or 40$"), (["--cheapest", "--within", "1h"], 2, "mutually exclusive"),
    (["--plot", "x.jpg"], 2, "ends in .png"), (["--plot", "x.png", "--type", "p6-b200.48xlarge"], 2, "no forecast"),
    (["--trainer", "nobody"], 2, "--trainer"), (["--from", "job-9"], 102, "job-9: there is no such job"),
    (["--from", "job-9", "--trainer", "imagenet18"], 2, "mutually exclusive"),
    (["--epochs", "5", "--within", "40$"], 2, "--epochs cannot be combined with --within"),
    (["--trainer", "imagenet18", "--fastest"], 2, "--trainer cannot be combined with --fastest"),
    (["--within", "1min"], 1, "no row is within"), (["--cheapest"], 2, "there is one row"),
    (["--cheapest", "--fastest"], 2, "mutually exclusive"),
    (["--plot", "nowhere/x.png"], 1, "nowhere"),
])  # fmt: skip
def test_plan_impossible_options_are_refused_in_one_line(
    sandbox: Fixture, arguments: list[str], code: int, message: str
) -> None:
    ran = sandbox.cli("plan", *arguments, RECIPE)
    assert ran.code == code and message in ran.err, ran
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert not list(sandbox.path.glob("*.png"))


def test_plan_of_a_recipe_without_types_demands_one(sandbox: Fixture) -> None:
    ran = sandbox.cli("plan", "--machines", "1,2", sandbox.write_recipe(2))
    assert ran.code == 2 and "pass one, such as --type p4d.24xlarge" in ran.err


def test_plan_from_a_job_uses_its_constants(finished: Fixture) -> None:
    result = json.loads(finished.cli("status", "-o", "json").out)["result"]
    assert result["constants"]["batch_timings"]
    # Nothing was known of the speed of this computer, so there is no forecast that could be compared.
    assert (result["forecast"], result["against"]) == (None, None)
    assert "imgnet-cluster plan --from job-1" in finished.cli("status").out
    recipe = finished.write_recipe(3)
    ran = finished.cli("plan", "-o", "json", "--from", "job-1", recipe)
    assert ran.code == 0, ran
    row = json.loads(ran.out)
    assert row["type"] == "as job-1's" and row["forecast"]["source"] == "job-1"
    assert row["forecast"]["dollars"]["on_demand"] == 0
    assert (
        "slower communication among more machines is not included"
        not in finished.cli("plan", "--from", "job-1", recipe).out
    )
    several = finished.cli("plan", "--machines", "1,2", "--from", "job-1", recipe)
    assert "job-1 ran on 1 machine; slower communication among more machines is not included" in several.out, several
    other = finished.path / "other.py"
    other.write_text(Path(finished.path / recipe).read_text().replace("resnet10_tiny", "resnet18"))
    refused = finished.cli("plan", "--from", "job-1", str(other))
    assert (
        refused.code == 2 and "it trained resnet10_tiny, so its measured speeds do not hold for resnet18" in refused.err
    )
    (size, batch, seconds) = result["constants"]["batch_timings"][0]
    steps = sum(phase["steps"] for phase in row["phases"])
    assert (size, batch) == (32, 8) and row["forecast"]["terms"]["compute"] == pytest.approx(steps * seconds, rel=0.2)
