"""Minutes and dollars of a recipe on machines to choose from, and what a job says of its forecast."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cluster.backends import machine_types, registry
from cluster.errors import BadInput, ClusterError
from cluster.planning import calibration, candidates, choose
from cluster.planning.candidates import Candidate
from cluster.planning.resolve import load_recipes, plan
from cluster.plots import forecast as plots_forecast
from cluster.plots import palette as plots_forecast_palette
from cluster.state import result as state_result
from cluster.state.result import write_result
from infra.aws.market.instance_types import BUILTIN_TYPES, HISTORIC_TYPES, ON_DEMAND_PRICES, RETIREMENT_REASONS
from train.forecast import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, Constants, forecast

Fixture = Any
RECIPE = str(Path(__file__).resolve().parents[3] / "recipes/resnet50_18min.py")
(LARGE,) = load_recipes(RECIPE)
P3 = machine_types.MachineType("p3.16xlarge", 8, "V100", 25.0, 64, 24.48, "gone")
FREE = "p4d.24xlarge"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def rows(
    *counts: int, kinds: tuple[str, ...] = (FREE,), constants: Constants = DEFAULT_CONSTANTS, epochs: int | None = None
) -> list[Candidate]:
    def make(count: int, procs: int) -> Any:
        return plan(candidates.truncate_recipe(LARGE, count, epochs), backend="plan", machines=count, procs=procs)

    return candidates.make_candidates(make, [candidates.get_machine_type(name) for name in kinds], counts, constants)


def fake(
    machines: int, minutes: float | None, price: float | None = 10.0, name: str = "a.large", gone: str = ""
) -> Candidate:
    """A row of so many minutes on machines of that price."""
    (row,) = rows(machines)
    told = None
    if minutes is not None:
        assert row.forecast
        told = replace(row.forecast, epochs=(), startup_seconds={"boot": 60 * minutes})
    kind = replace(row.machine_type, name=name, on_demand_price=price, retired_reason=gone)
    return replace(row, machine_type=kind, forecast=told)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_is_the_forecast_on_the_shipped_machine_at_its_shipped_price() -> None:
    (row,) = rows(8)
    kind = BUILTIN_TYPES[FREE]
    told = forecast(row.plan.schedule, gpus=8, gpu=kind.gpu, gbit=kind.network_gbps, machines=8, vcpus=kind.vcpus)
    assert told and row.minutes == told.total_minutes and row.plan.spec.schedule_gpus == 64
    assert row.dollars(row.minutes) == pytest.approx(8 * ON_DEMAND_PRICES[FREE] * told.total_minutes / 60)


def test_the_target_is_the_epoch_at_which_the_source_reached_it() -> None:
    found = rows(1, 2, 4, 8, 16)
    assert [row.epochs_to_target for row in found] == [28, 30, 29, 30, 38]
    for row in found:
        assert row.forecast and row.minutes_to_target == pytest.approx(
            row.forecast.seconds_until(row.epochs_to_target) / 60
        )
    assert found[3].minutes_to_target and found[3].minutes and found[3].minutes_to_target < found[3].minutes
    (short,) = rows(8, epochs=20)
    assert short.epochs_to_target is None and short.minutes_to_target == pytest.approx(short.minutes)


def test_the_first_epochs_are_those_of_the_table_for_so_many_machines() -> None:
    one = candidates.truncate_recipe(LARGE, 8, 30)
    assert one.epochs == 30 and one.phases[-1].epochs == (29, 30) and one.phases[:-1] == LARGE.tables[8][:-1]
    assert candidates.truncate_recipe(LARGE, 8, None) is LARGE
    with pytest.raises(BadInput, match="--epochs 37: resnet50_18min has 36 on 8 machines"):
        candidates.truncate_recipe(LARGE, 8, 37)


def test_a_price_that_is_not_known_is_not_guessed() -> None:
    (row,) = rows(8, kinds=("p5e.48xlarge",))
    assert row.minutes and row.dollars(row.minutes) is None
    told = row.to_json()["forecast"]
    assert told["dollars"] == {"on_demand": None, "spot": None} and told["target"]["dollars"] is None


def test_a_card_that_nobody_has_measured_has_no_forecast() -> None:
    one, two = rows(8, 16, kinds=("p6-b200.48xlarge",))
    assert one.forecast is two.forecast is one.minutes is one.minutes_to_target is one.scaling_efficiency is None
    assert one.to_json()["forecast"] is None and one.dollars(one.minutes) is None


def test_a_machine_of_2018_is_for_comparison_and_one_that_never_was_is_refused() -> None:
    kind = candidates.get_machine_type("p3.16xlarge")
    assert (kind.gpus, kind.gpu, kind.network_gbps, kind.vcpus, kind.on_demand_price) == (8, "V100", 25.0, 64, 24.48)
    assert kind.retired_reason == RETIREMENT_REASONS["p3.16xlarge"] and not HISTORIC_TYPES.keys() & BUILTIN_TYPES.keys()
    first = candidates.first_rentable_type(LARGE.types)
    assert first and first.name == FREE and candidates.first_rentable_type(("p3.16xlarge",)) is None
    with pytest.raises(BadInput, match=r"q9\.large: is not in the shipped table"):
        candidates.get_machine_type("q9.large")


def test_the_18_minutes_with_the_constants_of_2018() -> None:
    found = rows(8, 16, kinds=("p3.16xlarge",), constants=IMAGENET18_CONSTANTS)
    assert [row.minutes_to_target for row in found] == [pytest.approx(18.88, rel=0.1), pytest.approx(18.09, rel=0.1)]


# --- which to take --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "said"), [
    ([100, 52, 28, 26.9, 26], "4 machines: a second four buy 4 %"),
    ([100, 52, 28, 15, 8], "no knee up to 16 machines: the last 8 buy 47 %"),
    ([100, 99], "1 machine: a second one buys 1 %"), ([100, 120], "1 machine: a second one takes longer"), ([100], ""),
])  # fmt: skip
def test_the_knee_is_where_a_doubling_stops_being_worth_it(minutes: list[float], said: str) -> None:
    found = [fake(2**place, one) for place, one in enumerate(minutes)]
    assert choose.diminishing_returns(list(reversed(found))) == said


def test_a_knee_between_numbers_that_are_no_doubling_is_counted() -> None:
    assert choose.diminishing_returns([fake(4, 30), fake(6, 29)]) == "4 machines: 2 more buy 3 %"
    assert choose.diminishing_returns([fake(1, None), fake(2, None)]) == ""


@pytest.mark.parametrize(("text", "found"), [
    ("30min", ("minutes", 30)), ("1.5h", ("minutes", 90)), ("40$", ("dollars", 40)), ("$40", ("dollars", 40)),
])  # fmt: skip
def test_a_limit_is_a_time_or_a_price(text: str, found: tuple[str, float]) -> None:
    assert choose.parse_budget(text) == found


@pytest.mark.parametrize("text", ["30", "min", "-3min", "0min", "$40$", "forty$", "30s", "", "nanmin", "$4h"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="such as 30min, 2h or 40"):
        choose.parse_budget(text)


def test_a_row_is_chosen_by_time_or_price() -> None:
    cheap, fast, middle = fake(1, 100), fake(8, 20), fake(4, 28)  # 16.7, 26.7, 18.7 dollars
    unknown, gone, none = fake(16, 10, price=None), fake(8, 5, gone="AWS stopped"), fake(2, None)
    found = [cheap, fast, middle, unknown, gone, none]
    assert choose.choose(found, "cheapest") is cheap and choose.choose(found, "fastest") is unknown
    assert choose.choose(found, "within", ("minutes", 30.0)) is middle
    assert choose.choose(found, "within", ("dollars", 20.0)) is middle
    with pytest.raises(ClusterError, match="no row is within 1 minutes; the least is 10"):
        choose.choose(found, "within", ("minutes", 1.0))
    with pytest.raises(ClusterError, match=r"no row is within 1 dollars; the least is 16\.7"):
        choose.choose(found, "within", ("dollars", 1.0))
    with pytest.raises(ClusterError, match="no row has a known price"):
        choose.choose([unknown], "cheapest")
    with pytest.raises(ClusterError, match="can be rented"):
        choose.choose([gone, none], "fastest")


def test_the_command_that_launches_a_row_has_what_plan_was_asked_with() -> None:
    options = {"data": "my images", "keep_batch": True, "seed": 0, "scale": 0.5, "only": ("a", "b"), "procs": None}
    words = shlex.split(choose.launch_command(fake(8, 1.0), "x.py", options))
    assert words == [
        *("imgnet-cluster", "launch", "--machines", "8", "--type", "a.large", "--data", "my images", "--keep-batch"),
        *("--seed", "0", "--scale", "0.5", "--only", "a", "--only", "b", "x.py"),
    ]


# --- the picture ----------------------------------------------------------------------------------------------------


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size == (plots_forecast.WIDTH, plots_forecast.HEIGHT)
        return {one for _, one in image.getcolors(1 << 24)}  # type: ignore[union-attr, misc]


def test_a_picture_has_a_line_for_each_type(tmp_path: Path) -> None:
    lines = {"a": [(1, 30.0), (2, 16.0)], "b": [(1, 20.0), (2, 11.0)]}
    plots_forecast.draw_forecast(tmp_path / "x.png", "title", lines, {**lines, "b": []})
    drawn = colours(tmp_path / "x.png")
    for name in plots_forecast_palette.SERIES_COLOURS[:2]:
        assert tuple(bytes.fromhex(name[1:])) in drawn
    assert tuple(bytes.fromhex(plots_forecast_palette.SERIES_COLOURS[2][1:])) not in drawn
    plots_forecast.draw_forecast(tmp_path / "y.png", "one point, no price", {"a": [(1, 30.0)]}, {"a": []})
    assert colours(tmp_path / "y.png")


def test_a_picture_that_is_no_png_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in \.png"):
        plots_forecast.draw_forecast(tmp_path / "x.jpg", "t", {"a": [(1, 1.0)]}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("most", "values"), [
    (59, [0, 20, 40, 60]), (228, [0, 50, 100, 150, 200, 250]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (0.03, [0, 0.01, 0.02, 0.03]),
])  # fmt: skip
def test_ticks_are_round(most: float, values: list[float]) -> None:
    assert plots_forecast.ticks_from_zero(most) == pytest.approx(values)


# --- what a job says of it ------------------------------------------------------------------------------------------


def test_a_launch_here_keeps_its_forecast_and_a_plan_for_nowhere_has_none() -> None:
    (own,) = load_recipes(str(Path(RECIPE).with_name("quickstart.py")))
    told = plan(own, procs=2).spec.forecast
    assert told and told["source"] == "presets" and told["start"]["boot"] == told["start"]["fetch"] == 0
    alone = plan(own, procs=1).spec.forecast
    assert alone and told["terms"]["compute"] == pytest.approx(alone["terms"]["compute"])  # they share the processors
    assert plan(own, backend="plan").spec.forecast is None
    chunks = ((64, 32, 1.0), (64, 64, 2.0), (96, 64, 4.0))
    measured = plan(own, procs=1, constants=Constants(source="job-3", batch_timings=chunks)).spec.forecast
    assert measured and measured["source"] == "job-3"
    assert measured["terms"]["compute"] == pytest.approx(2 * 4000 / 32 + 4 * 4000 / 64 * 2 + 3 * 4000 / 64 * 4)


def test_gpus_of_which_nothing_was_measured_have_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (own,) = load_recipes(str(Path(RECIPE).with_name("quickstart.py")))
    assert plan(own).spec.forecast is None


DONE: dict[str, Any] = {
    "recipe": "tiny", "state": "done", "procs": 1, "schedule_gpus": 1, "goodput": 0.9, "top1": 50.0, "top5": 90.0,
    "images_per_second": 60.0,
    "schedule": [{"start": 0, "end": 1, "size": 32, "batch": 8, "copy": None, "rect_val": False}],
    "epochs": [{"epoch": 1, "size": 32, "global_batch": 8, "steps": 8, "train_images": 60, "train_seconds": 1.5,
                "val_seconds": 0.5, "val_images": 20, "top1": 50.0, "top5": 90.0}],
    "seconds": {"attempt": 5.0, "training": 1.5, "validation": 0.5, "first step to last": 2.5},
}  # fmt: skip


def test_a_finished_jobs_result_has_its_constants_and_the_forecast_beside_what_it_took(hand_made: Fixture) -> None:
    told = {"terms": {"compute": 3.0, "start": 1.0}, "minutes": 1 / 15, "phases": [], "source": "presets"}
    job = hand_made(forecast=told)
    job.shared("result.json", json.dumps(DONE))
    write_result(job.folders, job.spec, registry.get_backend("local"))
    result = json.loads(job.folders.result_path.read_text())
    assert result["forecast"] == told and {row["term"]: row["error"] for row in result["against"]}["steps"] == 1.0
    own = calibration.measured_constants("job-1", result)
    assert own.batch_timings == ((32, 8, pytest.approx(0.2)),) and own == Constants.from_json(result["constants"])


def test_a_result_of_a_job_that_failed_or_says_too_little_is_written_all_the_same(hand_made: Fixture) -> None:
    job = hand_made(forecast={"terms": {}})
    write_result(job.folders, job.spec, registry.get_backend("local"), end_reason="it fell", end_state="failed")
    result = json.loads(job.folders.result_path.read_text())
    assert result["state"] == "failed" and not {"forecast", "against", "constants"} & result.keys()
    assert state_result.forecast_vs_actual({"terms": {}}, {"state": "done", "epochs": []}) == {}
    for one in (None, result, {"state": "done"}):
        with pytest.raises(BadInput, match="--from job-1"):
            calibration.measured_constants("job-1", one)


def test_a_jobs_speed_is_its_cards_and_another_card_has_its_preset() -> None:
    own = Constants(source="job-3", batch_timings=((224, 64, 1.0),), epoch_seconds=((0, 3.0),), startup_seconds=9.0)
    a100, h100, here = (
        candidates.get_machine_type(FREE),
        candidates.get_machine_type("p5.48xlarge"),
        replace(P3, gpu="", on_demand_price=0.0),
    )
    assert calibration.constants_for_type(own, a100, a100) == (own, "") and calibration.constants_for_type(
        own, here, here
    ) == (own, "")
    rented, note = calibration.constants_for_type(own, here, h100)
    assert (rented.boot_seconds, rented.setup_seconds, rented.fetch_bytes_per_second) == (
        DEFAULT_CONSTANTS.boot_seconds,
        DEFAULT_CONSTANTS.setup_seconds,
        DEFAULT_CONSTANTS.fetch_bytes_per_second,
    ) and "its like" in note
    assert (rented.batch_timings, rented.startup_seconds) == (own.batch_timings, own.startup_seconds)
    other, note = calibration.constants_for_type(own, a100, h100)
    assert other.batch_timings == () and (other.epoch_seconds, other.startup_seconds) == (
        own.epoch_seconds,
        own.startup_seconds,
    )
    assert note == "job-3 ran on A100: the speed of H100 is the preset's"


def test_what_processors_did_says_nothing_of_a_gpu() -> None:
    own = Constants(source="job-3", batch_timings=((224, 64, 1.0),), startup_seconds=9.0)
    cpu, gpu = replace(P3, gpu="CPU", on_demand_price=0.0), candidates.get_machine_type(FREE)
    assert calibration.constants_for_type(own, cpu, gpu) == (DEFAULT_CONSTANTS, "job-3 ran on processors, which says nothing of A100: all of "
                                                 f"{FREE} is presets")  # fmt: skip
    assert calibration.constants_for_type(own, gpu, cpu)[0] == DEFAULT_CONSTANTS
    small = replace(cpu, name="c7i.2xlarge", on_demand_price=0.4)
    like, note = calibration.constants_for_type(own, cpu, small)
    assert (
        like
        == replace(
            own,
            boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
            setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
            fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
        )
        and "taken for those of" in note
    )


def test_a_rented_job_ran_on_the_type_that_came_and_one_here_costs_nothing(hand_made: Fixture) -> None:
    job = hand_made(procs=2)
    assert calibration.job_machine_type(job.spec, {"device": "cpu"}).gpu == "CPU"
    here = calibration.job_machine_type(job.spec, {})
    assert (here.name, here.gpus, here.gpu, here.on_demand_price) == (f"as {job.spec.name}'s", 2, "", 0.0)
    rented = replace(job.spec, cloud={"places": [{"type": "p5.48xlarge"}, {"type": FREE}]})
    assert calibration.job_machine_type(rented, {"device": "cuda"}, FREE) == candidates.get_machine_type(FREE), (
        "not the type it liked best"
    )
