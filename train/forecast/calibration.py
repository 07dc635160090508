"""Compare a finished run with its forecast, and derive constants from it. Pure functions of its result."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from train.recipe.history import EpochResult
from train.recipe.schedule import PhaseRow

from .constants import Constants, SecondsBySize
from .hardware import RECTANGLE_PIXEL_RATIO, NetworkSpec
from .model import ForecastRecord

MIN_WAIT_SHARE = 0.05  # share of a phase's step time that must be waits, for the loader's speed to be known from it
UNLIMITED_GBIT = 1e9  # Gbit/s, for networks whose time is in the measured steps already


@dataclass(frozen=True, kw_only=True)
class StartSeconds:
    """The seconds before a run's first step: until its trainers start, and from then on."""

    setup: float
    trainers: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.setup + self.trainers


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """The seconds before the first step, by what they were spent on."""

    start: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What a forecast takes from the result of a finished run: of the trainers themselves, or of a job.

    `procs` is the number of processes of each of the `machines`; a trainer's own result counts as one machine.
    """

    recipe: str
    job: str = ""
    procs: int
    machines: int = 1
    epochs: tuple[EpochResult, ...]
    schedule: tuple[PhaseRow, ...]
    schedule_gpus: int
    seconds: dict[str, float]
    where: StartTimes | None = None

    @property
    def process_count(self) -> int:
        """How many processes trained."""
        return self.procs * self.machines

    @property
    def has_time_parts(self) -> bool:
        """Whether the seconds of the epochs are known by part."""
        return any(epoch.where for epoch in self.epochs)

    def phase_of(self, epoch: EpochResult) -> PhaseRow:
        """Return the schedule's row that an epoch belongs to. Raises `ValueError` when there is none."""
        for phase in self.schedule:
            if phase.start < epoch.epoch <= phase.end:
                return phase
        raise ValueError(f"epoch {epoch.epoch} is in no row of the schedule")


@dataclass(frozen=True, kw_only=True)
class TermComparison:
    """A term of a forecast beside what the run took, in seconds.

    `error` is the share by which the forecast is too long, None where the run took no time.
    """

    term: str
    forecast: float
    actual: float
    error: float | None


def epoch_part_seconds(epoch: EpochResult) -> dict[str, float]:
    """Return the seconds of an epoch by part. Without measured parts they are "steps" and "validation"."""
    return dict(epoch.where) or {"steps": epoch.train_seconds, "validation": epoch.val_seconds}


def calibrate(run: MeasuredRun, source: str = "", start: StartSeconds | None = None) -> Constants:
    """Return the constants that a finished run measured. `source` names them (default: the job).

    `start` is what the launching side measured, without work that is done once for a data set. Without it, the trainers
    know their own start only.

    The time that a step sends gradients is within its seconds, and is taken to be the same on other numbers of GPUs.
    Raises `ValueError` when the run made no step.
    """
    batch_seconds = _batch_seconds(run)
    loader_speeds: dict[tuple[int, int], float] = {}
    for (copy, size), (images, seconds, waits) in _loader_totals(run).items():
        if waits > MIN_WAIT_SHARE * seconds:
            loader_speeds[copy, size] = images / seconds / run.machines
    if not batch_seconds:
        raise ValueError("no training step was measured")
    start = start or _trainers_start(run)
    epoch_seconds, switch_seconds = _fixed_seconds(run)
    return Constants(
        source=source or run.job or run.recipe,
        batch_timings=tuple((size, batch, seconds) for (size, batch), seconds in sorted(batch_seconds.items())),
        network=NetworkSpec(UNLIMITED_GBIT, 0.0),
        bus_gbit=UNLIMITED_GBIT,
        overlap=False,
        forward_share=_forward_share(run, batch_seconds),
        loader_speeds=tuple((copy, size, speed) for (copy, size), speed in sorted(loader_speeds.items())),
        epoch_seconds=epoch_seconds,
        switch_seconds=switch_seconds,
        startup_seconds=start.trainers,
        setup_seconds=start.setup,
    )


def _batch_seconds(run: MeasuredRun) -> dict[tuple[int, int], float]:
    """Return the seconds of a full batch of one GPU by (size, batch), without the waits for images."""
    batches_per_step = math.ceil(run.schedule_gpus / run.process_count)
    seconds = defaultdict[tuple[int, int], float](float)
    full_steps = defaultdict[tuple[int, int], float](float)
    for row in run.epochs:
        key = (row.size, run.phase_of(row).batch)
        seconds[key] += epoch_part_seconds(row)["steps"]
        full_steps[key] += row.train_images / row.global_batch
    return {
        key: seconds[key] / full_steps[key] / batches_per_step for key in seconds if full_steps[key] and seconds[key]
    }


def _loader_totals(run: MeasuredRun) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Return (images, seconds of steps with their waits, seconds of waits) by (copy, size); copy 0 is the full size."""
    totals: dict[tuple[int, int], tuple[float, float, float]] = {}
    for row in run.epochs:
        key = (run.phase_of(row).copy or 0, row.size)
        part_seconds = epoch_part_seconds(row)
        epoch_waits = part_seconds.get("waits", 0.0)
        images, seconds, waits = totals.get(key, (0.0, 0.0, 0.0))
        totals[key] = (
            images + row.train_images,
            seconds + part_seconds["steps"] + epoch_waits,
            waits + epoch_waits,
        )
    return totals


def _forward_share(run: MeasuredRun, batch_seconds: Mapping[tuple[int, int], float]) -> float:
    """Return the time of an image in validation over its time in training; 1/3 where nothing was validated."""
    validation_seconds = training_seconds = 0.0
    for row in run.epochs:
        phase = run.phase_of(row)
        seconds = batch_seconds.get((row.size, phase.batch))
        if row.val_images and seconds:
            views = 1 + (RECTANGLE_PIXEL_RATIO if phase.rect_val else 0.0)
            validation_seconds += epoch_part_seconds(row)["validation"] * run.process_count
            training_seconds += row.val_images * views * seconds / phase.batch
    return validation_seconds / training_seconds if training_seconds else 1 / 3


def _fixed_seconds(run: MeasuredRun) -> tuple[SecondsBySize, SecondsBySize]:
    """Return the seconds of each epoch beside its steps and validation, and of each first epoch of a new shape."""
    epochs = run.epochs
    if not run.has_time_parts:
        wall_seconds = run.seconds.get("first step to last without losses", 0.0)
        rest_seconds = wall_seconds - sum(sum(epoch_part_seconds(row).values()) for row in epochs)
        return ((0, max(0.0, rest_seconds) / len(epochs)),), ()
    rest_seconds = switch_seconds = 0.0
    switches = 0
    previous_shape = None
    for row in epochs:
        phase, part_seconds = run.phase_of(row), epoch_part_seconds(row)
        shape = (row.size, phase.batch, phase.copy)
        rest_seconds += part_seconds.get("checkpoints", 0.0) + part_seconds.get("other", 0.0)
        switch_seconds += part_seconds.get("switches", 0.0)
        switches += shape != previous_shape
        previous_shape = shape
    return ((0, rest_seconds / len(epochs)),), ((0, switch_seconds / switches),) if switch_seconds else ()


def _trainers_start(run: MeasuredRun) -> StartSeconds:
    """Return the start of the trainers: what their attempt took beside the time from its first step to the last."""
    attempt_seconds = run.seconds.get("attempt", 0.0)
    trainer_seconds = attempt_seconds - run.seconds.get("first step to last without losses", attempt_seconds)
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
    forecast: ForecastRecord, run: MeasuredRun, start: StartSeconds | None = None
) -> list[TermComparison]:
    """Return each term of a forecast beside what the run took.

    The last row is the sum. The steps are one term: what is sent within them cannot be told apart. A run that ended
    early, at its target, is compared with the forecast of the epochs that it ran. `start` counts where the run's table
    of the wall time has no start.
    """
    forecast_seconds = terms_until(forecast, run.epochs[-1].epoch)
    actual_seconds = defaultdict[str, float](float)
    for row in run.epochs:
        for part, seconds in epoch_part_seconds(row).items():
            actual_seconds[part] += seconds
    if not run.has_time_parts:
        wall_seconds = run.seconds.get("first step to last without losses", 0.0)
        actual_seconds["other"] = max(0.0, wall_seconds - sum(actual_seconds.values()))
    measured_start = run.where.start if run.where else None
    actual_start = sum(measured_start.values()) if measured_start else (start or _trainers_start(run)).total
    rows = [
        (name, sum(forecast_seconds.get(term, 0.0) for term in terms), sum(actual_seconds[part] for part in parts))
        for name, (terms, parts) in COMPARED_TERMS.items()
    ]
    rows.append(("start", forecast_seconds.get("start", 0.0), actual_start))
    return list(_with_total_row(rows))


def terms_until(forecast: ForecastRecord, epoch: int) -> dict[str, float]:
    """Return the seconds by term of a forecast for its first epochs.

    Of a phase that is cut, the terms count in proportion to its epochs.
    """
    phases = forecast.phases
    if not phases or epoch >= phases[-1].end:
        return dict(forecast.terms)
    term_seconds = dict.fromkeys(forecast.terms, 0.0) | {"start": forecast.terms.get("start", 0.0)}
    for phase in phases:
        share = min(1.0, max(0, epoch - phase.start) / (phase.end - phase.start))
        for term, seconds in phase.terms.items():
            term_seconds[term] = term_seconds.get(term, 0.0) + share * seconds
    return term_seconds


def _with_total_row(rows: Sequence[tuple[str, float, float]]) -> Iterator[TermComparison]:
    total = ("all", sum(forecast for _, forecast, _ in rows), sum(actual for _, _, actual in rows))
    for term, forecast, actual in [*rows, total]:
        error = forecast / actual - 1 if actual > 0 else None
        yield TermComparison(term=term, forecast=forecast, actual=actual, error=error)
