"""Published runs beside the forecast (facts/training.md, facts/seeds.md), and the page that shows them."""

from dataclasses import replace
from pathlib import Path

import pytest
from forecast_page import KNOWN_MISSES, render_page
from published_runs import MAX_ERROR, PublishedRun, published_runs

from recipes.resnet50_18min import recipe as resnet50
from train.forecast import IMAGENET18_CONSTANTS

RUNS = published_runs(dict(resnet50.tables))
BY_NAME = {(one.system, one.name): one for one in RUNS}
ASKED = {  # by issue 6: system, and what must be among its runs
    "imagenet18, V100": (109.2, 54.0, 29.71, 18.88, 18.09),
    "Kempner, A100": (553.6, 285.07, 148.57, 79.42, 44.0),
    "FFCV, A100": (14.87, 21.7, 28.76, 35.58, 49.4, 77.24),
    "MLPerf, H100": (13.27, 2.505), "MLPerf, L40S": (50.59, 7.149),
    "Goyal et al., P100": (60.0,), "Alibaba, V100": (2.63,),
}  # fmt: skip


@pytest.mark.parametrize("one", [one for one in RUNS if not one.is_fitted], ids=lambda one: f"{one.system}, {one.name}")
def test_a_predicted_run_is_within_the_bound_or_a_known_miss(one: PublishedRun) -> None:
    known = KNOWN_MISSES.get((one.system, one.name))
    if known is None:
        assert abs(one.error) <= MAX_ERROR
    else:
        assert abs(one.error) > MAX_ERROR and one.error == pytest.approx(known, abs=0.005)


@pytest.mark.parametrize("one", [one for one in RUNS if one.is_fitted], ids=lambda one: f"{one.system}, {one.name}")
def test_a_run_that_constants_come_from_is_met(one: PublishedRun) -> None:
    assert abs(one.error) < 0.02


@pytest.mark.parametrize("system", ASKED)
def test_every_run_that_was_asked_for_is_there(system: str) -> None:
    mine = [one.minutes for one in RUNS if one.system == system]
    assert all(any(minutes == pytest.approx(one, abs=0.01) for one in mine) for minutes in ASKED[system])


def test_no_run_is_predicted_from_itself_and_every_one_says_whence_it_is() -> None:
    for one in RUNS:
        assert one.source and one.constants_from
    for system in ASKED:
        fitted = [one.name for one in RUNS if one.system == system and one.is_fitted]
        assert len({name.split(",")[0] for name in fitted}) == (2 if system == "MLPerf, H100" else 1), fitted


@pytest.mark.parametrize(("system", "name", "change", "percent"), [
    ("imagenet18, V100", "1 machine, 28 epochs", {"bus_gbit": 1000.0}, -13.5),
    ("imagenet18, V100", "1 machine, 28 epochs", {"vcpu_images_per_second": 1e6}, -7.3),
    ("MLPerf, H100", "64 H100, 35 epochs", {"optimizer_seconds": 0.0, "images_per_second": 35 * 1_281_167 / (13.27 * 480)}, -33.5),
    ("MLPerf, L40S", "64 L40S, 35 epochs", {"optimizer_seconds": 0.0, "images_per_second": 35 * 1_281_167 / (50.59 * 480)}, -10.7),
])  # fmt: skip
def test_what_the_notes_say_of_other_readings_is_so(
    system: str, name: str, change: dict[str, float], percent: float
) -> None:
    one = BY_NAME[system, name]
    error = 100 * replace(one, constants=replace(one.constants, **change)).error
    validation = 100 * one.forecast.term_seconds["validation"] / 60 / one.minutes if "vcpu_images_per_second" in change else 0.0
    assert error == pytest.approx(percent, abs=0.1 + validation) and f"({percent} %)" in one.note


def test_the_loader_is_what_one_machine_of_2018_waits_for_at_128_pixels() -> None:
    phases = BY_NAME["imagenet18, V100", "1 machine, 28 epochs"].forecast.phase_rows()
    assert [one["terms"]["loader"] > 0 for one in phases] == [True, True, False, False, False]
    assert 64 * (IMAGENET18_CONSTANTS.vcpu_images_per_second or 0) == pytest.approx(
        11_400, rel=0.01
    )  # images a second of a machine: issue 6


def test_our_loop_takes_the_same_compute_and_less_of_all_that_does_not_train() -> None:
    from forecast_page import DEFAULT_CONSTANTS, forecast_on_v100

    theirs, ours = forecast_on_v100(16, 38, IMAGENET18_CONSTANTS), forecast_on_v100(16, 38, DEFAULT_CONSTANTS)
    assert ours.term_seconds["compute"] == theirs.term_seconds["compute"]
    assert all(ours.term_seconds[name] < theirs.term_seconds[name] for name in ("logging", "fixed", "validation"))
    assert ours.total_seconds < theirs.total_seconds


def test_the_page_in_docs_is_what_the_code_says() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "forecast.md"
    assert page.read_text() == render_page(), "python docs/tools/forecast_page.py docs/forecast.md"
