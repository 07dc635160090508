"""Does a record's JSON add up by itself? What is wrong with it, in order, each as a line that names the epoch. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.recipe.schedule import Epoch, Schedule
from train.recipe.schema import Recipe
from train.recipe.target import Target
from train.tools.filesystem import json_roundtrip

from . import writers
from .writers import JsonMapping

EPOCH_SLACK_SECONDS, EPOCH_SLACK_FRACTION = (
    3.0,
    0.05,
)  # seconds, and share of its time, that an epoch may take beside its steps and validation
CLOCK_TOLERANCE_SECONDS = 1.0  # seconds by which two clocks may tell the same moment
MAX_EPOCHS = 100_000  # no run has more; a schedule of more takes for ever to lay out
ACCURACY_FIELD_PAIRS = (
    ("top1", "top5"),
    ("top1_square", "top5_square"),
)  # of the view that counts, and of the square centre
INVALID_ACCURACIES_MESSAGE = "top-1 {} and top-5 {}{} are no accuracies in percent, the first at most the second"


def check_entry(entry: JsonMapping) -> Iterator[str]:
    """Yield what is wrong within a JSON: fields, steps, rates, times, cost, target."""
    missing = [name for name in writers.ENTRY_FIELDS if name not in entry]
    if missing:
        yield f"the fields {', '.join(missing)} are missing"
        return
    misc = entry["misc"]
    yield from check_no_negative_seconds(misc, "misc")
    rows = misc["epochs"]
    recipe, images = Recipe.from_json(misc["recipe"]), misc["images"]["train"]
    if recipe.epochs > MAX_EPOCHS:
        yield f"misc.recipe: {recipe.epochs} epochs; no run has more than {MAX_EPOCHS}"
        return
    schedule = Schedule(recipe, images, misc["gpus"], misc["max_steps"])
    done = 0
    for place, row in enumerate(rows):
        done += row["steps"]
        yield from check_epoch_steps(row, schedule, place, done)
        yield from check_accuracies(row, misc["images"]["val"])
        yield from check_validation_view(row, schedule.epochs[place] if place < len(schedule.epochs) else None)
    yield from check_epoch_seconds(misc)
    if json_roundtrip(writers.executed_phases(rows, misc["recipe"])) != misc["schedule"]:
        yield "misc.schedule is not what the epochs add up to"
    for name, told in (("optimizer", "optim"), ("comm", "comm"), ("seed", "seed")):
        if misc[name] != misc["recipe"][told]:
            yield f"misc.{name} is not the recipe's"
    if entry["model"] != recipe.model.name:
        yield f"model {entry['model']}: the recipe has {recipe.model.name}"
    yield from check_cost(entry)
    yield from check_target(misc["target"], rows)


def check_no_negative_seconds(value: Any, path: str) -> Iterator[str]:
    """Yield each number of seconds below zero, by its place."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, one in pairs:
        place = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}"
        if isinstance(one, int | float) and "seconds" in str(name) and one < 0:
            yield f"{place} is {one:g}; no time is below zero"
        yield from check_no_negative_seconds(one, place)


def check_epoch_steps(row: JsonMapping, schedule: Schedule, index: int, steps_so_far: int) -> Iterator[str]:
    """Yield what is wrong with an epoch's steps, sizes, rates and speed; `done` are the steps until its end."""
    where, batch, images = f"epoch {row['epoch']}", row["global_batch"], schedule.images
    if index >= len(schedule.epochs) or row["epoch"] != schedule.epochs[index].number + 1:
        yield f"{where}: is not epoch number {index + 1} of the recipe's schedule"
        return
    planned = schedule.epochs[index]
    if (row["size"], batch) != (planned.scheduled_phase.phase.size, planned.scheduled_phase.global_batch):
        yield (
            f"{where}: {row['size']} pixels and a batch of {batch}; by the recipe {planned.scheduled_phase.phase.size} and "
            f"{planned.scheduled_phase.global_batch}"
        )
        return
    full = math.ceil(images / batch)
    if row["steps"] != planned.steps or (schedule.max_steps is None and row["steps"] != full):
        yield f"{where}: {row['steps']} steps; {images} images by {batch} are {min(full, planned.steps)}"
    if row["step"] != steps_so_far:
        yield f"{where}: ends at step {row['step']}; the steps of the epochs add up to {steps_so_far}"
    if row["images"] != (seen := min(images, row["steps"] * batch)):
        yield f"{where}: {row['images']} images; {row['steps']} steps of {batch} have {seen}"
    for name, told, step in zip(("first", "last"), row["lr"], (0, planned.steps - 1), strict=True):
        if told is not None and not math.isclose(told, planned.lr_at(step), rel_tol=1e-9, abs_tol=1e-15):
            yield f"{where}: the rate of its {name} step is {told:.6g}; by the recipe {planned.lr_at(step):.6g}"
    if not math.isclose(row["images_per_second"] * row["train_seconds"], row["images"], rel_tol=1e-6):
        yield (
            f"{where}: {row['images_per_second']:.6g} images/s for {row['train_seconds']:.6g} s are not "
            f"{row['images']} images"
        )


def check_accuracies(row: JsonMapping, val_images: int) -> Iterator[str]:
    """Yield what is wrong with an epoch's accuracies, of which each is a whole number of images and all or none are."""
    where = f"epoch {row['epoch']}"
    if all(row[name] is None for pair in ACCURACY_FIELD_PAIRS for name in pair):
        return
    if row["val_images"] != val_images:
        yield f"{where}: validated on {row['val_images']} images of {val_images}"
    for pair in ACCURACY_FIELD_PAIRS:
        first, five = (row[name] for name in pair)
        if None in (first, five) or not 0 <= first <= five <= 100:
            yield f"{where}: {INVALID_ACCURACIES_MESSAGE.format(first, five, '' if pair is ACCURACY_FIELD_PAIRS[0] else ' of the square')}"
            return
        for name in pair:
            hits = row[name] * val_images / 100
            if abs(hits - round(hits)) > 1e-6 * max(1.0, hits):
                yield f"{where}: {name} {row[name]:.6g} % of {val_images} images is no whole number of them"


def check_validation_view(row: JsonMapping, planned_epoch: Epoch | None) -> Iterator[str]:
    """Yield where an epoch was not seen as its phase asks for, or its square centre is not what it was judged by."""
    where, view = f"epoch {row['epoch']}", row["view"]
    if row["top1"] is None:
        if view is not None:
            yield f"{where}: view {view} without a validation"
        return
    if planned_epoch and view != (asked := "rect" if planned_epoch.scheduled_phase.phase.rect_val else "square"):
        yield f"{where}: view {view}; by the recipe {asked}"
    for name, square in zip(*ACCURACY_FIELD_PAIRS, strict=True) if view == "square" else ():
        if row[name] != row[square]:
            yield f"{where}: {name} {row[name]:.6g} and {square} {row[square]:.6g} are of the same view"


def check_epoch_seconds(misc: JsonMapping) -> Iterator[str]:
    """Yield where the clock does not go on as steps, validations and losses say."""
    before, step = misc["seconds_to_first_step"], 0
    for row in misc["epochs"]:
        where, needs = f"epoch {row['epoch']}", row["train_seconds"] + row["val_seconds"]
        lost = [one["seconds_lost"] for one in misc["attempts"][1:] if step <= one["first_step"] <= row["step"]]
        took = row["seconds"] - (before or 0.0)
        allowed = needs * (1 + EPOCH_SLACK_FRACTION) + EPOCH_SLACK_SECONDS + sum(one or 0.0 for one in lost)
        if took < needs * (1 - EPOCH_SLACK_FRACTION) - CLOCK_TOLERANCE_SECONDS or (
            before is not None and None not in lost and took > allowed
        ):
            losses = f" and losses of {sum(one or 0.0 for one in lost):.1f} s" if lost else ""
            yield (
                f"{where}: the clock says {took:.1f} s for {row['train_seconds']:.1f} s of steps, "
                f"{row['val_seconds']:.1f} s of validation{losses}"
            )
        before, step = row["seconds"], row["step"]


def check_cost(entry: JsonMapping) -> Iterator[str]:
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


def check_target(target: JsonMapping | None, rows: Sequence[JsonMapping]) -> Iterator[str]:
    """Yield where a target was not reached as it is told."""
    if target is None:
        return
    metric = target["metric"]
    hit = Target(metric, target["goal"]).first_epoch_reaching(rows)
    reached = hit["epoch"] if hit else None
    if target["reached"] != (hit is not None) or target["epoch"] != reached:
        yield f"misc.target: epoch {target['epoch']} for {metric} {target['goal']:g}; by the rows it is epoch {reached}"
    elif hit and target["seconds"] is not None and abs(target["seconds"] - hit["seconds"]) > 0.01:
        yield f"misc.target: {target['seconds']:.2f} s; epoch {hit['epoch']} ended at {hit['seconds']:.2f}"
    elif hit and target["seconds"] is not None and abs(60 * target["minutes"] - target["seconds"]) > 0.01:
        yield f"misc.target: {target['minutes']:.4f} minutes are not {target['seconds']:.2f} s"
