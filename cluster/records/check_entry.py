"""Checks whether DAWNBench's JSON of a run is consistent by itself. Each problem is one line that names the epoch."""

import math
from collections.abc import Iterator

from train.recipe.schedule import Epoch, Schedule
from train.recipe.schema import Recipe
from train.tools.filesystem import json_roundtrip

from . import writers
from .differences import differences, last_name, pairs
from .writers import JsonMapping

# The time that an epoch may take beyond its steps and its validation: seconds, plus a fraction of its own time.
EPOCH_SLACK_SECONDS = 3.0
EPOCH_SLACK_FRACTION = 0.05
CLOCK_TOLERANCE_SECONDS = 1.0  # by which two clocks may differ about the same moment
INVALID_ACCURACIES = "are not accuracies in percent, the first at most the second"
MAX_EPOCHS = 100_000  # far above any run; to lay out a longer schedule would take forever
SOURCE = "; by the rest of the record it is"


def check_entry(entry: JsonMapping) -> Iterator[str]:
    """Yield the problems within a JSON: fields, steps, learning rates, times, cost, target."""
    missing = [name for name in writers.ENTRY_FIELDS if name not in entry]
    if missing:
        yield f"the fields {', '.join(missing)} are missing"
        return
    misc = entry["misc"]
    for path, value, _ in pairs(misc, misc, "misc"):
        if isinstance(value, int | float) and "seconds" in last_name(path) and value < 0:
            yield f"{path} is {value:g}; a time cannot be negative"
    recipe = Recipe.from_json(misc["recipe"])
    if recipe.epochs > MAX_EPOCHS:
        yield f"misc.recipe: {recipe.epochs} epochs; no run has more than {MAX_EPOCHS}"
        return
    schedule = Schedule(recipe, misc["images"]["train"], misc["gpus"], misc["max_steps"])
    steps_so_far = 0
    for index, row in enumerate(misc["epochs"]):
        where = f"epoch {row['epoch']}: "
        steps_so_far += row["steps"]
        if index >= len(schedule.epochs):
            yield f"{where}the recipe has {len(schedule.epochs)} epochs"
            return
        expected = _expected_epoch(row, schedule.epochs[index], misc["images"], steps_so_far)
        yield from differences(row, expected, SOURCE, where)
        yield from _check_accuracies(row, where)
    yield from _check_epoch_seconds(misc)
    yield from differences(entry, _expected_entry(entry, recipe), SOURCE)


def _expected_epoch(row: JsonMapping, planned_epoch: Epoch, images: JsonMapping, steps_so_far: int) -> JsonMapping:
    """Return the fields of an epoch that follow from the recipe and from its other fields."""
    phase = planned_epoch.scheduled_phase
    planned_rates = (planned_epoch.lr_at(0), planned_epoch.lr_at(planned_epoch.steps - 1))
    seen_images = min(images["train"], planned_epoch.steps * phase.global_batch)
    view = "rect" if phase.phase.rect_val else "square"
    is_validated = any(row[name] is not None for name in ("top1", "top5", "top1_square", "top5_square"))
    # Of the square view, both pairs of accuracies are of the same crops.
    square = {f"{name}_square": row[name] for name in ("top1", "top5")} if row["view"] == "square" else {}
    return {
        "epoch": planned_epoch.number + 1,
        "size": phase.phase.size,
        "global_batch": phase.global_batch,
        "steps": planned_epoch.steps,
        "step": steps_so_far,
        "images": seen_images,
        "lr": [None if rate is None else planned for rate, planned in zip(row["lr"], planned_rates, strict=True)],
        "images_per_second": row["images"] / row["train_seconds"],
        "view": view if row["top1"] is not None else None,
        **({"val_images": images["val"], **square} if is_validated else {}),
    }


def _expected_entry(entry: JsonMapping, recipe: Recipe) -> JsonMapping:
    """Return the fields of a JSON that follow from its recipe, its epochs and its machines."""
    misc = entry["misc"]
    epochs = misc["epochs"]
    validated_seconds = [row["seconds"] for row in epochs if row["top1"] is not None]
    price = entry["costPerHour"]
    price_by_machine = {machine["name"]: machine["price"] for machine in misc["machines"]}
    prices = [price_by_machine.get(name) for name in misc["at_work"]]
    expected_misc = {
        "schedule": json_roundtrip(writers.executed_phases(epochs, misc["recipe"])),
        "optimizer": misc["recipe"]["optim"],
        "comm": misc["recipe"]["comm"],
        "seed": misc["recipe"]["seed"],
        "hours": validated_seconds[-1] / 3600 if validated_seconds else None,
        "cost": {"dollars": None if price is None else price * misc["hours"]},
    }
    if target := misc["target"]:
        reached_rows = (row for row in epochs if (row[target["metric"]] or 0.0) >= target["goal"])
        reaching_row = next(reached_rows, None)
        expected_misc["target"] = {"reached": reaching_row is not None, "epoch": reaching_row and reaching_row["epoch"]}
        if reaching_row and target["seconds"] is not None:
            seconds = reaching_row["seconds"]
            expected_misc["target"] |= {"seconds": seconds, "minutes": seconds / 60}
    return {
        "model": recipe.model.name,
        "misc": expected_misc,
        "costPerHour": sum(prices) if prices and None not in prices else None,
    }


def _check_accuracies(row: JsonMapping, where: str) -> Iterator[str]:
    """Yield the problems of an epoch's accuracies: all of them exist or none, and each is a whole number of images."""
    pairs = (("top1", "top5"), ("top1_square", "top5_square"))
    if all(row[name] is None for pair in pairs for name in pair):
        return
    for pair in pairs:
        top1, top5 = (row[name] for name in pair)
        if None in (top1, top5) or not 0 <= top1 <= top5 <= 100:
            yield f"{where}{pair[0]} {top1} and {pair[1]} {top5} {INVALID_ACCURACIES}"
            return
        for name in pair:
            correct_images = row[name] * row["val_images"] / 100
            if abs(correct_images - round(correct_images)) > 1e-6 * max(1.0, correct_images):
                yield f"{where}{name} {row[name]:.6g} % of {row['val_images']} images is not a whole number of images"


def _check_epoch_seconds(misc: JsonMapping) -> Iterator[str]:
    """Yield the epochs whose time on the clock does not agree with their steps, validation and losses."""
    last_seconds = misc["seconds_to_first_step"]
    last_step = 0
    for row in misc["epochs"]:
        own_seconds = row["train_seconds"] + row["val_seconds"]
        attempts = [attempt for attempt in misc["attempts"][1:] if last_step <= attempt["first_step"] <= row["step"]]
        losses = [attempt["seconds_lost"] for attempt in attempts]
        lost_seconds = sum(seconds or 0.0 for seconds in losses)
        clock_seconds = row["seconds"] - (last_seconds or 0.0)
        min_seconds = own_seconds * (1 - EPOCH_SLACK_FRACTION) - CLOCK_TOLERANCE_SECONDS
        max_seconds = own_seconds * (1 + EPOCH_SLACK_FRACTION) + EPOCH_SLACK_SECONDS + lost_seconds
        if last_seconds is None or None in losses:
            max_seconds = math.inf
        if not min_seconds <= clock_seconds <= max_seconds:
            losses_note = f" and losses of {lost_seconds:.1f} s" if losses else ""
            yield (
                f"epoch {row['epoch']}: the clock says {clock_seconds:.1f} s for {row['train_seconds']:.1f} s of "
                f"steps, {row['val_seconds']:.1f} s of validation{losses_note}"
            )
        last_seconds = row["seconds"]
        last_step = row["step"]
