"""Tests of the forecast against published runs, and of docs/forecast.md."""

from pathlib import Path

import pytest
from forecast_page import render_page
from published_runs import MAX_ERROR, PublishedRun, published_runs

from recipes.resnet50_18min import recipe as resnet50

RUNS = published_runs(dict(resnet50.tables))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.system}, {run.name}")
def test_forecast_is_near_the_published_time_and_nearer_where_fitted(run: PublishedRun) -> None:
    assert abs(run.error) <= (0.02 if run.is_fitted else MAX_ERROR)


def test_render_page_equals_docs_forecast() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "forecast.md"
    assert page.read_text() == render_page(), "python docs/tools/forecast_page.py docs/forecast.md"
