"""Constants from the epochs of a run, and the forecast of a run beside what it took."""

import json
from dataclasses import replace

import pytest
from support.train_records import make_epoch

from train.forecast import (
    Constants,
    Forecast,
    MeasuredRun,
    StartSeconds,
    calibrate,
    compare_with_run,
    forecast,
)
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule
from train.tools.records import decode, encode

PHASES = [
    Phase(epochs=(0, 2), size=64, batch=10, lr=0.1, copy=80),
    Phase(epochs=(2, 3), size=64, batch=20, lr=0.1, copy=80),
    Phase(epochs=(3, 5), size=128, batch=20, lr=0.1, rect_val=True),
]
BATCH_SECONDS = {(64, 10): 0.1, (64, 20): 0.15, (128, 20): 0.6}  # seconds of one process's batch by (size, batch)
START = StartSeconds(setup=42.0, trainers=7.0)


def make_schedule(gpus: int = 2) -> Schedule:
    data = Data(name="d", root="d", train=410, val=80)
    return Schedule(Recipe(name="r", data=data, model=Model(name="resnet50"), phases=PHASES), 410, gpus)


def make_run(gpus: int = 2, waits: float = 0.0) -> MeasuredRun:
    """Return a run of two processes with known times.

    A batch takes `BATCH_SECONDS`, a step waits `waits` seconds, an image in validation takes a quarter of its time in
    training, each epoch 2 s beside these, and the first epoch of a new shape 3 s more.
    """
    schedule = make_schedule(gpus)
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
        row = make_epoch(
            epoch=epoch.number + 1,
            size=phase.final_size,
            global_batch=global_batch,
            steps=epoch.steps,
            train_images=410,
            val_images=80,
            where=parts,
        )
        rows.append(row)
    return MeasuredRun(processes=2, machines=1, epochs=rows, schedule=schedule.table(), schedule_gpus=gpus)


def make_forecast(schedule: Schedule, constants: Constants) -> Forecast:
    result = forecast(schedule, gpus=2, gpu="", gbit=1.0, machines=1, constants=constants)
    assert result is not None
    return result


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


def test_calibrate_refuses_a_run_without_steps() -> None:
    with pytest.raises(ValueError, match="no training step was measured"):
        calibrate(replace(make_run(), epochs=()), "job-3", START)
    with pytest.raises(ValueError, match="epoch 1 is in no row"):
        calibrate(replace(make_run(), schedule=()), "job-3", START)


def test_comparison_shows_the_error_of_each_term_also_of_a_run_that_ended_at_its_target() -> None:
    run = make_run()
    constants = calibrate(run, "job-3", START)
    exact = make_forecast(make_schedule(), constants)
    stored = decode(Forecast, json.loads(json.dumps(encode(exact))))
    rows = compare_with_run(stored, run.epochs, 49.0)
    assert [row.term for row in rows] == ["steps", "loader", "validation", "fixed", "start", "all"]
    assert all(row.error is None or abs(row.error) < 1e-6 for row in rows)
    assert rows[-1].actual == pytest.approx(49.0 + sum(sum(row.where.values()) for row in run.epochs))
    halved = tuple((size, batch, 0.5 * seconds) for size, batch, seconds in constants.batch_timings)
    too_short = make_forecast(make_schedule(), replace(constants, batch_timings=halved))
    errors = {row.term: row.error for row in compare_with_run(too_short, run.epochs, 98.0)}
    assert errors["steps"] == errors["validation"] == errors["start"] == pytest.approx(-0.5)
    assert errors["fixed"] == pytest.approx(0) and errors["loader"] is None
    waiting_run = make_run(waits=0.5)
    waiting = make_forecast(make_schedule(), calibrate(waiting_run, "job-3", START))
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
