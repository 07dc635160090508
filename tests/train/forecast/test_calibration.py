"""Constants from the result of a run, and the forecast of a run beside what it took."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.known import known
from support.train_records import make_epoch

from train.forecast import (
    DEFAULT_CONSTANTS,
    IMAGENET18_CONSTANTS,
    Constants,
    Forecast,
    ForecastRecord,
    MeasuredRun,
    StartSeconds,
    TermComparison,
    calibrate,
    compare_with_run,
    forecast,
)
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.history import EpochResult
from train.recipe.schedule import Schedule
from train.tools.records import DamagedRecord, decode, encode

PHASES = [
    Phase(epochs=(0, 2), size=64, batch=10, lr=0.1, copy=80),
    Phase(epochs=(2, 3), size=64, batch=20, lr=0.1, copy=80),
    Phase(epochs=(3, 5), size=128, batch=20, lr=0.1, rect_val=True),
]
BATCH_SECONDS = {(64, 10): 0.1, (64, 20): 0.15, (128, 20): 0.6}  # seconds of one process's batch by (size, batch)


def make_schedule(*phases: Phase, images: int = 410, gpus: int = 2) -> Schedule:
    data = Data(name="d", root="d", train=images, val=80)
    recipe = Recipe(name="r", data=data, model=Model(name="resnet50"), phases=list(phases or PHASES))
    return Schedule(recipe, images, gpus)


def make_result(
    schedule: Schedule | None = None, processes: int = 2, with_breakdown: bool = True, waits: float = 0.0
) -> MeasuredRun:
    """Return the result of a run with known times.

    A batch takes `BATCH_SECONDS`, a step waits `waits` seconds, an image in validation takes a quarter of its time in
    training, each epoch 2 s beside these, and the first epoch of a new shape 3 s more.
    """
    schedule = schedule or make_schedule()
    epochs: list[EpochResult] = []
    previous_shape: Any = None
    for epoch in schedule.epochs:
        phase = epoch.scheduled_phase.phase
        batch_seconds = BATCH_SECONDS[phase.final_size, phase.batch]
        full_steps = schedule.images / epoch.scheduled_phase.global_batch
        batches_per_step = -(-schedule.gpus // processes)
        step_seconds = full_steps * batch_seconds * batches_per_step
        views = 2.33 if phase.rect_val else 1
        validation_seconds = 80 * views * batch_seconds / phase.batch / 4 / processes
        shape = (phase.size, phase.batch, phase.copy)
        parts = {
            "steps": step_seconds,
            "waits": waits * epoch.steps,
            "validation": validation_seconds,
            "switches": 3.0 * (shape != previous_shape),
            "checkpoints": 1.5,
            "other": 0.5,
        }
        previous_shape = shape
        row = make_epoch(
            epoch=epoch.number + 1,
            size=phase.size,
            global_batch=epoch.scheduled_phase.global_batch,
            steps=epoch.steps,
            train_images=schedule.images,
            train_seconds=step_seconds + parts["waits"],
            val_seconds=validation_seconds,
            val_images=80,
            where=parts if with_breakdown else {},
        )
        epochs.append(row)
    wall = sum(row.train_seconds + row.val_seconds + 2.0 for row in epochs) + (9.0 if with_breakdown else 0.0)
    return MeasuredRun(
        recipe="r",
        epochs=tuple(epochs),
        procs=processes,
        schedule=tuple(schedule.table()),
        schedule_gpus=schedule.gpus,
        seconds={"attempt": wall + 7.0, "first step to last without losses": wall},
    )


def make_forecast(schedule: Schedule, constants: Constants, processes: int = 2) -> Forecast:
    result = forecast(schedule, gpus=processes, gpu="", gbit=1.0, machines=1, constants=constants)
    assert result is not None
    return result


def compared(
    forecast_of_run: Forecast, result: MeasuredRun, start: StartSeconds | None = None
) -> dict[str, TermComparison]:
    """Return the rows of the comparison by term."""
    record = decode(ForecastRecord, json.loads(json.dumps(encode(forecast_of_run.to_record()))))
    return {row.term: row for row in compare_with_run(record, result, start)}


def test_calibrate_finds_the_constants_of_the_run() -> None:
    constants = calibrate(make_result(), "job-3")
    assert constants.source == "job-3"
    assert {(size, batch): pytest.approx(seconds) for size, batch, seconds in constants.batch_timings} == BATCH_SECONDS
    assert constants.forward_share == pytest.approx(0.25)
    assert constants.startup_seconds == pytest.approx(7.0)
    assert constants.epoch_seconds == ((0, pytest.approx(2.0)),)
    assert constants.switch_seconds == ((0, pytest.approx(3.0)),)
    assert constants.loader_speeds == ()


@pytest.mark.parametrize("with_breakdown", [True, False])
def test_calibrate_forecasts_its_own_run_exactly(with_breakdown: bool) -> None:
    result = make_result(with_breakdown=with_breakdown)
    own_forecast = make_forecast(make_schedule(), calibrate(result))
    assert own_forecast.total_seconds == pytest.approx(result.seconds["attempt"], rel=1e-6)
    rows = compared(own_forecast, result)
    assert list(rows) == ["steps", "loader", "validation", "fixed", "start", "all"]
    assert all(row.error is None or abs(row.error) < 1e-6 for row in rows.values())
    assert rows["all"].actual == pytest.approx(result.seconds["attempt"])


def test_compare_with_run_shows_the_error_of_each_term() -> None:
    result = make_result()
    constants = calibrate(result)
    halved = tuple((size, batch, 0.5 * seconds) for size, batch, seconds in constants.batch_timings)
    too_short = make_forecast(make_schedule(), replace(constants, batch_timings=halved))
    errors = {term: row.error for term, row in compared(too_short, result).items()}
    assert errors["steps"] == pytest.approx(-0.5) and errors["validation"] == pytest.approx(-0.5)
    assert errors["fixed"] == pytest.approx(0) and -0.5 < known(errors["all"]) < 0 and errors["loader"] is None


def test_batch_seconds_interpolates_sizes_and_batches() -> None:
    constants = calibrate(make_result())

    def seconds(size: int, batch: int) -> float:
        return constants.batch_seconds(size, batch, 1.0, 1.0)

    assert seconds(64, 15) == pytest.approx(0.125) and seconds(64, 40) == pytest.approx(0.25)  # on the line of two
    assert seconds(128, 10) == pytest.approx(0.3)  # of one measured batch: in proportion
    pixel_share = (96**2 - 64**2) / (128**2 - 64**2)
    assert seconds(96, 20) == pytest.approx(0.15 + pixel_share * 0.45)
    assert seconds(256, 20) == pytest.approx(4 * 0.6) and seconds(32, 20) == pytest.approx(0.15 / 4)


def test_batch_seconds_ignores_a_falling_line() -> None:
    constants = Constants(source="x", batch_timings=((64, 10, 0.2), (64, 20, 0.1)))
    assert constants.batch_seconds(64, 40, 1.0, 1.0) == pytest.approx(0.2)


def test_calibrate_finds_loader_speeds_only_from_waits() -> None:
    constants = calibrate(make_result(waits=0.5))
    speeds = {(copy, size): speed for copy, size, speed in constants.loader_speeds}
    assert set(speeds) == {(80, 64), (0, 128)}
    wait_seconds = 2 * 21 * 0.5 + 11 * 0.5  # at 64 pixels
    work_seconds = 2 * 20.5 * 0.1 + 10.25 * 0.15
    assert speeds[80, 64] == pytest.approx(3 * 410 / (wait_seconds + work_seconds))
    own_forecast = make_forecast(make_schedule(), constants)
    assert own_forecast.term_seconds["loader"] > 0
    loader = compared(own_forecast, make_result(waits=0.5))["loader"]
    assert loader.error == pytest.approx(0, abs=0.05)  # one speed stands for the two batches of a size


def test_calibrate_divides_accumulated_steps() -> None:
    schedule = make_schedule(gpus=6)
    constants = calibrate(make_result(schedule, processes=2))
    assert {(size, batch): pytest.approx(seconds) for size, batch, seconds in constants.batch_timings} == BATCH_SECONDS
    step_seconds = sum(row.where["steps"] for row in make_result(schedule).epochs)
    assert make_forecast(schedule, constants).term_seconds["compute"] == pytest.approx(step_seconds)


def test_calibrate_takes_the_measured_start() -> None:
    trainer_result = make_result(make_schedule(gpus=4), processes=4)
    job_result = replace(trainer_result, procs=2, machines=2, job="job-7")
    assert trainer_result.process_count == job_result.process_count == 4
    constants = calibrate(job_result, start=StartSeconds(setup=42.0, trainers=6.0))
    assert constants.source == "job-7"
    assert (constants.setup_seconds, constants.startup_seconds) == (42.0, 6.0)
    measured_start = StartSeconds(setup=50.0, trainers=8.0)
    start = compared(make_forecast(make_schedule(), constants), job_result, measured_start)["start"]
    assert (start.forecast, start.actual) == (pytest.approx(48.0), pytest.approx(58.0))


@pytest.mark.parametrize("missing", ["epochs", "schedule", "procs", "seconds"])
def test_measured_run_refuses_an_incomplete_result(missing: str) -> None:
    result = encode(make_result())
    del result[missing]
    with pytest.raises(DamagedRecord, match=missing):
        decode(MeasuredRun, result)


def test_calibrate_refuses_a_run_without_steps() -> None:
    with pytest.raises(ValueError, match="no training step was measured"):
        calibrate(replace(make_result(), epochs=()))


@pytest.mark.parametrize(
    "constants",
    [DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, calibrate(make_result(waits=0.5))],
    ids=lambda constants: constants.source,
)
def test_constants_survive_json(constants: Constants) -> None:
    value = json.loads(json.dumps({**encode(constants), "key of a later version": 1}))
    assert decode(Constants, value) == constants
