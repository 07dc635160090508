"""Tests of the forecast against published runs, and of docs/forecast.md."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forecast_page import KNOWN_MISSES, forecast_on_v100, render_page
from published_runs import MAX_ERROR, PublishedRun, published_runs

from recipes.resnet50_18min import recipe as resnet50
from train.forecast import IMAGENET18_CONSTANTS
from train.forecast.constants import DEFAULT_CONSTANTS

RUNS = published_runs(dict(resnet50.tables))
RUN_BY_NAME = {(run.system, run.name): run for run in RUNS}
REQUIRED_MINUTES = {  # the runs that the page must have: published minutes by system
    "imagenet18, V100": (109.2, 54.0, 29.71, 18.88, 18.09),
    "Kempner, A100": (553.6, 285.07, 148.57, 79.42, 44.0),
    "FFCV, A100": (14.87, 21.7, 28.76, 35.58, 49.4, 77.24),
    "MLPerf, H100": (13.27, 2.505), "MLPerf, L40S": (50.59, 7.149),
    "Goyal et al., P100": (60.0,), "Alibaba, V100": (2.63,),
}  # fmt: skip


def run_id(run: PublishedRun) -> str:
    return f"{run.system}, {run.name}"


@pytest.mark.parametrize("run", [run for run in RUNS if not run.is_fitted], ids=run_id)
def test_forecast_of_predicted_run_is_within_bound_or_known_miss(run: PublishedRun) -> None:
    known_error = KNOWN_MISSES.get((run.system, run.name))
    if known_error is None:
        assert abs(run.error) <= MAX_ERROR
    else:
        assert abs(run.error) > MAX_ERROR and run.error == pytest.approx(known_error, abs=0.005)


@pytest.mark.parametrize("run", [run for run in RUNS if run.is_fitted], ids=run_id)
def test_forecast_of_fitted_run_is_within_two_percent(run: PublishedRun) -> None:
    assert abs(run.error) < 0.02


@pytest.mark.parametrize("system", REQUIRED_MINUTES)
def test_published_runs_contain_all_required_runs(system: str) -> None:
    minutes_of_system = [run.minutes for run in RUNS if run.system == system]
    for minutes in REQUIRED_MINUTES[system]:
        assert any(minutes == pytest.approx(published, abs=0.01) for published in minutes_of_system)


def test_published_runs_name_their_source_and_are_mostly_predicted() -> None:
    for run in RUNS:
        assert run.source and run.constants_from
    for system in REQUIRED_MINUTES:
        fitted = [run.name for run in RUNS if run.system == system and run.is_fitted]
        assert len({name.split(",")[0] for name in fitted}) == (2 if system == "MLPerf, H100" else 1), fitted


@pytest.mark.parametrize(
    ("system", "name", "change", "percent"),
    [
        ("imagenet18, V100", "1 machine, 28 epochs", {"bus_gbit": 1000.0}, -13.5),
        ("imagenet18, V100", "1 machine, 28 epochs", {"vcpu_images_per_second": 1e6}, -7.3),
        (
            "MLPerf, H100",
            "64 H100, 35 epochs",
            {"optimizer_seconds": 0.0, "images_per_second": 35 * 1_281_167 / (13.27 * 480)},
            -33.5,
        ),
        (
            "MLPerf, L40S",
            "64 L40S, 35 epochs",
            {"optimizer_seconds": 0.0, "images_per_second": 35 * 1_281_167 / (50.59 * 480)},
            -10.7,
        ),
    ],
)
def test_notes_quote_the_errors_with_other_constants(
    system: str, name: str, change: dict[str, Any], percent: float
) -> None:
    run = RUN_BY_NAME[system, name]
    error = 100 * replace(run, constants=replace(run.constants, **change)).error
    tolerance = 0.1
    if "vcpu_images_per_second" in change:  # the loader is also a part of the validation's time
        tolerance += 100 * run.forecast.term_seconds["validation"] / 60 / run.minutes
    assert error == pytest.approx(percent, abs=tolerance) and f"({percent} %)" in run.note


def test_forecast_of_one_machine_in_2018_waits_for_loader_at_128_pixels() -> None:
    phases = RUN_BY_NAME["imagenet18, V100", "1 machine, 28 epochs"].forecast.phase_rows()
    assert [phase.terms["loader"] > 0 for phase in phases] == [True, True, False, False, False]
    images_per_second_of_machine = 64 * (IMAGENET18_CONSTANTS.vcpu_images_per_second or 0)
    assert images_per_second_of_machine == pytest.approx(11_400, rel=0.01)  # from issue 6


def test_forecast_on_v100_our_trainer_has_less_overhead() -> None:
    theirs, ours = forecast_on_v100(16, 38, IMAGENET18_CONSTANTS), forecast_on_v100(16, 38, DEFAULT_CONSTANTS)
    assert ours.term_seconds["compute"] == theirs.term_seconds["compute"]
    for term in ("logging", "fixed", "validation"):
        assert ours.term_seconds[term] < theirs.term_seconds[term]
    assert ours.total_seconds < theirs.total_seconds


def test_render_page_equals_docs_forecast() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "forecast.md"
    assert page.read_text() == render_page(), "python docs/tools/forecast_page.py docs/forecast.md"
