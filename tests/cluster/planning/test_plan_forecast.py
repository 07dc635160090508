"""The plan command: forecasts as tables and JSON, the choice, and refused options."""

import json
from pathlib import Path
from typing import Any

import pytest

from train.forecast import TERMS

ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes/resnet50_18min.py")


def plan_json(sandbox: Any, *arguments: str, recipe: str = RECIPE) -> Any:
    """The parsed output of `plan -o json`."""
    ran = sandbox.cli("plan", "-o", "json", *arguments, recipe)
    assert ran.code == 0 and ran.err == "", ran
    return json.loads(ran.out)


def test_plan_has_a_row_per_type_and_machine_count(sandbox: Any) -> None:
    arguments = ("--machines", "1,8", "--type", "p4d.24xlarge,p5e.48xlarge", "--type", "p3.16xlarge")
    rows = plan_json(sandbox, *arguments)
    types = ("p4d.24xlarge", "p5e.48xlarge", "p3.16xlarge")
    assert [(row["type"], row["machines"]) for row in rows] == [(name, count) for name in types for count in (1, 8)]
    for row in rows:
        assert set(row["forecast"]["terms"]) == {*TERMS, "start"}
        assert 0 < row["efficiency"] <= 1 and row["target"]["epochs"] == (28 if row["machines"] == 1 else 30)
    ran = sandbox.cli("plan", *arguments, RECIPE)
    lines = ran.out.splitlines()
    assert len([line for line in lines if line.startswith("p4d.24xlarge ")]) == 2, ran
    assert all("unknown price" in line for line in lines if line.startswith("p5e.48xlarge "))
    assert "constants: presets" in ran.out and "compute 0-28" in ran.out
    assert "AWS stopped listing p3.16xlarge in 2026; for comparison only" in ran.out


def test_plan_of_one_row_shows_schedule_and_terms(sandbox: Any) -> None:
    row = plan_json(sandbox, "--machines", "8")
    assert (row["type"], row["machines"], row["gpus"], row["notes"]) == ("p4d.24xlarge", 8, 64, [])
    ran = sandbox.cli("plan", "--machines", "8", RECIPE)
    assert "4224 steps over 1281167 images" in ran.out and f"${row['dollars']:.2f} on demand" in ran.out, ran
    assert "before the first step, in seconds: boot 120, setup 60, fetch" in ran.out
    here = plan_json(sandbox, "--local", recipe=str(ROOT / "recipes/quickstart.py"))
    assert (here["machines"], here["dollars"], here["forecast"]["start"]["boot"]) == (1, 0.0, 0.0)
    unknown = sandbox.cli("plan", sandbox.write_recipe(2))
    assert "no measurements of this model on an unknown GPU" in unknown.out


def test_plan_chooses_a_row_and_prints_its_launch_command(sandbox: Any) -> None:
    machines = ("--machines", "1,4,16", "--type", "p4d.24xlarge")
    for option, count in (("--cheapest", 1), ("--fastest", 16)):
        (chosen,) = [row for row in plan_json(sandbox, *machines, option) if row["chosen"]]
        assert chosen["machines"] == count
        assert chosen["launch"] == f"imgnet-cluster launch --machines {count} --type p4d.24xlarge {RECIPE}"
    both = plan_json(sandbox, *machines, "--cheapest", recipe=str(ROOT / "recipes/resnet50_2026.py"))
    only_options = [row["launch"].split()[-3:-1] for row in both if row["chosen"]]
    # Without it, both recipes would be launched.
    assert only_options == [["--only", "resnet50_2026"], ["--only", "resnet50_2026_lars"]]
    only = plan_json(sandbox, *only_options[1], recipe=str(ROOT / "recipes/resnet50_2026.py"))
    assert [row["recipe"] for row in both if row["chosen"]] == ["resnet50_2026", only["recipe"]]
    ran = sandbox.cli("plan", *machines, "--fastest", RECIPE)
    assert ran.out.splitlines()[-1].strip() == chosen["launch"]
    ran = sandbox.cli("launch", *chosen["launch"].split()[2:-1], "--dry-run", RECIPE)
    assert ran.code == 0 and "rents 16 x p4d.24xlarge" in ran.out, ran
    assert "(from presets)" in ran.out


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--machines", "0"], 2, "--machines"), (["--machines", "1,x"], 2, "such as 1,2,4,8"),
    (["--machines", ""], 2, "--machines"), (["--type", "q9.large"], 2, "q9.large: unknown machine type"),
    (["--from", "job-9"], 102, "job-9: there is no such job"), (["--cheapest"], 2, "there is one row"),
    (["--cheapest", "--fastest"], 2, "mutually exclusive"),
    (["--machines", "1,2", "--type", "p6-b200.48xlarge", "--fastest"], 1, "no row has a forecast"),
])  # fmt: skip
def test_plan_impossible_options_are_refused_in_one_line(
    sandbox: Any, arguments: list[str], code: int, message: str
) -> None:
    ran = sandbox.cli("plan", *arguments, RECIPE)
    assert ran.code == code and message in ran.err, ran
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1


def test_plan_from_a_job_uses_its_constants(finished: Any) -> None:
    (size, batch, seconds) = finished.job().result.constants.batch_timings[0]
    recipe = finished.write_recipe(3)
    row = plan_json(finished, "--from", "job-1", recipe=recipe)
    assert (row["type"], row["forecast"]["source"], row["dollars"]) == ("machine of job-1", "job-1", 0)
    steps = sum(phase["steps"] for phase in row["phases"])
    assert (size, batch) == (32, 8) and row["forecast"]["terms"]["compute"] == pytest.approx(steps * seconds, rel=0.2)
    note = "job-1 ran on 1 machine; slower communication among more machines is not included"
    assert note in finished.cli("plan", "--machines", "1,2", "--from", "job-1", recipe).out
    other = finished.path / "other.py"
    other.write_text(Path(finished.path / recipe).read_text().replace("resnet10_tiny", "resnet18"))
    refused = finished.cli("plan", "--from", "job-1", str(other))
    message = "it trained resnet10_tiny, so its measured speeds do not hold for resnet18"
    assert refused.code == 2 and message in refused.err
