"""Compare a finished run with its forecast, and derive constants from it. Pure functions of its epochs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from train.recipe.history import EpochResult
from train.recipe.schedule import PhaseRow

from .hardware import RECTANGLE_PIXEL_RATIO
from .model import Constants, Forecast

MIN_WAIT_SHARE = 0.05  # share of a phase's step time that must be waits, for the loader's speed to be known from it


@dataclass(frozen=True, kw_only=True)
class StartSeconds:
    """The seconds before a run's first step: until its trainers start, and from then on."""

    setup: float = 0.0
    trainers: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What a forecast takes from a run: its epochs, with `processes` processes on `machines` machines."""

    processes: int
    machines: int
    epochs: Sequence[EpochResult]
    schedule: Sequence[PhaseRow]
    schedule_gpus: int

    def phase_of(self, epoch: EpochResult) -> PhaseRow:
        """Return the schedule's row that an epoch belongs to. Raises `ValueError` when there is none."""
        for phase in self.schedule:
            if phase.start < epoch.epoch <= phase.end:
                return phase
        raise ValueError(f"epoch {epoch.epoch} is in no row of the schedule")


def calibrate(run: MeasuredRun, source: str, start: StartSeconds) -> Constants:
    """Return the constants that a run measured. `source` names them.

    `start` is without work that is done once for a data set. The time that a step sends gradients is within its
    seconds, and is taken to be the same on other numbers of GPUs. Raises `ValueError` when the run made no step.
    """
    step_seconds = defaultdict[tuple[int, int], float](float)  # by (size, batch), without the waits for images
    full_steps = defaultdict[tuple[int, int], float](float)
    images = defaultdict[tuple[int, int], int](int)  # by (copy, size); copy 0 is the full size
    load_seconds = defaultdict[tuple[int, int], float](float)  # of steps with their waits
    wait_seconds = defaultdict[tuple[int, int], float](float)
    rest_seconds = switch_seconds = 0.0
    shapes: list[tuple[int, int, int | None]] = []
    for row in run.epochs:
        phase, parts = run.phase_of(row), defaultdict(float, row.where)
        shape = (row.size, phase.batch)
        step_seconds[shape] += parts["steps"]
        full_steps[shape] += row.train_images / row.global_batch
        images_of = (phase.copy or 0, row.size)
        images[images_of] += row.train_images
        load_seconds[images_of] += parts["steps"] + parts["waits"]
        wait_seconds[images_of] += parts["waits"]
        rest_seconds += parts["checkpoints"] + parts["other"]
        switch_seconds += parts["switches"]
        if shapes[-1:] != [(*shape, phase.copy)]:
            shapes.append((*shape, phase.copy))
    batches_per_step = ceil(run.schedule_gpus / run.processes)
    batch_seconds = {
        shape: seconds / full_steps[shape] / batches_per_step
        for shape, seconds in sorted(step_seconds.items())
        if full_steps[shape] and seconds
    }
    if not batch_seconds:
        raise ValueError("no training step was measured")
    return Constants(
        source=source,
        batch_timings=tuple((*shape, seconds) for shape, seconds in batch_seconds.items()),
        forward_share=_forward_share(run, batch_seconds),
        loader_speeds=tuple(
            (*key, images[key] / load_seconds[key] / run.machines)
            for key in sorted(images)
            if wait_seconds[key] > MIN_WAIT_SHARE * load_seconds[key]
        ),
        epoch_seconds=rest_seconds / len(run.epochs),
        switch_seconds=switch_seconds / len(shapes),
        startup_seconds=start.trainers,
        setup_seconds=start.setup,
    )


def _forward_share(run: MeasuredRun, batch_seconds: dict[tuple[int, int], float]) -> float:
    """Return the time of an image in validation over its time in training; 1/3 where nothing was validated."""
    validation_seconds = training_seconds = 0.0
    for row in run.epochs:
        phase = run.phase_of(row)
        seconds = batch_seconds.get((row.size, phase.batch))
        if row.val_images and seconds:
            views = 1 + (RECTANGLE_PIXEL_RATIO if phase.rect_val else 0.0)
            validation_seconds += row.where.get("validation", 0.0) * run.processes
            training_seconds += row.val_images * views * seconds / phase.batch
    return validation_seconds / training_seconds if training_seconds else 1 / 3


# For each compared term the terms of the forecast and the parts of the run that belong to it.
COMPARED_TERMS = {
    "steps": (("compute", "all-reduce", "optimizer"), ("steps",)),
    "loader": (("loader",), ("waits",)),
    "validation": (("validation",), ("validation",)),
    "fixed": (("fixed",), ("switches", "checkpoints", "other")),
}


@dataclass(frozen=True, kw_only=True)
class TermComparison:
    """A term of a forecast beside what the run took, in seconds.

    `error` is the share by which the forecast is too long, None where the run took no time.
    """

    term: str
    forecast: float
    actual: float
    error: float | None


def compare_with_run(
    forecast: Forecast, epochs: Sequence[EpochResult], start_seconds: float
) -> tuple[TermComparison, ...]:
    """Return each term of a forecast beside what the run took. `start_seconds` is what its start took.

    The last row is the sum. The steps are one term: what is sent within them cannot be told apart. A run that ended
    early, at its target, is compared with the forecast of the epochs that it ran.
    """
    forecast_terms = forecast.of_steps(0, sum(epoch.steps for epoch in epochs)).terms
    rows: list[tuple[str, float, float]] = []
    for name, (terms, parts) in COMPARED_TERMS.items():
        actual = sum(row.where.get(part, 0.0) for row in epochs for part in parts)
        rows.append((name, sum(forecast_terms[term] for term in terms), actual))
    rows.append(("start", forecast_terms["start"], start_seconds))
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    return tuple(
        TermComparison(term=term, forecast=predicted, actual=actual, error=predicted / actual - 1 if actual else None)
        for term, predicted, actual in rows
    )
