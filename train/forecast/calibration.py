"""After a run: its constants, and the forecast of it beside what it took. Pure functions over result.json."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .constants import Constants, SecondsBySize
from .hardware import RECTANGLE_PIXEL_RATIO, NetworkSpec

MIN_WAIT_SHARE = 0.05  # share of a phase's steps that must be waits, for the loader's speed to be known from it
UNLIMITED_GBIT = 1e9  # Gbit/s: what is sent is in the measured steps already
# of a machine, before its trainers start
SETUP_STEPS = ("booting", "connected", "code", "environment", "checks", "network", "agent", "data", "fetch", "standby")
ONE_TIME_STEPS = ("data", "indexing")
JsonObject = Mapping[str, Any]


def process_count(result: JsonObject) -> int:
    """Return how many processes trained: the job's result counts those of a machine, the trainers' own all."""
    return int(result["procs"]) * int(result.get("machines", 1))


def epoch_part_seconds(row: JsonObject) -> dict[str, float]:
    """Return an epoch's seconds by part: "steps", "waits", "validation", "switches", "checkpoints", "other"."""
    if row.get("where"):
        return {name: float(seconds) for name, seconds in row["where"].items()}
    return {"steps": row["train_seconds"], "validation": row["val_seconds"]}


def schedule_row_of(result: JsonObject, row: JsonObject) -> JsonObject:
    """Return the schedule's row that an epoch belongs to. Raises `ValueError` when there is none."""
    for phase in result["schedule"]:
        if phase["start"] < row["epoch"] <= phase["end"]:
            return dict(phase)
    raise ValueError(f"epoch {row['epoch']} stands in no row of the schedule")


def calibrate(result: JsonObject, source: str = "") -> Constants:
    """Return the constants of a run that is done, from its result.json; `name` is what they are called by.

    What a step sends between GPUs is in its seconds, and taken to be the same on other numbers of them. Raises
    `ValueError`, `KeyError`, `TypeError` when there is not enough in it.
    """
    steps, speeds = _batch_seconds(result), dict[tuple[int, int], float]()
    for (copy, size), (images, seconds, waits) in _loader_totals(result).items():
        if waits > MIN_WAIT_SHARE * seconds:
            speeds[copy, size] = images / seconds / int(result.get("machines", 1))
    if not steps:
        raise ValueError("it made no step")
    before, trainers = _startup_seconds(result, include_one_time=False)
    epoch, switch = _fixed_seconds(result)
    return Constants(
        source=source or str(result.get("job") or result["recipe"]),
        batch_timings=tuple((size, batch, seconds) for (size, batch), seconds in sorted(steps.items())),
        network=NetworkSpec(UNLIMITED_GBIT, 0.0), bus_gbit=UNLIMITED_GBIT, overlap=False, forward_share=_forward_share(result, steps),
        loader_speeds=tuple((copy, size, speed) for (copy, size), speed in sorted(speeds.items())),
        epoch_seconds=epoch, switch_seconds=switch, startup_seconds=trainers, setup_seconds=before,
    )  # fmt: skip


def _batch_seconds(result: JsonObject) -> dict[tuple[int, int], float]:
    """Seconds of a full batch of one GPU by size and batch, the waits for images left out."""
    rounds = math.ceil(int(result["schedule_gpus"]) / process_count(result))
    seconds, full = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], float](float)
    for row in result["epochs"]:
        phase = schedule_row_of(result, row)
        key = (int(row["size"]), int(phase["batch"]))
        seconds[key] += epoch_part_seconds(row)["steps"]
        full[key] += row["train_images"] / row["global_batch"]
    return {key: seconds[key] / full[key] / rounds for key in seconds if full[key] and seconds[key]}


def _loader_totals(result: JsonObject) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Images, seconds of steps with their waits, and those waits, by copy (0: full size) and size."""
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for row in result["epochs"]:
        key, one = (int(schedule_row_of(result, row)["copy"] or 0), int(row["size"])), epoch_part_seconds(row)
        images, seconds, waits = found.get(key, (0.0, 0.0, 0.0))
        waited = one.get("waits", 0.0)
        found[key] = images + row["train_images"], seconds + one["steps"] + waited, waits + waited
    return found


def _forward_share(result: JsonObject, batch_seconds: Mapping[tuple[int, int], float]) -> float:
    """A validation's pass over an image beside a training step's."""
    took = whole = 0.0
    for row in result["epochs"]:
        phase = schedule_row_of(result, row)
        seconds = batch_seconds.get((int(row["size"]), int(phase["batch"])))
        if row.get("val_images") and seconds:
            views = 1 + (RECTANGLE_PIXEL_RATIO if phase["rect_val"] else 0.0)
            took += epoch_part_seconds(row)["validation"] * process_count(result)
            whole += row["val_images"] * views * seconds / phase["batch"]
    return took / whole if whole else 1 / 3


def _fixed_seconds(result: JsonObject) -> tuple[SecondsBySize, SecondsBySize]:
    """Seconds of each epoch beside its steps and validation, and of each first one of a new shape."""
    if not any(row.get("where") for row in result["epochs"]):
        took = result["seconds"].get("first step to last", 0.0)
        left = took - sum(sum(epoch_part_seconds(row).values()) for row in result["epochs"])
        return ((0, max(0.0, left) / len(result["epochs"])),), ()
    rest = switches = 0.0
    fresh, before = 0, None
    for row in result["epochs"]:
        phase, one = schedule_row_of(result, row), epoch_part_seconds(row)
        kind = (phase["size"], phase["batch"], phase["copy"])
        rest += one.get("checkpoints", 0.0) + one.get("other", 0.0)
        switches += one.get("switches", 0.0)
        fresh += kind != before
        before = kind
    return ((0, rest / len(result["epochs"])),), ((0, switches / fresh),) if switches else ()


def _startup_seconds(result: JsonObject, include_one_time: bool = True) -> tuple[float, float]:
    """Seconds before the trainers of the slowest machine, and from their start to the first step; with what is done
    but `once` for a set: drawing it, looking through its folders.
    """
    found = [dict(one) for one in dict(result.get("setup") or {}).values() if one]
    machines = [{name: one[name] for name in one if include_one_time or name not in ONE_TIME_STEPS} for one in found]
    if machines:
        slowest = max(machines, key=lambda one: sum(one.values()))
        before = sum(seconds for step, seconds in slowest.items() if step in SETUP_STEPS)
        return before, sum(slowest.values()) - before
    seconds = result["seconds"]
    return 0.0, max(0.0, seconds.get("attempt", 0.0) - seconds.get("first step to last", seconds.get("attempt", 0.0)))


# --- forecast and actual --------------------------------------------------------------------------------------------

COMPARED_TERMS = {
    "steps": (("compute", "all-reduce", "optimizer", "logging"), ("steps",)),
    "loader": (("loader",), ("waits",)),
    "validation": (("validation",), ("validation",)),
    "fixed": (("fixed",), ("switches", "checkpoints", "other")),
}


def compare_with_run(forecast: JsonObject, result: JsonObject) -> list[dict[str, Any]]:
    """Return a row for each term of a forecast (`Forecast.to_json`) beside what the run took: "term", "forecast" and
    "actual" in seconds, "error" as the share that the forecast is too long.

    The steps are one term: what is sent within them cannot be told apart. Of a run that ended early, at its target,
    only the forecast of what was run is held against it. Raises as `measured` does.
    """
    terms, took = terms_until(forecast, int(result["epochs"][-1]["epoch"])), defaultdict[str, float](float)
    for row in result["epochs"]:
        for name, seconds in epoch_part_seconds(row).items():
            took[name] += seconds
    if not any(row.get("where") for row in result["epochs"]):
        whole = result["seconds"].get("first step to last", 0.0)
        took["other"] = max(0.0, whole - sum(took.values()))
    begun = (result.get("where") or {}).get("start")
    start = sum(begun.values()) if begun else sum(_startup_seconds(result))
    rows = [
        (name, sum(terms.get(one, 0.0) for one in told), sum(took[one] for one in real))
        for name, (told, real) in COMPARED_TERMS.items()
    ]
    rows.append(("start", terms.get("start", 0.0), start))
    return list(_with_total_row(rows))


def terms_until(forecast: JsonObject, epoch: int) -> dict[str, float]:
    """Return the terms of a forecast (`Forecast.to_json`) for its first epochs, in seconds; a phase that is cut has its
    share of them.
    """
    phases = forecast.get("phases") or []
    if not phases or epoch >= phases[-1]["end"]:
        return dict(forecast["terms"])
    found = dict.fromkeys(forecast["terms"], 0.0) | {"start": forecast["terms"].get("start", 0.0)}
    for phase in phases:
        share = min(1.0, max(0, epoch - phase["start"]) / (phase["end"] - phase["start"]))
        for name, seconds in phase["terms"].items():
            found[name] = found.get(name, 0.0) + share * seconds
    return found


def _with_total_row(rows: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    for name, told, real in [*rows, ("all", sum(one[1] for one in rows), sum(one[2] for one in rows))]:
        yield {"term": name, "forecast": told, "actual": real, "error": told / real - 1 if real > 0 else None}
