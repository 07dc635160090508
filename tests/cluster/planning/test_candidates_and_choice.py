"""Candidates for a launch, the choice among them, their plot, and constants measured by jobs."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image
from support.train_records import make_epoch, make_result

from cluster.backends import machine_types
from cluster.errors import BadInput, ClusterError
from cluster.planning import calibration, candidates, choose
from cluster.planning.candidates import Candidate
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes, plan
from cluster.plots import forecast as plots_forecast
from cluster.plots import palette as plots_forecast_palette
from cluster.state import result as state_result
from cluster.state.job_result import JobResult
from cluster.state.result import write_result
from cluster.state.states import JobState
from infra.aws.market.instance_types import BUILTIN_TYPES, HISTORIC_TYPES, ON_DEMAND_PRICES, RETIREMENT_REASONS
from train.forecast import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, Constants, ForecastRecord, forecast
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule
from train.tools.records import encode

Fixture = Any
RECIPE = str(Path(__file__).resolve().parents[3] / "recipes/resnet50_18min.py")
(LARGE,) = load_recipes(RECIPE)
P3 = machine_types.MachineType("p3.16xlarge", 8, "V100", 25.0, 64, 24.48, "gone")
A100_TYPE = "p4d.24xlarge"


@pytest.fixture(autouse=True)
def isolated_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def make_rows(
    *counts: int,
    types: tuple[str, ...] = (A100_TYPE,),
    constants: Constants = DEFAULT_CONSTANTS,
    epochs: int | None = None,
) -> list[Candidate]:
    def make(count: int, procs: int) -> Any:
        return plan(
            candidates.truncate_recipe(LARGE, count, epochs),
            make_launch_options(backend="plan", machines=count, procs=procs),
        )

    return candidates.make_candidates(make, [candidates.get_machine_type(name) for name in types], counts, constants)


def fake_candidate(
    machines: int, minutes: float | None, price: float | None = 10.0, name: str = "a.large", gone: str = ""
) -> Candidate:
    """A candidate with this forecast (None: no forecast) and price per machine and hour."""
    (row,) = make_rows(machines)
    invented_forecast = None
    if minutes is not None:
        assert row.forecast
        invented_forecast = replace(row.forecast, epochs=(), startup_seconds={"boot": 60 * minutes})
    machine_type = replace(row.machine_type, name=name, on_demand_price=price, retired_reason=gone)
    return replace(row, machine_type=machine_type, forecast=invented_forecast)


# --- candidates ------------------------------------------------------------------------------------------------------


def test_candidate_uses_the_builtin_hardware_and_price() -> None:
    (row,) = make_rows(8)
    builtin = BUILTIN_TYPES[A100_TYPE]
    expected = forecast(
        row.plan.recipe_schedule, gpus=8, gpu=builtin.gpu, gbit=builtin.network_gbps, machines=8, vcpus=builtin.vcpus
    )
    assert expected and row.minutes == expected.total_minutes and row.plan.spec.schedule_gpus == 64
    assert row.dollars(row.minutes) == pytest.approx(8 * ON_DEMAND_PRICES[A100_TYPE] * expected.total_minutes / 60)


def test_candidate_target_is_the_sources_target_epoch() -> None:
    by_count = make_rows(1, 2, 4, 8, 16)
    assert [row.epochs_to_target for row in by_count] == [28, 30, 29, 30, 38]
    for row in by_count:
        assert row.forecast and row.minutes_to_target == pytest.approx(
            row.forecast.seconds_until(row.epochs_to_target) / 60
        )
    assert by_count[3].minutes_to_target and by_count[3].minutes
    assert by_count[3].minutes_to_target < by_count[3].minutes
    (short,) = make_rows(8, epochs=20)
    assert short.epochs_to_target is None and short.minutes_to_target == pytest.approx(short.minutes)


def test_truncate_recipe_takes_the_machine_counts_table() -> None:
    truncated = candidates.truncate_recipe(LARGE, 8, 30)
    assert (
        truncated.epochs == 30
        and truncated.phases[-1].epochs == (29, 30)
        and truncated.phases[:-1] == LARGE.tables[8][:-1]
    )
    assert candidates.truncate_recipe(LARGE, 8, None) is LARGE
    with pytest.raises(BadInput, match="--epochs 37: resnet50_18min has 36 epochs on 8 machines"):
        candidates.truncate_recipe(LARGE, 8, 37)


def test_candidate_of_unknown_price_has_no_dollars() -> None:
    (row,) = make_rows(8, types=("p5e.48xlarge",))
    assert row.minutes and row.dollars(row.minutes) is None
    json_forecast = cast("dict[str, Any]", row.to_json()["forecast"])
    assert json_forecast["dollars"] == {"on_demand": None, "spot": None} and json_forecast["target"]["dollars"] is None


def test_candidate_on_an_unmeasured_gpu_has_no_forecast() -> None:
    eight, sixteen = make_rows(8, 16, types=("p6-b200.48xlarge",))
    assert eight.forecast is sixteen.forecast is eight.minutes is None
    assert eight.minutes_to_target is eight.scaling_efficiency is None
    assert eight.to_json()["forecast"] is None and eight.dollars(eight.minutes) is None


def test_get_machine_type_retired_and_unknown_types() -> None:
    v100 = candidates.get_machine_type("p3.16xlarge")
    assert (v100.gpus, v100.gpu, v100.network_gbps, v100.vcpus, v100.on_demand_price) == (8, "V100", 25.0, 64, 24.48)
    assert v100.retired_reason == RETIREMENT_REASONS["p3.16xlarge"] and not HISTORIC_TYPES.keys() & BUILTIN_TYPES.keys()
    first = candidates.first_rentable_type(LARGE.types)
    assert first and first.name == A100_TYPE and candidates.first_rentable_type(("p3.16xlarge",)) is None
    with pytest.raises(BadInput, match=r"q9\.large: unknown machine type"):
        candidates.get_machine_type("q9.large")


def test_imagenet18_constants_reproduce_the_18_minutes() -> None:
    rows = make_rows(8, 16, types=("p3.16xlarge",), constants=IMAGENET18_CONSTANTS)
    assert [row.minutes_to_target for row in rows] == [pytest.approx(18.88, rel=0.1), pytest.approx(18.09, rel=0.1)]


# --- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "sentence"),
    [
        ([100, 52, 28, 26.9, 26], "4 machines: doubling to 8 saves only 4 % of the time"),
        ([100, 52, 28, 15, 8], "worth it up to 16 machines at least: the last 8 save 47 % of the time"),
        ([100, 99], "1 machine: doubling to 2 saves only 1 % of the time"),
        ([100, 120], "1 machine: doubling to 2 takes longer"),
        ([100], ""),
    ],
)
def test_diminishing_returns_of_doublings(minutes: list[float], sentence: str) -> None:
    by_count = [fake_candidate(2**exponent, value) for exponent, value in enumerate(minutes)]
    assert choose.diminishing_returns(list(reversed(by_count))) == sentence


def test_diminishing_returns_of_other_counts() -> None:
    assert (
        choose.diminishing_returns([fake_candidate(4, 30), fake_candidate(6, 29)])
        == "4 machines: 2 more save only 3 % of the time"
    )
    assert choose.diminishing_returns([fake_candidate(1, None), fake_candidate(2, None)]) == ""


@pytest.mark.parametrize(("text", "budget"), [
    ("30min", ("minutes", 30)), ("1.5h", ("minutes", 90)), ("40$", ("dollars", 40)), ("$40", ("dollars", 40)),
])  # fmt: skip
def test_parse_budget_accepts_a_time_or_a_price(text: str, budget: tuple[str, float]) -> None:
    assert choose.parse_budget(text) == budget


@pytest.mark.parametrize("text", ["30", "min", "-3min", "0min", "$40$", "forty$", "30s", "", "nanmin", "$4h"])
def test_parse_budget_refuses_anything_else(text: str) -> None:
    with pytest.raises(BadInput, match="such as 30min, 2h or 40"):
        choose.parse_budget(text)


def test_choose_by_time_or_price() -> None:
    cheap, fast, middle = (
        fake_candidate(1, 100),
        fake_candidate(8, 20),
        fake_candidate(4, 28),
    )  # 16.7, 26.7, 18.7 dollars
    unpriced, retired, unforecast = (
        fake_candidate(16, 10, price=None),
        fake_candidate(8, 5, gone="AWS stopped"),
        fake_candidate(2, None),
    )
    rows = [cheap, fast, middle, unpriced, retired, unforecast]
    assert choose.choose(rows, "cheapest") is cheap and choose.choose(rows, "fastest") is unpriced
    assert choose.choose(rows, "within", ("minutes", 30.0)) is middle
    assert choose.choose(rows, "within", ("dollars", 20.0)) is middle
    with pytest.raises(ClusterError, match="no row is within 1 minutes; the least is 10"):
        choose.choose(rows, "within", ("minutes", 1.0))
    with pytest.raises(ClusterError, match=r"no row is within 1 dollars; the least is 16\.7"):
        choose.choose(rows, "within", ("dollars", 1.0))
    with pytest.raises(ClusterError, match="no row has a known price"):
        choose.choose([unpriced], "cheapest")
    with pytest.raises(ClusterError, match="can be rented"):
        choose.choose([retired, unforecast], "fastest")


def test_launch_command_repeats_the_options_of_plan() -> None:
    options = {"data": "my images", "keep_batch": True, "seed": 0, "scale": 0.5, "only": ("a", "b"), "procs": None}
    argv = shlex.split(choose.launch_command(fake_candidate(8, 1.0), "x.py", options))
    assert argv == [
        *("imgnet-cluster", "launch", "--machines", "8", "--type", "a.large", "--data", "my images", "--keep-batch"),
        *("--seed", "0", "--scale", "0.5", "--only", "a", "--only", "b", "x.py"),
    ]


# --- plot ------------------------------------------------------------------------------------------------------------


def image_colors(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size == (plots_forecast.WIDTH, plots_forecast.HEIGHT)
        return {color for _, color in image.convert("RGB").getcolors(1 << 24)}  # type: ignore[union-attr, misc]


def test_draw_forecast_draws_a_line_per_type(tmp_path: Path) -> None:
    lines = {"a": [(1, 30.0), (2, 16.0)], "b": [(1, 20.0), (2, 11.0)]}
    plots_forecast.draw_forecast(tmp_path / "x.png", "title", lines, {**lines, "b": []})
    drawn = image_colors(tmp_path / "x.png")
    for color in plots_forecast_palette.SERIES_COLORS[:2]:
        assert tuple(bytes.fromhex(color[1:])) in drawn
    assert tuple(bytes.fromhex(plots_forecast_palette.SERIES_COLORS[2][1:])) not in drawn
    plots_forecast.draw_forecast(tmp_path / "y.png", "one point, no price", {"a": [(1, 30.0)]}, {"a": []})
    assert image_colors(tmp_path / "y.png")


def test_draw_forecast_refuses_another_suffix_than_png(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in \.png"):
        plots_forecast.draw_forecast(tmp_path / "x.jpg", "t", {"a": [(1, 1.0)]}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("most", [0.03, 1.0, 59.0, 228.0])
def test_forecast_figure_ticks_are_few_and_start_at_zero(most: float) -> None:
    lines = {"a": [(1, most), (2, most / 2), (16, most / 9)]}
    for axes in plots_forecast.forecast_figure("title", lines, lines).axes:
        low, high = axes.get_ylim()
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert ticks[0] == 0 and 0.7 * most <= ticks[-1] and 3 <= len(ticks) <= 7 and high > most
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "16"]


def test_forecast_figure_numbers_are_those_of_the_outer_lines() -> None:
    minutes = {"slow": [(1, 30.0)], "middle": [(1, 20.0)], "fast": [(1, 10.0)]}
    upper_axes, lower_axes = plots_forecast.forecast_figure("title", minutes, {name: [] for name in minutes}).axes
    assert sorted(text.get_text() for text in upper_axes.texts) == ["10", "30"] and not lower_axes.texts
    assert lower_axes.get_title("left") == "dollars, on demand: no price is known"
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (upper_axes, lower_axes)]  # type: ignore[union-attr]
    assert names == [["slow", "middle", "fast"], [f"{name} (unknown price)" for name in minutes]]


# --- measured constants ----------------------------------------------------------------------------------------------


def test_plan_local_has_a_forecast_by_measured_speeds_only() -> None:
    (quickstart,) = load_recipes(str(Path(RECIPE).with_name("quickstart.py")))
    unmeasured = plan(quickstart, make_launch_options(procs=1)).spec.forecast
    assert unmeasured is None, "a forecast by the speed of another computer would only mislead"
    assert plan(quickstart, make_launch_options(backend="plan")).spec.forecast is None
    batch_timings = ((64, 32, 1.0), (64, 64, 2.0), (96, 64, 4.0))
    measured = plan(
        quickstart, make_launch_options(procs=1), constants=Constants(source="job-3", batch_timings=batch_timings)
    ).spec.forecast
    assert measured and measured.source == "job-3"
    assert measured.terms["compute"] == pytest.approx(2 * 4000 / 32 + 4 * 4000 / 64 * 2 + 3 * 4000 / 64 * 4)


DONE: dict[str, Any] = encode(
    make_result(
        make_epoch(train_seconds=1.5, val_seconds=0.5, val_images=20, top1=50.0, top5=90.0),
        images_per_second=60.0,
        schedule=tuple(
            Schedule(
                Recipe(
                    name="tiny",
                    data=Data(name="d", root="d", train=60, val=20),
                    model=Model(name="resnet18"),
                    gpus=1,
                    phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)],
                ),
                60,
                1,
            ).table()
        ),
        seconds={"attempt": 5.0, "training": 1.5, "validation": 0.5, "first step to last without losses": 2.5},
    )
)


RESULT_ON_CPU = JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1, device="cpu")


def test_write_result_adds_constants_and_forecast_errors(hand_made: Fixture) -> None:
    planned = {"terms": {"compute": 3.0, "start": 1.0}, "minutes": 1 / 15, "phases": [], "source": "presets"}
    run = hand_made(forecast=planned)
    run.write_shared("result.json", json.dumps(DONE))
    write_result(run.job.run, run.job.backend)
    result = run.job.result
    assert encode(result.forecast) == {**planned, "start": {}}
    assert {row.term: row.error for row in result.against}["steps"] == 1.0
    constants = calibration.measured_constants("job-1", result)
    assert constants.batch_timings == ((32, 8, pytest.approx(0.2)),) and constants == result.constants


def test_write_result_of_a_failed_job_has_no_constants(hand_made: Fixture) -> None:
    run = hand_made(forecast=ForecastRecord(minutes=1.0, terms={}))
    write_result(run.job.run, run.job.backend, end_reason="it fell", end_state=JobState.FAILED)
    result = run.job.result
    assert result.state == "failed" and (result.forecast, result.against, result.constants) == (None, None, None)
    empty_result = JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1)
    assert state_result.with_forecast(empty_result, ForecastRecord(minutes=1.0, terms={})) == empty_result
    for useless_result in (None, result, empty_result):
        with pytest.raises(BadInput, match="--from job-1"):
            calibration.measured_constants("job-1", useless_result)


def test_constants_for_type_with_the_same_or_another_gpu() -> None:
    own = Constants(source="job-3", batch_timings=((224, 64, 1.0),), epoch_seconds=((0, 3.0),), startup_seconds=9.0)
    a100, h100, own_machine = (
        candidates.get_machine_type(A100_TYPE),
        candidates.get_machine_type("p5.48xlarge"),
        replace(P3, gpu="", on_demand_price=0.0),
    )
    assert calibration.constants_for_type(own, a100, a100) == (own, "") and calibration.constants_for_type(
        own, own_machine, own_machine
    ) == (own, "")
    rented, note = calibration.constants_for_type(own, own_machine, h100)
    assert (rented.boot_seconds, rented.setup_seconds, rented.fetch_bytes_per_second) == (
        DEFAULT_CONSTANTS.boot_seconds,
        DEFAULT_CONSTANTS.setup_seconds,
        DEFAULT_CONSTANTS.fetch_bytes_per_second,
    ) and "assumed to be as fast" in note
    assert (rented.batch_timings, rented.startup_seconds) == (own.batch_timings, own.startup_seconds)
    preset, note = calibration.constants_for_type(own, a100, h100)
    assert preset.batch_timings == () and (preset.epoch_seconds, preset.startup_seconds) == (
        own.epoch_seconds,
        own.startup_seconds,
    )
    assert note == "job-3 ran on A100: the speed of H100 is the preset's"


def test_constants_for_type_between_cpus_and_gpus() -> None:
    own = Constants(source="job-3", batch_timings=((224, 64, 1.0),), startup_seconds=9.0)
    cpu, gpu = replace(P3, gpu="CPU", on_demand_price=0.0), candidates.get_machine_type(A100_TYPE)
    assert calibration.constants_for_type(own, cpu, gpu) == (
        DEFAULT_CONSTANTS,
        f"job-3 ran on CPUs, which does not tell the speed of A100: all constants of {A100_TYPE} are presets",
    )
    assert calibration.constants_for_type(own, gpu, cpu)[0] == DEFAULT_CONSTANTS
    small = replace(cpu, name="c7i.2xlarge", on_demand_price=0.4)
    adapted, note = calibration.constants_for_type(own, cpu, small)
    assert (
        adapted
        == replace(
            own,
            boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
            setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
            fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
        )
        and "assumed to be as fast" in note
    )


def test_job_machine_type_of_rented_and_own_machines(hand_made: Fixture) -> None:
    run = hand_made(procs=2)
    assert calibration.job_machine_type(run.spec, RESULT_ON_CPU).gpu == "CPU"
    local = calibration.job_machine_type(run.spec, None)
    assert (local.name, local.gpus, local.gpu, local.on_demand_price) == (f"as {run.spec.name}'s", 2, "", 0.0)
    rented = replace(run.spec, cloud={"places": [{"type": "p5.48xlarge"}, {"type": A100_TYPE}]})
    assert calibration.job_machine_type(
        rented, replace(RESULT_ON_CPU, device="cuda"), A100_TYPE
    ) == candidates.get_machine_type(A100_TYPE), "not the type that was tried first"
