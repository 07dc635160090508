"""The plan command: forecasts as tables and JSON, and refused options."""

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
        assert row["dollars"] is None or row["dollars"] > 0
    ran = sandbox.cli("plan", *arguments, RECIPE)
    lines = ran.out.splitlines()
    assert len([line for line in lines if line.startswith("p4d.24xlarge ")]) == 2, ran
    assert all("unknown price" in line for line in lines if line.startswith("p5e.48xlarge "))
    assert "constants: presets" in ran.out and lines[2].split()[-1] == "compute"
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


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--machines", "0"], 2, "--machines"), (["--machines", "1,x"], 2, "such as 1,2,4,8"),
    (["--machines", ""], 2, "--machines"), (["--type", "q9.large"], 2, "q9.large: unknown machine type"),
    (["--from", "job-9"], 102, "job-9: there is no such job"),
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
