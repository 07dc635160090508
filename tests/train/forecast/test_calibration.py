"""What a run says of the forecast: its constants from result.json, and the forecast beside what it took."""

import json
from dataclasses import replace
from typing import Any

import pytest

from train.forecast import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, Constants, calibrate, compare_with_run, forecast
from train.forecast.calibration import process_count
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule

ROWS = [
    Phase(epochs=(0, 2), size=64, batch=10, lr=0.1, copy=80),
    Phase(epochs=(2, 3), size=64, batch=20, lr=0.1, copy=80),
    Phase(epochs=(3, 5), size=128, batch=20, lr=0.1, rect_val=True),
]
STEP = {(64, 10): 0.1, (64, 20): 0.15, (128, 20): 0.6}  # seconds of one process's batch


def schedule(*rows: Phase, images: int = 410, gpus: int = 2) -> Schedule:
    data = Data(name="d", root="d", train=images, val=80)
    return Schedule(Recipe(name="r", data=data, model=Model(name="resnet50"), phases=list(rows or ROWS)), images, gpus)


def result(one: Schedule | None = None, procs: int = 2, where: bool = True, waits: float = 0.0) -> dict[str, Any]:
    """A run's result by known seconds: STEP, half a second of waits a step if asked, validation at a quarter of a
    step's time, 2 s an epoch beside, 3 s more in the first of a new shape.
    """
    one, epochs = one or schedule(), list[dict[str, Any]]()
    before: Any = None
    for epoch in one.epochs:
        phase = epoch.scheduled_phase.phase
        key = (phase.size, phase.batch)
        full = one.images / epoch.scheduled_phase.global_batch
        rounds = -(-one.gpus // procs)
        steps, validation = (
            full * STEP[key] * rounds,
            80 * (2.33 if phase.rect_val else 1) * STEP[key] / key[1] / 4 / procs,
        )
        fresh = before != (*key, phase.copy)
        parts = {"steps": steps, "waits": waits * epoch.steps, "validation": validation, "switches": 3.0 * fresh,
                 "checkpoints": 1.5, "other": 0.5}  # fmt: skip
        before = (*key, phase.copy)
        epochs.append({
            "epoch": epoch.number + 1, "size": phase.size, "global_batch": epoch.scheduled_phase.global_batch, "steps": epoch.steps,
            "train_images": one.images, "train_seconds": steps + parts["waits"], "val_seconds": validation,
            "val_images": 80, **({"where": parts} if where else {}),
        })  # fmt: skip
    wall = sum(row["train_seconds"] + row["val_seconds"] + 2.0 for row in epochs) + (9.0 if where else 0.0)
    return {
        "recipe": "r", "state": "done", "epochs": epochs, "procs": procs, "schedule": one.table(),
        "schedule_gpus": one.gpus, "seconds": {"attempt": wall + 7.0, "first step to last": wall},
    }  # fmt: skip


def told(one: Schedule, constants: Constants, procs: int = 2) -> Any:
    found = forecast(one, gpus=procs, gpu="", gbit=1.0, machines=1, constants=constants)
    assert found is not None
    return found


def test_constants_are_those_by_which_the_run_went() -> None:
    found = calibrate(result(), "job-3")
    assert found.source == "job-3"
    assert {(size, batch): pytest.approx(seconds) for size, batch, seconds in found.batch_timings} == STEP
    assert found.forward_share == pytest.approx(0.25) and found.startup_seconds == pytest.approx(7.0)
    assert found.epoch_seconds == ((0, pytest.approx(2.0)),) and found.switch_seconds == ((0, pytest.approx(3.0)),)
    assert found.loader_speeds == ()


@pytest.mark.parametrize("where", [True, False])
def test_a_run_is_forecast_exactly_from_its_own_constants(where: bool) -> None:
    one = result(where=where)
    found = told(schedule(), calibrate(one))
    assert found.seconds == pytest.approx(one["seconds"]["attempt"], rel=1e-6)
    rows = {row["term"]: row for row in compare_with_run(json.loads(json.dumps(found.to_json())), one)}
    assert list(rows) == ["steps", "loader", "validation", "fixed", "start", "all"]
    assert all(row["error"] is None or abs(row["error"]) < 1e-6 for row in rows.values())
    assert rows["all"]["actual"] == pytest.approx(one["seconds"]["attempt"])


def test_the_comparison_tells_each_terms_error() -> None:
    one, own = result(), calibrate(result())
    half = told(
        schedule(), replace(own, chunks=tuple((size, batch, 0.5 * it) for size, batch, it in own.batch_timings))
    )
    rows = {row["term"]: row["error"] for row in compare_with_run(half.to_json(), one)}
    assert rows["steps"] == pytest.approx(-0.5) and rows["validation"] == pytest.approx(-0.5)
    assert rows["fixed"] == pytest.approx(0) and -0.5 < rows["all"] < 0 and rows["loader"] is None


def test_other_sizes_and_batches_lie_between_and_beyond_what_was_measured() -> None:
    own = calibrate(result())

    def seconds(size: int, batch: int) -> float:
        return own.batch_seconds(size, batch, 1.0, 1.0)

    assert seconds(64, 15) == pytest.approx(0.125) and seconds(64, 40) == pytest.approx(0.25)  # on the line of two
    assert seconds(128, 10) == pytest.approx(0.3)  # of one batch: in proportion
    pixels = (96**2 - 64**2) / (128**2 - 64**2)
    assert seconds(96, 20) == pytest.approx(0.15 + pixels * 0.45)
    assert seconds(256, 20) == pytest.approx(4 * 0.6) and seconds(32, 20) == pytest.approx(0.15 / 4)


def test_a_line_that_falls_is_not_believed() -> None:
    own = Constants(source="x", batch_timings=((64, 10, 0.2), (64, 20, 0.1)))
    assert own.batch_seconds(64, 40, 1.0, 1.0) == pytest.approx(0.2)


def test_the_loaders_speed_is_known_from_a_run_that_waited_for_it_and_only_then() -> None:
    slow = calibrate(result(waits=0.5))
    speeds = {(copy, size): speed for copy, size, speed in slow.loader_speeds}
    assert set(speeds) == {(80, 64), (0, 128)}
    steps = 2 * 21 * 0.5 + 11 * 0.5  # seconds of waits at 64 pixels
    work = 2 * 20.5 * 0.1 + 10.25 * 0.15
    assert speeds[80, 64] == pytest.approx(3 * 410 / (steps + work))
    found = told(schedule(), slow)
    assert found.parts["loader"] > 0
    rows = {row["term"]: row for row in compare_with_run(found.to_json(), result(waits=0.5))}
    assert rows["loader"]["error"] == pytest.approx(0, abs=0.05)  # one speed for the two batches of a size


def test_accumulated_steps_are_taken_apart() -> None:
    one = schedule(gpus=6)
    own = calibrate(result(one, procs=2))
    assert {(size, batch): pytest.approx(seconds) for size, batch, seconds in own.batch_timings} == STEP
    assert told(one, own).parts["compute"] == pytest.approx(sum(row["where"]["steps"] for row in result(one)["epochs"]))


def test_the_jobs_own_result_counts_the_processes_of_one_machine_and_its_set_up() -> None:
    trainers = result(schedule(gpus=4), procs=4)
    setup = {"0": {"booting": 20.0, "environment": 10.0, "first step": 4.0}, "1": {"booting": 30.0, "data": 8.0,
             "environment": 12.0, "rendezvous": 1.0, "indexing": 2.0, "first step": 5.0}, "2": {}}  # fmt: skip
    job = {**trainers, "procs": 2, "machines": 2, "job": "job-7", "setup": setup}
    assert process_count(trainers) == process_count(job) == 4
    own = calibrate(job)
    assert (own.source, own.setup_seconds, own.startup_seconds) == ("job-7", 42.0, 6.0)  # the set is drawn but once
    start = next(row for row in compare_with_run(told(schedule(), own).to_json(), job) if row["term"] == "start")
    assert (start["forecast"], start["actual"]) == (pytest.approx(48.0), pytest.approx(58.0))


@pytest.mark.parametrize("gone", ["epochs", "schedule", "procs", "seconds"])
def test_a_result_that_says_too_little_is_refused(gone: str) -> None:
    one = result()
    del one[gone]
    with pytest.raises((KeyError, ValueError, TypeError)):
        calibrate(one)


def test_a_run_without_a_step_has_measured_nothing() -> None:
    with pytest.raises(ValueError, match="no step"):
        calibrate({**result(), "epochs": []})


@pytest.mark.parametrize(
    "own", [DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, calibrate(result(waits=0.5))], ids=lambda one: one.source
)
def test_constants_survive_json(own: Constants) -> None:
    assert Constants.from_json(json.loads(json.dumps({**own.to_json(), "later": 1}))) == own
