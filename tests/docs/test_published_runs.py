"""Tests of the forecast against published runs, and of docs/forecast.md."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forecast_page import render_page
from published_runs import IMAGENET18_CONSTANTS, MAX_ERROR, PublishedRun, published_runs

from recipes.resnet50_18min import recipe as resnet50

RUNS = published_runs(dict(resnet50.tables))
RUN_BY_NAME = {(run.system, run.name): run for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.system}, {run.name}")
def test_forecast_is_near_the_published_time_and_nearer_where_fitted(run: PublishedRun) -> None:
    assert abs(run.error) <= (0.02 if run.is_fitted else MAX_ERROR)


def mlperf_speed(minutes: float) -> dict[str, float]:
    return {"optimizer_seconds": 0.0, "images_per_second": 35 * 1_281_167 / (minutes * 480)}


@pytest.mark.parametrize(
    ("system", "name", "change", "percent"),
    [
        (
            "imagenet18, V100",
            "1 machine, 28 epochs",
            {"optimizer_seconds": IMAGENET18_CONSTANTS.optimizer_seconds},
            -13.5,
        ),
        ("imagenet18, V100", "1 machine, 28 epochs", {"loader_speeds": ()}, -5.5),
        ("MLPerf, H100", "64 H100, 35 epochs", mlperf_speed(13.27), -33.5),
        ("MLPerf, L40S", "64 L40S, 35 epochs", mlperf_speed(50.59), -10.7),
    ],
)
def test_notes_quote_the_errors_with_other_constants(
    system: str, name: str, change: dict[str, Any], percent: float
) -> None:
    run = RUN_BY_NAME[system, name]
    error = 100 * replace(run, constants=replace(run.constants, **change)).error
    assert error == pytest.approx(percent, abs=0.1) and f"({percent} %)" in run.note


def test_render_page_equals_docs_forecast() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "forecast.md"
    assert page.read_text() == render_page(), "python docs/tools/forecast_page.py docs/forecast.md"
