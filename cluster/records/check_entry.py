"""Checks whether the run that DAWNBench's JSON describes is consistent by itself. Each problem names the epoch."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from train.recipe.schedule import Epoch, Schedule
from train.recipe.target import Target, target_outcome

from . import writers
from .differences import differences, last_name, pairs
from .run_data import RunData, RunEpoch
from .writers import JsonDict

# The time that an epoch may take beyond its steps and its validation: seconds, plus a fraction of its own time.
EPOCH_SLACK_SECONDS = 3.0
EPOCH_SLACK_FRACTION = 0.05
CLOCK_TOLERANCE_SECONDS = 1.0  # by which two clocks may differ about the same moment
INVALID_ACCURACIES = "are not accuracies in percent, the first at most the second"
MAX_EPOCHS = 100_000  # far above any run; to lay out a longer schedule would take forever
AUTHOR_FIELDS = ("version", "author", "authorEmail", "codeURL", "logFilename")  # the author's to choose
BILLING_FIELDS = ("seconds_all", "dollars")  # of a target, which do not follow from the epochs
SOURCE = "; by the rest of the record it is"


def check_entry(entry: JsonDict, run: RunData) -> Iterator[str]:
    """Yield the problems within a JSON, which describes the `run`: steps, learning rates, times, cost, target."""
    for path, value, _ in pairs(entry["misc"], entry["misc"], "misc"):
        if isinstance(value, int | float) and "seconds" in last_name(path) and value < 0:
            yield f"{path} is {value:g}; a time cannot be negative"
    if run.recipe.epochs > MAX_EPOCHS:
        yield f"misc.recipe: {run.recipe.epochs} epochs; no run has more than {MAX_EPOCHS}"
        return
    planned_epochs = Schedule(run.recipe, run.train_images, run.gpus, run.max_steps).epochs
    steps_so_far = 0
    for index, epoch in enumerate(run.epochs):
        where = f"epoch {epoch.epoch}: "
        steps_so_far += epoch.steps
        if index >= len(planned_epochs):
            yield f"{where}the recipe has {len(planned_epochs)} epochs"
            return
        expected = _expected_epoch(run, epoch, planned_epochs[index], steps_so_far)
        yield from differences(asdict(epoch), expected, SOURCE, where)
        yield from _check_accuracies(epoch, where)
    yield from _check_epoch_seconds(run)
    yield from differences(entry, expected_entry(entry, run), SOURCE)
    if run.target:
        target = Target(run.target.metric, run.target.goal, run.target.stops)
        outcome = asdict(target_outcome(target, run.epochs) or run.target)
        expected = {name: value for name, value in outcome.items() if name not in BILLING_FIELDS}
        yield from differences(asdict(run.target), expected, SOURCE, "misc.target.")


def expected_entry(entry: JsonDict, run: RunData) -> JsonDict:
    """Return the JSON of a run with what the author of an entry chose."""
    return {**writers.dawnbench_entry(run), **{name: entry[name] for name in AUTHOR_FIELDS}}


def _expected_epoch(run: RunData, epoch: RunEpoch, planned_epoch: Epoch, steps_so_far: int) -> JsonDict:
    """Return the fields of an epoch that follow from the recipe and from its other fields."""
    phase = planned_epoch.scheduled_phase
    is_validated = {epoch.top1, epoch.top5, epoch.top1_square, epoch.top5_square} != {None}
    expected: JsonDict = {
        "epoch": planned_epoch.number + 1,
        "size": phase.size,
        "global_batch": phase.global_batch,
        "steps": planned_epoch.steps,
        "step": steps_so_far,
        "train_images": min(run.train_images, planned_epoch.steps * phase.global_batch),
        "first_lr": None if epoch.first_lr is None else planned_epoch.lr_at(0),
        "last_lr": None if epoch.last_lr is None else planned_epoch.lr_at(planned_epoch.steps - 1),
        "images_per_second": epoch.train_images / epoch.train_seconds,
        "view": None if epoch.top1 is None else "rect" if phase.phase.rect_val else "square",
    }
    if is_validated:
        expected["val_images"] = run.val_images
    if is_validated and epoch.view == "square":  # both pairs of accuracies are of the same crops
        expected |= {"top1_square": epoch.top1, "top5_square": epoch.top5}
    return expected


def _check_accuracies(epoch: RunEpoch, where: str) -> Iterator[str]:
    """Yield the problems of an epoch's accuracies: all of them exist or none, and each is a whole number of images."""
    accuracies = {name: getattr(epoch, name) for name in ("top1", "top5", "top1_square", "top5_square")}
    if set(accuracies.values()) == {None}:
        return
    for view in ("", "_square"):
        top1, top5 = accuracies[f"top1{view}"], accuracies[f"top5{view}"]
        if None in (top1, top5) or not 0 <= top1 <= top5 <= 100:
            yield f"{where}top1{view} {top1} and top5{view} {top5} {INVALID_ACCURACIES}"
            return
    for name, accuracy in accuracies.items():
        correct_images = accuracy * (epoch.val_images or 0) / 100
        if abs(correct_images - round(correct_images)) > 1e-6 * max(1.0, correct_images):
            yield f"{where}{name} {accuracy:.6g} % of {epoch.val_images} images is not a whole number of images"


def _check_epoch_seconds(run: RunData) -> Iterator[str]:
    """Yield the epochs whose time on the clock does not agree with their steps, validation and losses."""
    last_seconds = run.seconds_to_first_step
    last_step = 0
    for epoch in run.epochs:
        own_seconds = epoch.train_seconds + epoch.val_seconds
        losses = [each.seconds_lost for each in run.attempts[1:] if last_step <= each.first_step <= epoch.step]
        lost_seconds = sum(seconds or 0.0 for seconds in losses)
        clock_seconds = (epoch.clock or 0.0) - (last_seconds or 0.0)
        min_seconds = own_seconds * (1 - EPOCH_SLACK_FRACTION) - CLOCK_TOLERANCE_SECONDS
        max_seconds = own_seconds * (1 + EPOCH_SLACK_FRACTION) + EPOCH_SLACK_SECONDS + lost_seconds
        if last_seconds is None or None in losses:
            max_seconds = math.inf
        if not min_seconds <= clock_seconds <= max_seconds:
            losses_note = f" and losses of {lost_seconds:.1f} s" if losses else ""
            yield (
                f"epoch {epoch.epoch}: the clock says {clock_seconds:.1f} s for {epoch.train_seconds:.1f} s of "
                f"steps, {epoch.val_seconds:.1f} s of validation{losses_note}"
            )
        last_seconds = epoch.clock
        last_step = epoch.step
