"""Does a record add up? What is wrong with one, in order, each as a line that names the row. Pure."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.files import plain
from train.recipe import Recipe
from train.schedule import Schedule

from . import record
from .record import Row

SLACK, SHARE = 3.0, 0.05  # seconds, and share of its time, that an epoch may take beside its steps and validation
CLOSE = 1.0  # seconds by which two clocks may tell the same moment
LOG = ":::MLLOG "
CHANGING = ("author", "authorEmail", "codeURL", "timestamp", "logFilename", "version")  # who wrote it down, and when
BILLED = ("seconds", "dollars", "all")  # of a machine: its bill goes on, and spot prices are known later
METRICS = ("top1", "top5")
ACCURACIES = "top-1 {} and top-5 {} are no accuracies in percent, the first at most the second"


def problems(
    table: str | None = None, entry: Row | None = None, log: str | None = None, ran: Row | None = None
) -> Iterator[str]:
    """Yield what is wrong with a TSV, its JSON and a log, of which some may be missing; `ran` is what was run.

    Raises `KeyError`, `TypeError` or `ValueError` where a JSON or log is not of our making.
    """
    known = entry if entry is not None else record.entry(ran) if ran else None
    if table is not None and (wrong := list(of_table(table))):
        yield from wrong
        return
    if entry is not None:
        yield from of_entry(entry)
    if table is not None and known is not None:
        yield from of_both(table, known)
    if log is not None:
        yield from of_log(log)
    if ran is None:
        return
    if entry is not None:
        yield from of_run(entry, ran)
    if log is not None:
        yield from of_lines(log, record.mlperf(ran))
    yield from of_times(ran)


# --- the TSV --------------------------------------------------------------------------------------------------------


def numbers(table: str) -> list[list[float]]:
    """Return the numbers of a TSV's rows. Raises `ValueError` where there are none."""
    return [[float(cell) for cell in line.split("\t")] for line in table.splitlines()[1:]]


def of_table(table: str) -> Iterator[str]:
    """Yield what is wrong within a TSV: columns, order, accuracies."""
    head, *lines = table.splitlines() or [""]
    if head != record.HEADER:
        yield f"the first line is {head!r}, not the columns {record.HEADER!r}"
        return
    if not lines:
        yield "there are no rows below the columns"
    before = (0.0, 0.0)
    for place, line in enumerate(lines, 1):
        cells = line.split("\t")
        try:
            epoch, hours, top1, top5 = map(float, cells)
        except ValueError:
            yield f"row {place}: {line!r} is not four numbers with tabs between them"
            return
        where = f"row {place} (epoch {cells[0]})"
        if not all(map(math.isfinite, (epoch, hours, top1, top5))) or epoch != int(epoch):
            yield f"{where}: {line!r} is not a whole number and three finite ones"
        if epoch <= before[0]:
            yield f"{where}: comes after epoch {before[0]:g}"
        if hours <= before[1]:
            yield f"{where}: {hours:g} hours come after {before[1]:g}"
        if not 0 <= top1 <= top5 <= 100:
            yield f"{where}: {ACCURACIES.format(top1, top5)}"
        before = epoch, hours


def of_both(table: str, entry: Row) -> Iterator[str]:
    """Yield where a TSV says something else than its JSON."""
    told = [row for row in entry["misc"]["epochs"] if row["top1"] is not None]
    mine = numbers(table)
    for place, (row, (epoch, hours, top1, top5)) in enumerate(zip(told, mine, strict=False), 1):
        where = f"row {place} (epoch {epoch:g})"
        if row["epoch"] != epoch:
            yield f"{where}: the run validated epoch {row['epoch']} there"
        if abs(3600 * hours - row["seconds"]) > 0.01:
            yield f"{where}: {hours:g} hours; the run says {row['seconds'] / 3600:.6f}"
        for name, value in zip(METRICS, (top1, top5), strict=True):
            if abs(row[name] - value) > 1e-4:
                yield f"{where}: {name} {value:g}; the run says {row[name]:.4f}"
    if len(mine) != len(told):
        yield f"row {min(len(mine), len(told)) + 1}: the run validated {len(told)} epochs, the table has {len(mine)}"


# --- the JSON -------------------------------------------------------------------------------------------------------


def of_entry(entry: Row) -> Iterator[str]:
    """Yield what is wrong within a JSON: fields, steps, rates, times, cost, target."""
    missing = [name for name in record.FIELDS if name not in entry]
    if missing:
        yield f"the fields {', '.join(missing)} are missing"
        return
    misc = entry["misc"]
    rows = misc["epochs"]
    recipe, images = Recipe.from_json(misc["recipe"]), misc["images"]["train"]
    schedule = Schedule(recipe, images, misc["gpus"], misc["max_steps"])
    done = 0
    for place, row in enumerate(rows):
        done += row["steps"]
        yield from of_steps(row, schedule, place, done)
        yield from of_accuracies(row, misc["images"]["val"])
    yield from of_seconds(misc)
    if plain(record.executed(rows, misc["recipe"])) != misc["schedule"]:
        yield "misc.schedule is not what the epochs add up to"
    for name, told in (("optimizer", "optim"), ("comm", "comm"), ("seed", "seed")):
        if misc[name] != misc["recipe"][told]:
            yield f"misc.{name} is not the recipe's"
    if entry["model"] != recipe.model.name:
        yield f"model {entry['model']}: the recipe has {recipe.model.name}"
    yield from of_cost(entry)
    yield from of_target(misc["target"], rows)


def of_steps(row: Row, schedule: Schedule, place: int, done: int) -> Iterator[str]:
    """Yield what is wrong with an epoch's steps, sizes, rates and speed; `done` are the steps until its end."""
    where, batch, images = f"epoch {row['epoch']}", row["global_batch"], schedule.images
    if place >= len(schedule.epochs) or row["epoch"] != schedule.epochs[place].number + 1:
        yield f"{where}: is not epoch number {place + 1} of the recipe's schedule"
        return
    planned = schedule.epochs[place]
    if (row["size"], batch) != (planned.row.phase.size, planned.row.global_batch):
        yield (
            f"{where}: {row['size']} pixels and a batch of {batch}; by the recipe {planned.row.phase.size} and "
            f"{planned.row.global_batch}"
        )
        return
    full = math.ceil(images / batch)
    if row["steps"] != planned.steps or (schedule.max_steps is None and row["steps"] != full):
        yield f"{where}: {row['steps']} steps; {images} images by {batch} are {min(full, planned.steps)}"
    if row["step"] != done:
        yield f"{where}: ends at step {row['step']}; the steps of the epochs add up to {done}"
    if row["images"] != (seen := min(images, row["steps"] * batch)):
        yield f"{where}: {row['images']} images; {row['steps']} steps of {batch} have {seen}"
    for name, told, step in zip(("first", "last"), row["lr"], (0, planned.steps - 1), strict=True):
        if told is not None and not math.isclose(told, planned.rate(step), rel_tol=1e-9, abs_tol=1e-15):
            yield f"{where}: the rate of its {name} step is {told:.6g}; by the recipe {planned.rate(step):.6g}"
    if not math.isclose(row["images_per_second"] * row["train_seconds"], row["images"], rel_tol=1e-6):
        yield (
            f"{where}: {row['images_per_second']:.6g} images/s for {row['train_seconds']:.6g} s are not "
            f"{row['images']} images"
        )


def of_accuracies(row: Row, images: int) -> Iterator[str]:
    """Yield what is wrong with an epoch's accuracies, each of which is a whole number of images."""
    where, told = f"epoch {row['epoch']}", [row[name] for name in METRICS]
    if told == [None, None]:
        return
    if None in told or not 0 <= told[0] <= told[1] <= 100:
        yield f"{where}: {ACCURACIES.format(*told)}"
        return
    if row["val_images"] != images:
        yield f"{where}: validated on {row['val_images']} images of {images}"
    for name, value in zip(METRICS, told, strict=True):
        hits = value * images / 100
        if abs(hits - round(hits)) > 1e-6 * max(1.0, hits):
            yield f"{where}: {name} {value:.6g} % of {images} images is no whole number of them"


def of_seconds(misc: Row) -> Iterator[str]:
    """Yield where the clock does not go on as steps, validations and losses say."""
    before, step = misc["seconds_to_first_step"], 0
    for row in misc["epochs"]:
        where, needs = f"epoch {row['epoch']}", row["train_seconds"] + row["val_seconds"]
        lost = [one["seconds_lost"] for one in misc["attempts"][1:] if step <= one["first_step"] <= row["step"]]
        took = row["seconds"] - (before or 0.0)
        allowed = needs * (1 + SHARE) + SLACK + sum(one or 0.0 for one in lost)
        if took < needs * (1 - SHARE) - CLOSE or (before is not None and None not in lost and took > allowed):
            losses = f" and losses of {sum(one or 0.0 for one in lost):.1f} s" if lost else ""
            yield (
                f"{where}: the clock says {took:.1f} s for {row['train_seconds']:.1f} s of steps, "
                f"{row['val_seconds']:.1f} s of validation{losses}"
            )
        before, step = row["seconds"], row["step"]


def of_cost(entry: Row) -> Iterator[str]:
    """Yield where hours and price do not make the cost, or the machines not the price."""
    misc, price = entry["misc"], entry["costPerHour"]
    told = [row["seconds"] for row in misc["epochs"] if row["top1"] is not None]
    if not told or abs(3600 * misc["hours"] - told[-1]) > 0.01:
        yield f"misc.hours {misc['hours']:g}: the last validated epoch ends at {told[-1] / 3600 if told else 0:.6f}"
    dollars = misc["cost"]["dollars"]
    if (price is None) != (dollars is None):
        yield f"costPerHour {price} and misc.cost.dollars {dollars}: one is known without the other"
    elif price is not None and not math.isclose(dollars, price * misc["hours"], rel_tol=1e-9, abs_tol=1e-9):
        yield f"misc.cost.dollars {dollars:.6g}: {misc['hours']:.6g} hours at {price:g} are {price * misc['hours']:.6g}"
    each = {one["name"]: one["price"] for one in misc["machines"]}
    prices = [each.get(name) for name in misc["at_work"]]
    known = [one for one in prices if one is not None]
    whole = sum(known) if known and len(known) == len(prices) else None
    if (price is None) != (whole is None) or (price is not None and not math.isclose(price, whole or 0.0)):
        yield f"costPerHour {price}: the machines at work cost {whole}"


def of_target(target: Row | None, rows: Sequence[Row]) -> Iterator[str]:
    """Yield where a target was not reached as it is told."""
    if target is None:
        return
    metric = target["metric"]
    hit = next((row for row in rows if row[metric] is not None and row[metric] >= target["goal"]), None)
    reached = hit["epoch"] if hit else None
    if target["reached"] != (hit is not None) or target["epoch"] != reached:
        yield f"misc.target: epoch {target['epoch']} for {metric} {target['goal']:g}; by the rows it is epoch {reached}"
    elif hit and target["seconds"] is not None and abs(target["seconds"] - hit["seconds"]) > 0.01:
        yield f"misc.target: {target['seconds']:.2f} s; epoch {hit['epoch']} ended at {hit['seconds']:.2f}"
    elif hit and target["seconds"] is not None and abs(60 * target["minutes"] - target["seconds"]) > 0.01:
        yield f"misc.target: {target['minutes']:.4f} minutes are not {target['seconds']:.2f} s"


# --- the log --------------------------------------------------------------------------------------------------------


def of_log(log: str) -> Iterator[str]:
    """Yield what is wrong within a log: its form, the order of times, what was begun and not ended."""
    before, open_ones = 0, list[str]()
    for place, line in enumerate(log.splitlines(), 1):
        try:
            said = json.loads(line.removeprefix(LOG)) if line.startswith(LOG) else None
        except ValueError:
            said = None
        if not isinstance(said, Mapping) or not {"time_ms", "event_type", "key", "value", "metadata"} <= said.keys():
            yield f"line {place}: is not {LOG.strip()} and a JSON object with time, type, key, value and metadata"
            return
        if said["time_ms"] < before:
            yield f"line {place} ({said['key']}): comes before the line above it"
        before = said["time_ms"]
        name = f"{said['key'].rpartition('_')[0]} {said['metadata'].get('epoch_num', '')}".strip()
        if said["event_type"] == record.START:
            open_ones.append(name)
        elif said["event_type"] == record.END:
            if name not in open_ones:
                yield f"line {place} ({said['key']}): ends what was not begun"
            else:
                open_ones.remove(name)
        if said["key"] == "eval_accuracy" and not 0 <= said["value"] <= said["metadata"].get("top5", 1) <= 1:
            yield f"line {place} (eval_accuracy): {said['value']} is no share of 1, or above its top-5"
    if open_ones:
        yield f"line {len(log.splitlines())}: {open_ones[0]} was begun and not ended"


def of_lines(log: str, told: str) -> Iterator[str]:
    """Yield the first line in which a log differs from what the run says."""
    mine, theirs = log.splitlines(), told.splitlines()
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False), 1):
        if one != other:
            yield f"line {place}: {one.removeprefix(LOG)}; the run says {other.removeprefix(LOG)}"
            return
    if len(mine) != len(theirs):
        yield f"line {min(len(mine), len(theirs)) + 1}: the log has {len(mine)} lines, the run says {len(theirs)}"


# --- the run --------------------------------------------------------------------------------------------------------


def of_run(entry: Row, ran: Row) -> Iterator[str]:
    """Yield where a JSON says something else than the run folder, by the place in it."""
    told = plain(record.entry(ran))
    differ = different(settled(entry), settled(told))
    if differ:
        yield f"{differ[0]} is {json.dumps(differ[1])}; the run says {json.dumps(differ[2])}"


def settled(entry: Row) -> dict[str, Any]:
    """Return what of a JSON does not change after the run, nor with who writes it down."""
    found = {name: one for name, one in entry.items() if name not in CHANGING}
    misc = {name: one for name, one in found["misc"].items() if name != "state"}
    machines = [{name: one for name, one in each.items() if name not in BILLED} for each in misc["machines"]]
    return {**found, "misc": {**misc, "machines": machines, "cost": {**misc["cost"], "billed": None}}}


def different(one: Any, other: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place in which two plain values differ, with both; None where they are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = [(f"{where}.{name}".lstrip("."), one.get(name), other.get(name)) for name in {**other, **one}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{where}[{place}]", *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else (where, one, other)
    return next((found for name, mine, its in pairs if (found := different(mine, its, name))), None)


def of_times(ran: Row) -> Iterator[str]:
    """Yield where the run folder itself tells the same moment twice, and differently."""
    last = ran["epochs"][-1]
    told = ran["result_seconds"]
    if told is not None and abs(told - last["clock"]) > CLOSE:
        yield f"epoch {last['epoch']}: ends after {last['clock']:.2f} s; result.json says {told:.2f}"
    for row in ran["epochs"]:
        if row["noted"] is not None and abs(row["noted"] - ran["begun"] - row["clock"]) > CLOSE:
            yield f"epoch {row['epoch']}: ends after {row['clock']:.2f} s; the metrics noted it at {row['noted']:.2f}"
