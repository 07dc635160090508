"""After a run: its constants, and the forecast of it beside what it took. Pure functions over result.json."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .constants import BySize, Constants
from .hardware import RECTANGLE, Network

WAITED = 0.05  # share of a phase's steps that must be waits, for the loader's speed to be known from it
FREE = 1e9  # Gbit/s: what is sent is in the measured steps already
# of a machine, before its trainers start
BEFORE = ("booting", "connected", "code", "environment", "checks", "network", "agent", "data", "fetch", "standby")
ONCE = ("data", "indexing")
Row = Mapping[str, Any]


def world(result: Row) -> int:
    """Return how many processes trained: the job's result counts those of a machine, the trainers' own all."""
    return int(result["procs"]) * int(result.get("machines", 1))


def parts(row: Row) -> dict[str, float]:
    """Return an epoch's seconds by part: "steps", "waits", "validation", "switches", "checkpoints", "other"."""
    if row.get("where"):
        return {name: float(seconds) for name, seconds in row["where"].items()}
    return {"steps": row["train_seconds"], "validation": row["val_seconds"]}


def phase_of(result: Row, row: Row) -> Row:
    """Return the schedule's row that an epoch belongs to. Raises `ValueError` when there is none."""
    for phase in result["schedule"]:
        if phase["start"] < row["epoch"] <= phase["end"]:
            return dict(phase)
    raise ValueError(f"epoch {row['epoch']} stands in no row of the schedule")


def measured(result: Row, name: str = "") -> Constants:
    """Return the constants of a run that is done, from its result.json; `name` is what they are called by.

    What a step sends between GPUs is in its seconds, and taken to be the same on other numbers of them. Raises
    `ValueError`, `KeyError`, `TypeError` when there is not enough in it.
    """
    steps, speeds = _chunks(result), dict[tuple[int, int], float]()
    for (copy, size), (images, seconds, waits) in _loads(result).items():
        if waits > WAITED * seconds:
            speeds[copy, size] = images / seconds / int(result.get("machines", 1))
    if not steps:
        raise ValueError("it made no step")
    before, trainers = _start(result, once=False)
    epoch, switch = _fixed(result)
    return Constants(
        source=name or str(result.get("job") or result["recipe"]),
        chunks=tuple((size, batch, seconds) for (size, batch), seconds in sorted(steps.items())),
        network=Network(FREE, 0.0), bus=FREE, overlap=False, forward=_forward(result, steps),
        feeds=tuple((copy, size, speed) for (copy, size), speed in sorted(speeds.items())),
        epoch=epoch, switch=switch, start=trainers, setup=before,
    )  # fmt: skip


def _chunks(result: Row) -> dict[tuple[int, int], float]:
    """Seconds of a full batch of one GPU by size and batch, the waits for images left out."""
    rounds = math.ceil(int(result["schedule_gpus"]) / world(result))
    seconds, full = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], float](float)
    for row in result["epochs"]:
        phase = phase_of(result, row)
        key = (int(row["size"]), int(phase["batch"]))
        seconds[key] += parts(row)["steps"]
        full[key] += row["train_images"] / row["global_batch"]
    return {key: seconds[key] / full[key] / rounds for key in seconds if full[key] and seconds[key]}


def _loads(result: Row) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Images, seconds of steps with their waits, and those waits, by copy (0: full size) and size."""
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for row in result["epochs"]:
        key, one = (int(phase_of(result, row)["copy"] or 0), int(row["size"])), parts(row)
        images, seconds, waits = found.get(key, (0.0, 0.0, 0.0))
        waited = one.get("waits", 0.0)
        found[key] = images + row["train_images"], seconds + one["steps"] + waited, waits + waited
    return found


def _forward(result: Row, steps: Mapping[tuple[int, int], float]) -> float:
    """A validation's pass over an image beside a training step's."""
    took = whole = 0.0
    for row in result["epochs"]:
        phase = phase_of(result, row)
        seconds = steps.get((int(row["size"]), int(phase["batch"])))
        if row.get("val_images") and seconds:
            views = 1 + (RECTANGLE if phase["rect_val"] else 0.0)
            took += parts(row)["validation"] * world(result)
            whole += row["val_images"] * views * seconds / phase["batch"]
    return took / whole if whole else 1 / 3


def _fixed(result: Row) -> tuple[BySize, BySize]:
    """Seconds of each epoch beside its steps and validation, and of each first one of a new shape."""
    if not any(row.get("where") for row in result["epochs"]):
        took = result["seconds"].get("first step to last", 0.0)
        left = took - sum(sum(parts(row).values()) for row in result["epochs"])
        return ((0, max(0.0, left) / len(result["epochs"])),), ()
    rest = switches = 0.0
    fresh, before = 0, None
    for row in result["epochs"]:
        phase, one = phase_of(result, row), parts(row)
        kind = (phase["size"], phase["batch"], phase["copy"])
        rest += one.get("checkpoints", 0.0) + one.get("other", 0.0)
        switches += one.get("switches", 0.0)
        fresh += kind != before
        before = kind
    return ((0, rest / len(result["epochs"])),), ((0, switches / fresh),) if switches else ()


def _start(result: Row, once: bool = True) -> tuple[float, float]:
    """Seconds before the trainers of the slowest machine, and from their start to the first step; with what is done
    but `once` for a set: drawing it, looking through its folders.
    """
    found = [dict(one) for one in dict(result.get("setup") or {}).values() if one]
    machines = [{name: one[name] for name in one if once or name not in ONCE} for one in found]
    if machines:
        slowest = max(machines, key=lambda one: sum(one.values()))
        before = sum(seconds for step, seconds in slowest.items() if step in BEFORE)
        return before, sum(slowest.values()) - before
    seconds = result["seconds"]
    return 0.0, max(0.0, seconds.get("attempt", 0.0) - seconds.get("first step to last", seconds.get("attempt", 0.0)))


# --- forecast and actual --------------------------------------------------------------------------------------------

ROWS = {
    "steps": (("compute", "all-reduce", "optimizer", "logging"), ("steps",)),
    "loader": (("loader",), ("waits",)),
    "validation": (("validation",), ("validation",)),
    "fixed": (("fixed",), ("switches", "checkpoints", "other")),
}


def compare(forecast: Row, result: Row) -> list[dict[str, Any]]:
    """Return a row for each term of a forecast (`Forecast.to_json`) beside what the run took: "term", "forecast" and
    "actual" in seconds, "error" as the share that the forecast is too long.

    The steps are one term: what is sent within them cannot be told apart. Of a run that ended early, at its target,
    only the forecast of what was run is held against it. Raises as `measured` does.
    """
    terms, took = until(forecast, int(result["epochs"][-1]["epoch"])), defaultdict[str, float](float)
    for row in result["epochs"]:
        for name, seconds in parts(row).items():
            took[name] += seconds
    if not any(row.get("where") for row in result["epochs"]):
        whole = result["seconds"].get("first step to last", 0.0)
        took["other"] = max(0.0, whole - sum(took.values()))
    begun = (result.get("where") or {}).get("start")
    start = sum(begun.values()) if begun else sum(_start(result))
    rows = [
        (name, sum(terms.get(one, 0.0) for one in told), sum(took[one] for one in real))
        for name, (told, real) in ROWS.items()
    ]
    rows.append(("start", terms.get("start", 0.0), start))
    return list(_with_all(rows))


def until(forecast: Row, epoch: int) -> dict[str, float]:
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


def _with_all(rows: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    for name, told, real in [*rows, ("all", sum(one[1] for one in rows), sum(one[2] for one in rows))]:
        yield {"term": name, "forecast": told, "actual": real, "error": told / real - 1 if real > 0 else None}
