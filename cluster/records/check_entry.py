"""Checks whether the fields of a run's DAWNBench JSON agree with each other. Each problem is one line of text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.recipe.schedule import Epoch, Schedule
from train.recipe.schema import Recipe
from train.recipe.target import Target
from train.tools.filesystem import json_roundtrip

from . import writers
from .writers import JsonMapping

# The time that an epoch may take beyond its steps and its validation: seconds, plus a fraction of its own time.
EPOCH_SLACK_SECONDS = 3.0
EPOCH_SLACK_FRACTION = 0.05
CLOCK_TOLERANCE_SECONDS = 1.0  # by which two clocks may differ about the same moment
MAX_EPOCHS = 100_000  # far above any run; to lay out a longer schedule would take forever
ACCURACY_FIELD_PAIRS = (
    ("top1", "top5"),  # of the view that counts
    ("top1_square", "top5_square"),  # of the square center crop
)
INVALID_ACCURACIES_MESSAGE = "top-1 {} and top-5 {}{} are not accuracies in percent with top-1 at most top-5"


def check_entry(entry: JsonMapping) -> Iterator[str]:
    """Yield the problems within a JSON: fields, steps, learning rates, times, cost, target."""
    missing = [name for name in writers.ENTRY_FIELDS if name not in entry]
    if missing:
        yield f"the fields {', '.join(missing)} are missing"
        return
    misc = entry["misc"]
    yield from check_no_negative_seconds(misc, "misc")
    epochs = misc["epochs"]
    recipe = Recipe.from_json(misc["recipe"])
    if recipe.epochs > MAX_EPOCHS:
        yield f"misc.recipe: {recipe.epochs} epochs; no run has more than {MAX_EPOCHS}"
        return
    schedule = Schedule(recipe, misc["images"]["train"], misc["gpus"], misc["max_steps"])
    steps_so_far = 0
    for index, row in enumerate(epochs):
        steps_so_far += row["steps"]
        planned_epoch = schedule.epochs[index] if index < len(schedule.epochs) else None
        yield from check_epoch_steps(row, schedule, index, steps_so_far)
        yield from check_accuracies(row, misc["images"]["val"])
        yield from check_validation_view(row, planned_epoch)
    yield from check_epoch_seconds(misc)
    if json_roundtrip(writers.executed_phases(epochs, misc["recipe"])) != misc["schedule"]:
        yield "misc.schedule does not agree with the epochs"
    for name, recipe_field in (("optimizer", "optim"), ("comm", "comm"), ("seed", "seed")):
        if misc[name] != misc["recipe"][recipe_field]:
            yield f"misc.{name} is not the recipe's"
    if entry["model"] != recipe.model.name:
        yield f"model {entry['model']}: the recipe has {recipe.model.name}"
    yield from check_cost(entry)
    yield from check_target(misc["target"], epochs)


def check_no_negative_seconds(value: Any, path: str) -> Iterator[str]:
    """Yield a problem for each negative time in `value`: each field named *seconds*, at any depth.

    `path` is the path of `value` in the JSON, such as misc; each problem begins with the path of its field.
    """
    children: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for name, child in children:
        child_path = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}"
        if isinstance(child, int | float) and "seconds" in str(name) and child < 0:
            yield f"{child_path} is {child:g}; a time cannot be negative"
        yield from check_no_negative_seconds(child, child_path)


def check_epoch_steps(row: JsonMapping, schedule: Schedule, index: int, steps_so_far: int) -> Iterator[str]:
    """Yield the problems of an epoch's steps, sizes, learning rates and speed.

    `index` is its place among the epochs of the record, `steps_so_far` the steps until its end.
    """
    where = f"epoch {row['epoch']}"
    if index >= len(schedule.epochs) or row["epoch"] != schedule.epochs[index].number + 1:
        yield f"{where}: is not epoch number {index + 1} of the recipe's schedule"
        return
    planned = schedule.epochs[index]
    planned_size = planned.scheduled_phase.phase.size
    planned_batch = planned.scheduled_phase.global_batch
    batch = row["global_batch"]
    if (row["size"], batch) != (planned_size, planned_batch):
        yield (
            f"{where}: {row['size']} pixels and a batch of {batch}; the recipe has {planned_size} and {planned_batch}"
        )
        return
    images = schedule.images
    steps_of_whole_epoch = math.ceil(images / batch)
    if row["steps"] != planned.steps or (schedule.max_steps is None and row["steps"] != steps_of_whole_epoch):
        expected_steps = min(steps_of_whole_epoch, planned.steps)
        yield f"{where}: {row['steps']} steps; {images} images in batches of {batch} are {expected_steps}"
    if row["step"] != steps_so_far:
        yield f"{where}: ends at step {row['step']}; the steps of the epochs add up to {steps_so_far}"
    expected_images = min(images, row["steps"] * batch)
    if row["images"] != expected_images:
        yield f"{where}: {row['images']} images; {row['steps']} steps of {batch} have {expected_images}"
    for name, rate, step in zip(("first", "last"), row["lr"], (0, planned.steps - 1), strict=True):
        planned_rate = planned.lr_at(step)
        if rate is not None and not math.isclose(rate, planned_rate, rel_tol=1e-9, abs_tol=1e-15):
            yield (
                f"{where}: the learning rate of its {name} step is {rate:.6g}; by the recipe it is {planned_rate:.6g}"
            )
    if not math.isclose(row["images_per_second"] * row["train_seconds"], row["images"], rel_tol=1e-6):
        yield (
            f"{where}: {row['images_per_second']:.6g} images/s for {row['train_seconds']:.6g} s are not "
            f"{row['images']} images"
        )


def check_accuracies(row: JsonMapping, val_images: int) -> Iterator[str]:
    """Yield the problems of an epoch's accuracies: all of them exist or none, and each is a whole number of images."""
    where = f"epoch {row['epoch']}"
    if all(row[name] is None for pair in ACCURACY_FIELD_PAIRS for name in pair):
        return
    if row["val_images"] != val_images:
        yield f"{where}: validated on {row['val_images']} images of {val_images}"
    for pair in ACCURACY_FIELD_PAIRS:
        top1, top5 = (row[name] for name in pair)
        if None in (top1, top5) or not 0 <= top1 <= top5 <= 100:
            view_note = "" if pair is ACCURACY_FIELD_PAIRS[0] else " of the square"
            yield f"{where}: {INVALID_ACCURACIES_MESSAGE.format(top1, top5, view_note)}"
            return
        for name in pair:
            correct_images = row[name] * val_images / 100
            if abs(correct_images - round(correct_images)) > 1e-6 * max(1.0, correct_images):
                yield f"{where}: {name} {row[name]:.6g} % of {val_images} images is not a whole number of images"


def check_validation_view(row: JsonMapping, planned_epoch: Epoch | None) -> Iterator[str]:
    """Yield a problem if an epoch was not validated with the crop of its phase: a square or a rectangle.

    The accuracies of the square crop are reported twice. With the square view, both pairs must therefore be equal.
    """
    where = f"epoch {row['epoch']}"
    view = row["view"]
    if row["top1"] is None:
        if view is not None:
            yield f"{where}: view {view} without a validation"
        return
    if planned_epoch:
        planned_view = "rect" if planned_epoch.scheduled_phase.phase.rect_val else "square"
        if view != planned_view:
            yield f"{where}: view {view}; by the recipe it is {planned_view}"
    if view == "square":
        for name, square_name in zip(*ACCURACY_FIELD_PAIRS, strict=True):
            if row[name] != row[square_name]:
                yield (
                    f"{where}: {name} {row[name]:.6g} and {square_name} {row[square_name]:.6g} are of the same view, "
                    "and must be equal"
                )


def check_epoch_seconds(misc: JsonMapping) -> Iterator[str]:
    """Yield a problem for each epoch whose wall time differs from its steps, validation and time lost to recoveries."""
    last_seconds = misc["seconds_to_first_step"]
    last_step = 0
    for row in misc["epochs"]:
        own_seconds = row["train_seconds"] + row["val_seconds"]
        losses = [
            attempt["seconds_lost"]
            for attempt in misc["attempts"][1:]
            if last_step <= attempt["first_step"] <= row["step"]
        ]
        lost_seconds = sum(seconds or 0.0 for seconds in losses)
        clock_seconds = row["seconds"] - (last_seconds or 0.0)
        min_seconds = own_seconds * (1 - EPOCH_SLACK_FRACTION) - CLOCK_TOLERANCE_SECONDS
        max_seconds = own_seconds * (1 + EPOCH_SLACK_FRACTION) + EPOCH_SLACK_SECONDS + lost_seconds
        knows_max = last_seconds is not None and None not in losses
        if clock_seconds < min_seconds or (knows_max and clock_seconds > max_seconds):
            losses_note = f" and losses of {lost_seconds:.1f} s" if losses else ""
            yield (
                f"epoch {row['epoch']}: the clock says {clock_seconds:.1f} s for {row['train_seconds']:.1f} s of "
                f"steps, {row['val_seconds']:.1f} s of validation{losses_note}"
            )
        last_seconds = row["seconds"]
        last_step = row["step"]


def check_cost(entry: JsonMapping) -> Iterator[str]:
    """Yield a problem if the cost is not hours x price per hour, or the price is not the sum over the machines.

    `misc.hours` must end with the last validated epoch. If a machine's price is unknown, both must be null.
    """
    misc = entry["misc"]
    price = entry["costPerHour"]
    validated_seconds = [row["seconds"] for row in misc["epochs"] if row["top1"] is not None]
    if not validated_seconds or abs(3600 * misc["hours"] - validated_seconds[-1]) > 0.01:
        last_hours = validated_seconds[-1] / 3600 if validated_seconds else 0
        yield f"misc.hours {misc['hours']:g}: the last validated epoch ends at {last_hours:.6f}"
    dollars = misc["cost"]["dollars"]
    if (price is None) != (dollars is None):
        yield f"costPerHour {price} and misc.cost.dollars {dollars}: one is known without the other"
    elif price is not None and not math.isclose(dollars, price * misc["hours"], rel_tol=1e-9, abs_tol=1e-9):
        yield f"misc.cost.dollars {dollars:.6g}: {misc['hours']:.6g} hours at {price:g} are {price * misc['hours']:.6g}"
    price_by_machine = {machine["name"]: machine["price"] for machine in misc["machines"]}
    prices = [price_by_machine.get(name) for name in misc["at_work"]]
    known_prices = [machine_price for machine_price in prices if machine_price is not None]
    total_price = sum(known_prices) if known_prices and len(known_prices) == len(prices) else None
    if (price is None) != (total_price is None) or (price is not None and not math.isclose(price, total_price or 0.0)):
        yield f"costPerHour {price}: the machines at work cost {total_price}"


def check_target(target: JsonMapping | None, epochs: Sequence[JsonMapping]) -> Iterator[str]:
    """Yield a problem if the target was not reached at the epoch and the time that the JSON states."""
    if target is None:
        return
    metric = target["metric"]
    reaching_row = Target(metric, target["goal"]).first_epoch_reaching(epochs)
    reaching_epoch = reaching_row["epoch"] if reaching_row else None
    if target["reached"] != (reaching_row is not None) or target["epoch"] != reaching_epoch:
        yield (
            f"misc.target: epoch {target['epoch']} for {metric} {target['goal']:g}; by the rows it is epoch "
            f"{reaching_epoch}"
        )
    elif reaching_row and target["seconds"] is not None:
        if abs(target["seconds"] - reaching_row["seconds"]) > 0.01:
            yield (
                f"misc.target: {target['seconds']:.2f} s; epoch {reaching_epoch} ended at {reaching_row['seconds']:.2f}"
            )
        elif abs(60 * target["minutes"] - target["seconds"]) > 0.01:
            yield f"misc.target: {target['minutes']:.4f} minutes are not {target['seconds']:.2f} s"
