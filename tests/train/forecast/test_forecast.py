"""The arithmetic of the forecast against hand calculations, and constants from a run's epochs.

tests/docs/test_generated_pages.py compares whole forecasts, with validation and fixed costs, with published runs.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.train_records import make_epoch

from recipes.resnet50_18min import recipe as resnet50
from train.forecast import (
    DEFAULT_CONSTANTS,
    MODEL_COSTS,
    TERMS,
    Constants,
    Forecast,
    MeasuredRun,
    StartSeconds,
    calibrate,
    compare_with_run,
    forecast,
)
from train.forecast.hardware import NetworkSpec, fetch_bytes
from train.recipe import IMAGENET, Comm, Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule
from train.tools.records import decode, encode

IMAGES = IMAGENET.train
BARE = Constants(source="bare")  # nothing but compute and all-reduce
NO_NETWORK = replace(BARE, network=NetworkSpec(1e9, 0.0))


def make_schedule(machines: int) -> Schedule:
    return Schedule(resnet50.for_machines(machines), IMAGES, 8 * machines)


def one_phase(batch: int, gpus: int, images: int = IMAGES, **fields: Any) -> Schedule:
    """Return a schedule of one epoch at 128 pixels on a set that is not ImageNet. `fields` are those of the recipe."""
    phase = Phase(epochs=(0, 1), size=fields.pop("size", 128), batch=batch, lr=0.1, copy=fields.pop("copy", None))
    data = Data(name="some", root="some", train=images, val=1)
    return Schedule(Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase], **fields), images, gpus)


def forecast_of(schedule: Schedule, **settings: Any) -> Forecast:
    """Return the forecast of a schedule, by default on machines of 8 V100 with 25 Gbit/s."""
    machines = max(1, schedule.gpus // 8)
    defaults = {"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, "constants": BARE}
    result = forecast(schedule, **{**defaults, **settings})
    assert result is not None
    return result


BUS_SECONDS = 25_557_032 * 8 * 8 / 1000e9  # twice 4 bytes of each parameter inside a machine


@pytest.mark.parametrize(("hook", "machines", "gpus", "bytes_sent", "hops", "bus_seconds"), [
    ("none", 2, 8, 2 * 15 / 16 * 4, 15, 0), ("powersgd", 2, 8, 2 * 15 / 16 * 4, 15, 0),
    ("fp16", 2, 8, 2 * 15 / 16 * 2, 15, 0), ("bf16", 2, 8, 2 * 15 / 16 * 2, 15, 0),
    ("hierarchical", 2, 8, 2 / 2 * 4, 1, BUS_SECONDS), ("hierarchical", 16, 1, 2 * 15 / 16 * 4, 15, 0),
    ("none", 1, 8, 0, 0, 7 / 8 * BUS_SECONDS), ("none", 1, 1, 0, 0, 0),
])  # fmt: skip
def test_all_reduce_seconds_of_bytes_hops_and_bus(
    hook: str, machines: int, gpus: int, bytes_sent: float, hops: int, bus_seconds: float
) -> None:
    schedule = one_phase(64, machines * gpus, comm=Comm(hook=hook, overlap=False))
    constants = replace(BARE, network=NetworkSpec(0.5, 1e-3))
    result = forecast_of(schedule, machines=machines, gpus=gpus, constants=constants)
    expected = bytes_sent * 25_557_032 * 8 / 12.5e9 + 2 * hops * 1e-3 + bus_seconds
    assert result.terms["all-reduce"] == pytest.approx(schedule.steps * expected, rel=1e-6)


def test_compute_in_float32_and_on_fewer_gpus() -> None:
    """16 batches on 6 GPUs are 3 for each. 367 / 1200: images/s of a V100 in float32 and float16, as measured."""
    half, single = (one_phase(64, 16, precision=precision) for precision in ("fp16", "fp32"))
    settings = [(half, 2, 8), (half, 1, 8), (half, 1, 6), (single, 2, 8)]
    seconds = [forecast_of(each, machines=count, gpus=gpus).terms["compute"] for each, count, gpus in settings]
    assert seconds == pytest.approx([seconds[0], 2 * seconds[0], 3 * seconds[0], 1200 / 367 * seconds[0]], rel=2e-3)


def test_step_waits_only_for_a_loader_slower_than_the_gpus() -> None:
    def terms(machines: int, *speeds: tuple[int, int, float]) -> dict[str, float]:
        schedule = one_phase(512, 16, images=16 * 512 * 10, copy=160)
        constants = replace(NO_NETWORK, loader_speeds=speeds)
        return forecast_of(schedule, machines=machines, constants=constants, vcpus=64).terms

    assert terms(2)["loader"] == terms(2, (160, 128, 1e6))["loader"] == 0  # unknown images, and a fast loader
    assert terms(2, (0, 128, 640.0))["loader"] == 0  # of another copy
    for vcpus, waits in ((96, False), (8, True), (None, False)):  # ImageNet: by presets of the processors
        loader = forecast_of(make_schedule(4), gpu="A100", gbit=400, vcpus=vcpus).terms["loader"]
        assert bool(loader) is waits
    for machines in (1, 2):
        waiting = terms(machines, (160, 128, 640.0))
        working = waiting["compute"] + waiting["all-reduce"]
        assert working + waiting["loader"] == pytest.approx(81920 / 640 / machines)


def test_start_is_boot_setup_fetch_and_trainers() -> None:
    schedule = make_schedule(8)
    images = IMAGES + IMAGENET.val
    assert fetch_bytes(schedule) == images * (13_100 + 49_000 + 109_000)
    assert fetch_bytes(Schedule(schedule.recipe, 1000, 64)) == fetch_bytes(schedule), "a rehearsal fetches whole sets"
    result, on_slow_network = (forecast_of(schedule, gbit=gbit, constants=DEFAULT_CONSTANTS) for gbit in (25, 8))
    assert result.start == {"boot": 120, "setup": 60, "fetch": images * 171_100 / 1.5e9, "trainers": 15}
    assert on_slow_network.start["fetch"] == images * 171_100 / 1e9
    assert result.training_minutes == pytest.approx(result.minutes - (result.terms["start"] - 15) / 60)
    assert fetch_bytes(one_phase(64, 8)) == 0  # the size of other images is not known


def test_forecast_of_steps_takes_their_share_of_each_phase() -> None:
    result = forecast_of(make_schedule(16), vcpus=64, constants=DEFAULT_CONSTANTS)
    assert result.source == "presets" and [(row.start, row.end) for row in result.phases] == [
        phase.epochs for phase in resnet50.tables[16]
    ]
    assert sum(row.seconds for row in result.phases) == pytest.approx(60 * result.minutes - result.terms["start"])
    first, second = result.phases[:2]
    steps = first.steps + second.steps // 5
    begun, rest = result.of_steps(0, steps), result.of_steps(steps)
    assert begun.terms["compute"] == pytest.approx(
        first.terms["compute"] + second.terms["compute"] * (second.steps // 5) / second.steps
    )
    for term in TERMS:
        assert begun.terms[term] + rest.terms[term] == pytest.approx(result.terms[term])
    assert begun.start == rest.start == result.start and result.of_steps(0) == result


def test_forecast_of_unknown_cards_and_models_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(16)
    for gpu in ("B200", "", "v100", "RTX PRO 4500"):
        assert forecast(schedule, gpus=8, gpu=gpu, gbit=25, machines=16) is None
    measured = forecast_of(schedule, gpu="B200", constants=replace(BARE, images_per_second=7900.0))
    assert measured.terms["compute"] == pytest.approx(forecast_of(schedule, gpu="H100").terms["compute"] / 2)
    monkeypatch.delitem(MODEL_COSTS, "resnet50")
    assert forecast(schedule, gpus=8, gpu="V100", gbit=25, machines=16) is None
    timed = replace(BARE, batch_timings=((128, 64, 0.5),))
    of_own_model = forecast(schedule, gpus=8, gpu="", gbit=25, machines=16, constants=timed)
    assert of_own_model and of_own_model.terms["compute"] > 0, "a job has measured this model"


PHASES = [
    Phase(epochs=(0, 2), size=64, batch=10, lr=0.1, copy=80),
    Phase(epochs=(2, 3), size=64, batch=20, lr=0.1, copy=80),
    Phase(epochs=(3, 5), size=128, batch=20, lr=0.1, rect_val=True),
]
BATCH_SECONDS = {(64, 10): 0.1, (64, 20): 0.15, (128, 20): 0.6}  # seconds of one process's batch by (size, batch)
START = StartSeconds(setup=42.0, trainers=7.0)


def measured_schedule(gpus: int = 2) -> Schedule:
    data = Data(name="d", root="d", train=410, val=80)
    return Schedule(Recipe(name="r", data=data, model=Model(name="resnet50"), phases=PHASES), 410, gpus)


def make_run(gpus: int = 2, waits: float = 0.0) -> MeasuredRun:
    """Return a run of two processes with known times.

    A batch takes `BATCH_SECONDS`, a step waits `waits` seconds, an image in validation takes a quarter of its time in
    training, each epoch 2 s beside these, and the first epoch of a new shape 3 s more.
    """
    schedule = measured_schedule(gpus)
    rows = []
    for epoch in schedule.epochs:
        phase, global_batch = epoch.scheduled_phase.phase, epoch.scheduled_phase.global_batch
        batch_seconds = BATCH_SECONDS[phase.final_size, phase.batch]
        views = 2.33 if phase.rect_val else 1
        parts = {
            "steps": 410 / global_batch * batch_seconds * gpus / 2,
            "waits": waits * epoch.steps,
            "validation": 80 * views * batch_seconds / phase.batch / 4 / 2,
            "switches": 3.0 * (epoch.number in (0, 2, 3)),
            "checkpoints": 1.5,
            "other": 0.5,
        }
        shape = {"size": phase.final_size, "global_batch": global_batch, "steps": epoch.steps}
        rows.append(make_epoch(epoch=epoch.number + 1, **shape, train_images=410, val_images=80, where=parts))
    return MeasuredRun(processes=2, machines=1, epochs=rows, schedule=schedule.table(), schedule_gpus=gpus)


def make_forecast(schedule: Schedule, constants: Constants) -> Forecast:
    return forecast_of(schedule, gpus=2, gpu="", gbit=1.0, machines=1, constants=constants)


@pytest.mark.parametrize("gpus", [2, 6])  # six chunks on two processes are three batches in each step
def test_calibrate_finds_the_constants_of_the_run(gpus: int) -> None:
    constants = calibrate(make_run(gpus), "job-3", START)
    assert {(size, batch): seconds for size, batch, seconds in constants.batch_timings} == pytest.approx(BATCH_SECONDS)
    assert (constants.source, constants.loader_speeds) == ("job-3", ())
    assert constants.forward_share == pytest.approx(0.25)
    assert (constants.epoch_seconds, constants.switch_seconds) == pytest.approx((2.0, 3.0))
    assert (constants.startup_seconds, constants.setup_seconds) == (7.0, 42.0)


def test_calibrate_finds_loader_speeds_only_from_waits() -> None:
    constants = calibrate(make_run(waits=0.5), "job-3", START)
    speeds = {(copy, size): speed for copy, size, speed in constants.loader_speeds}
    assert set(speeds) == {(80, 64), (0, 128)}
    wait_seconds = 2 * 21 * 0.5 + 11 * 0.5  # at 64 pixels
    work_seconds = 2 * 20.5 * 0.1 + 10.25 * 0.15
    assert speeds[80, 64] == pytest.approx(3 * 410 / (wait_seconds + work_seconds))
    on_two_machines = calibrate(replace(make_run(waits=0.5), machines=2), "job-3", START)
    assert on_two_machines.loader_speeds[0][2] == pytest.approx(constants.loader_speeds[0][2] / 2)


def test_comparison_shows_the_error_of_each_term_also_of_a_run_that_ended_at_its_target() -> None:
    run = make_run()
    constants = calibrate(run, "job-3", START)
    exact = make_forecast(measured_schedule(), constants)
    stored = decode(Forecast, json.loads(json.dumps(encode(exact))))
    rows = compare_with_run(stored, run.epochs, 49.0)
    assert [row.term for row in rows] == ["steps", "loader", "validation", "fixed", "start", "all"]
    assert all(row.error is None or abs(row.error) < 1e-6 for row in rows)
    assert rows[-1].actual == pytest.approx(49.0 + sum(sum(row.where.values()) for row in run.epochs))
    halved = tuple((size, batch, 0.5 * seconds) for size, batch, seconds in constants.batch_timings)
    too_short = make_forecast(measured_schedule(), replace(constants, batch_timings=halved))
    errors = {row.term: row.error for row in compare_with_run(too_short, run.epochs, 98.0)}
    assert errors["steps"] == errors["validation"] == errors["start"] == pytest.approx(-0.5)
    assert errors["fixed"] == pytest.approx(0) and errors["loader"] is None
    waiting_run = make_run(waits=0.5)
    waiting = make_forecast(measured_schedule(), calibrate(waiting_run, "job-3", START))
    errors = {row.term: row.error for row in compare_with_run(waiting, waiting_run.epochs, 49.0)}
    assert errors["loader"] == pytest.approx(0, abs=0.05)  # one speed stands for the two batches of a size
    cut_short = {row.term: row for row in compare_with_run(exact, run.epochs[:4], 49.0)}
    assert cut_short["steps"].forecast == pytest.approx(cut_short["steps"].actual)
    assert cut_short["fixed"].forecast == pytest.approx(cut_short["fixed"].actual - 1.5)  # half of the last switch
    assert cut_short["start"].forecast == 49.0


def test_measured_batch_seconds_interpolate_sizes_and_batches() -> None:
    constants = calibrate(make_run(), "job-3", START)
    pixel_share = (96**2 - 64**2) / (128**2 - 64**2)
    expected = {
        (64, 15): 0.125, (64, 40): 0.25,  # on the line of two
        (128, 10): 0.3,  # of one measured batch: in proportion
        (96, 20): 0.15 + pixel_share * 0.45, (256, 20): 4 * 0.6, (32, 20): 0.15 / 4,
    }  # fmt: skip
    assert {shape: constants.measured_batch_seconds(*shape) for shape in expected} == pytest.approx(expected)
    falling = Constants(source="x", batch_timings=((64, 10, 0.2), (64, 20, 0.1)))
    assert falling.measured_batch_seconds(64, 40) == pytest.approx(0.2)


@pytest.mark.parametrize(("gbit", "machines", "gpu", "hook"), [
    (25.0, 2, "V100", "bf16"), (25.0, 1, "V100", "none"), (400.0, 2, "V100", "none"), (25.0, 2, "CPU", "none"),
])  # fmt: skip
def test_gpus_of_machines_without_rdma_are_charged_two_bytes(gbit: float, machines: int, gpu: str, hook: str) -> None:
    first, other = (
        forecast_of(one_phase(64, 8 * machines, comm=name), machines=machines, gbit=gbit, gpu=gpu).terms["all-reduce"]
        for name in ("auto", hook)
    )
    assert first == other > 0


@pytest.mark.parametrize(
    ("batch", "size", "measured"), [(256, 224, 3939), (256, 128, 10602), (128, 96, 4611), (64, 128, 2191)]
)
def test_presets_give_the_measured_speed_of_an_h100(batch: int, size: int, measured: float) -> None:
    """The smaller batches wait for the host. The speeds are those of steps in bfloat16 (LOG.md, 2026-11-26)."""
    schedule = one_phase(batch, 1, size=size, graphs="off")
    terms = forecast_of(schedule, gpus=1, gpu="H100", constants=DEFAULT_CONSTANTS).terms
    assert schedule.images / (terms["compute"] + terms["optimizer"]) == pytest.approx(measured, rel=0.2)
    on_cpu = forecast_of(schedule, gpus=1, gpu="CPU", constants=DEFAULT_CONSTANTS).terms["compute"]
    assert on_cpu == pytest.approx(forecast_of(schedule, gpus=1, gpu="CPU").terms["compute"])


@pytest.mark.parametrize(("graphs", "compiled", "gpus", "waits"), [
    ("off", False, 1, True), ("auto", False, 1, False), ("auto", False, 2, True), ("on", False, 2, False),
    ("on", True, 2, True),
])  # fmt: skip
def test_cuda_graphs_take_the_host_out_of_the_way(graphs: str, compiled: bool, gpus: int, waits: bool) -> None:
    """128 images of 96 pixels are 9 ms of an H100, which a graph took 8 ms (LOG.md). Validation is without graphs."""
    model = Model(name="resnet50", compile=compiled)
    schedule = one_phase(128, gpus, size=96, graphs=graphs)
    schedule = Schedule(replace(schedule.recipe, model=model), schedule.images, gpus)
    settings = {"gpu": "H100", "constants": DEFAULT_CONSTANTS, "val_images": 50_000}
    result = forecast_of(schedule, gpus=gpus, **settings)
    seconds = 0.025 if waits else 128 * (96 / 224) ** 2 / 3950
    assert result.terms["compute"] == pytest.approx(schedule.images / 128 / gpus * seconds, rel=2e-3)
    assert result.terms["validation"] == pytest.approx(50_000 / 128 / gpus * 0.025 / 3, rel=2e-3)


def test_calibrate_refuses_a_run_without_steps() -> None:
    with pytest.raises(ValueError, match="no training step was measured"):
        calibrate(replace(make_run(), epochs=()), "job-3", START)
    with pytest.raises(ValueError, match="epoch 1 is in no row"):
        calibrate(replace(make_run(), schedule=()), "job-3", START)
