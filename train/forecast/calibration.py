"""Compare a finished run with its forecast, and derive constants from it. Pure functions of result.json."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .constants import Constants, SecondsBySize
from .hardware import RECTANGLE_PIXEL_RATIO, NetworkSpec

MIN_WAIT_SHARE = 0.05  # share of a phase's step time that must be waits, for the loader's speed to be known from it
UNLIMITED_GBIT = 1e9  # Gbit/s, for networks whose time is in the measured steps already
JsonObject = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartSeconds:
    """The seconds before a run's first step: until its trainers start, and from then on."""

    setup: float
    trainers: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.setup + self.trainers


def process_count(result: JsonObject) -> int:
    """Return how many processes trained. A job's result has those of one machine, a trainer's own result has all."""
    return int(result["procs"]) * int(result.get("machines", 1))


def epoch_part_seconds(row: JsonObject) -> dict[str, float]:
    """Return the seconds of an epoch by part (`train.metrics.time_breakdown`).

    Results without a breakdown have "steps" and "validation" only.
    """
    if row.get("where"):
        return {part: float(seconds) for part, seconds in row["where"].items()}
    return {"steps": row["train_seconds"], "validation": row["val_seconds"]}


def schedule_row_of(result: JsonObject, row: JsonObject) -> JsonObject:
    """Return the schedule's row that an epoch belongs to. Raises `ValueError` when there is none."""
    for phase in result["schedule"]:
        if phase["start"] < row["epoch"] <= phase["end"]:
            return dict(phase)
    raise ValueError(f"epoch {row['epoch']} is in no row of the schedule")


def calibrate(result: JsonObject, source: str = "", start: StartSeconds | None = None) -> Constants:
    """Return the constants that a finished run measured, from its result.json. `source` names them (default: the job).

    `start` is what the launching side measured, without work that is done once for a data set. Without it, the trainers
    know their own start only.

    The time that a step sends gradients is within its seconds, and is taken to be the same on other numbers of GPUs.
    Raises `ValueError`, `KeyError` or `TypeError` when the result lacks measurements.
    """
    batch_seconds = _batch_seconds(result)
    loader_speeds: dict[tuple[int, int], float] = {}
    for (copy, size), (images, seconds, waits) in _loader_totals(result).items():
        if waits > MIN_WAIT_SHARE * seconds:
            loader_speeds[copy, size] = images / seconds / int(result.get("machines", 1))
    if not batch_seconds:
        raise ValueError("no training step was measured")
    start = start or _trainers_start(result)
    epoch_seconds, switch_seconds = _fixed_seconds(result)
    return Constants(
        source=source or str(result.get("job") or result["recipe"]),
        batch_timings=tuple((size, batch, seconds) for (size, batch), seconds in sorted(batch_seconds.items())),
        network=NetworkSpec(UNLIMITED_GBIT, 0.0),
        bus_gbit=UNLIMITED_GBIT,
        overlap=False,
        forward_share=_forward_share(result, batch_seconds),
        loader_speeds=tuple((copy, size, speed) for (copy, size), speed in sorted(loader_speeds.items())),
        epoch_seconds=epoch_seconds,
        switch_seconds=switch_seconds,
        startup_seconds=start.trainers,
        setup_seconds=start.setup,
    )


def _batch_seconds(result: JsonObject) -> dict[tuple[int, int], float]:
    """Return the seconds of a full batch of one GPU by (size, batch), without the waits for images."""
    batches_per_step = math.ceil(int(result["schedule_gpus"]) / process_count(result))
    seconds = defaultdict[tuple[int, int], float](float)
    full_steps = defaultdict[tuple[int, int], float](float)
    for row in result["epochs"]:
        key = (int(row["size"]), int(schedule_row_of(result, row)["batch"]))
        seconds[key] += epoch_part_seconds(row)["steps"]
        full_steps[key] += row["train_images"] / row["global_batch"]
    return {
        key: seconds[key] / full_steps[key] / batches_per_step for key in seconds if full_steps[key] and seconds[key]
    }


def _loader_totals(result: JsonObject) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Return (images, seconds of steps with their waits, seconds of waits) by (copy, size); copy 0 is the full size."""
    totals: dict[tuple[int, int], tuple[float, float, float]] = {}
    for row in result["epochs"]:
        key = (int(schedule_row_of(result, row)["copy"] or 0), int(row["size"]))
        part_seconds = epoch_part_seconds(row)
        epoch_waits = part_seconds.get("waits", 0.0)
        images, seconds, waits = totals.get(key, (0.0, 0.0, 0.0))
        totals[key] = (
            images + row["train_images"],
            seconds + part_seconds["steps"] + epoch_waits,
            waits + epoch_waits,
        )
    return totals


def _forward_share(result: JsonObject, batch_seconds: Mapping[tuple[int, int], float]) -> float:
    """Return the time of an image in validation over its time in training; 1/3 where nothing was validated."""
    validation_seconds = training_seconds = 0.0
    for row in result["epochs"]:
        phase = schedule_row_of(result, row)
        seconds = batch_seconds.get((int(row["size"]), int(phase["batch"])))
        if row.get("val_images") and seconds:
            views = 1 + (RECTANGLE_PIXEL_RATIO if phase["rect_val"] else 0.0)
            validation_seconds += epoch_part_seconds(row)["validation"] * process_count(result)
            training_seconds += row["val_images"] * views * seconds / phase["batch"]
    return validation_seconds / training_seconds if training_seconds else 1 / 3


def _fixed_seconds(result: JsonObject) -> tuple[SecondsBySize, SecondsBySize]:
    """Return the seconds of each epoch beside its steps and validation, and of each first epoch of a new shape."""
    epochs = result["epochs"]
    if not any(row.get("where") for row in epochs):
        wall_seconds = result["seconds"].get("first step to last", 0.0)
        rest_seconds = wall_seconds - sum(sum(epoch_part_seconds(row).values()) for row in epochs)
        return ((0, max(0.0, rest_seconds) / len(epochs)),), ()
    rest_seconds = switch_seconds = 0.0
    switches = 0
    previous_shape = None
    for row in epochs:
        phase, part_seconds = schedule_row_of(result, row), epoch_part_seconds(row)
        shape = (phase["size"], phase["batch"], phase["copy"])
        rest_seconds += part_seconds.get("checkpoints", 0.0) + part_seconds.get("other", 0.0)
        switch_seconds += part_seconds.get("switches", 0.0)
        switches += shape != previous_shape
        previous_shape = shape
    return ((0, rest_seconds / len(epochs)),), ((0, switch_seconds / switches),) if switch_seconds else ()


def _trainers_start(result: JsonObject) -> StartSeconds:
    """Return the start of the trainers: what their attempt took beside the time from its first step to the last."""
    attempt_seconds = result["seconds"].get("attempt", 0.0)
    trainer_seconds = attempt_seconds - result["seconds"].get("first step to last", attempt_seconds)
    return StartSeconds(setup=0.0, trainers=max(0.0, trainer_seconds))


# --- forecast and actual --------------------------------------------------------------------------------------------

# For each compared term the terms of the forecast and the parts of the run that belong to it.
COMPARED_TERMS = {
    "steps": (("compute", "all-reduce", "optimizer", "logging"), ("steps",)),
    "loader": (("loader",), ("waits",)),
    "validation": (("validation",), ("validation",)),
    "fixed": (("fixed",), ("switches", "checkpoints", "other")),
}


def compare_with_run(
    forecast: JsonObject, result: JsonObject, start: StartSeconds | None = None
) -> list[dict[str, Any]]:
    """Return a row for each term of a forecast (`Forecast.to_json`) beside what the run took.

    A row has "term", "forecast" and "actual" in seconds, and "error", the share by which the forecast is too long. The
    last row is the sum. The steps are one term: what is sent within them cannot be told apart. A run that ended early,
    at its target, is compared with the forecast of the epochs that it ran. `start` counts where the breakdown of the
    result has no start. Raises the errors of `calibrate`.
    """
    forecast_seconds = terms_until(forecast, int(result["epochs"][-1]["epoch"]))
    actual_seconds = defaultdict[str, float](float)
    for row in result["epochs"]:
        for part, seconds in epoch_part_seconds(row).items():
            actual_seconds[part] += seconds
    if not any(row.get("where") for row in result["epochs"]):
        wall_seconds = result["seconds"].get("first step to last", 0.0)
        actual_seconds["other"] = max(0.0, wall_seconds - sum(actual_seconds.values()))
    measured_start = (result.get("where") or {}).get("start")
    actual_start = sum(measured_start.values()) if measured_start else (start or _trainers_start(result)).total
    rows = [
        (name, sum(forecast_seconds.get(term, 0.0) for term in terms), sum(actual_seconds[part] for part in parts))
        for name, (terms, parts) in COMPARED_TERMS.items()
    ]
    rows.append(("start", forecast_seconds.get("start", 0.0), actual_start))
    return list(_with_total_row(rows))


def terms_until(forecast: JsonObject, epoch: int) -> dict[str, float]:
    """Return the seconds by term of a forecast (`Forecast.to_json`) for its first epochs.

    Of a phase that is cut, the terms count in proportion to its epochs.
    """
    phases = forecast.get("phases") or []
    if not phases or epoch >= phases[-1]["end"]:
        return dict(forecast["terms"])
    term_seconds = dict.fromkeys(forecast["terms"], 0.0) | {"start": forecast["terms"].get("start", 0.0)}
    for phase in phases:
        share = min(1.0, max(0, epoch - phase["start"]) / (phase["end"] - phase["start"]))
        for term, seconds in phase["terms"].items():
            term_seconds[term] = term_seconds.get(term, 0.0) + share * seconds
    return term_seconds


def _with_total_row(rows: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    total = ("all", sum(forecast for _, forecast, _ in rows), sum(actual for _, _, actual in rows))
    for term, forecast, actual in [*rows, total]:
        error = forecast / actual - 1 if actual > 0 else None
        yield {"term": term, "forecast": forecast, "actual": actual, "error": error}
