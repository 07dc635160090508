"""Collects what a report shows of a job, from the run folder. No machine is asked.

What each machine did when, and the job's work clock, come from the agents' state logs.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.jobs.job import Job
from cluster.state import timeline
from cluster.state.run_folder import Run, RunFolder
from cluster.state.states import MachineState, SetupStep
from cluster.state.status import JobResult, JobStatus
from cluster.state.timeline import AttemptRow
from infra.costs import JobCost
from train.data.order.center_crop import center_corner, resized_size
from train.data.order.rect_val import rect_crop_shape
from train.forecast import Forecast, TermComparison
from train.metrics import text
from train.metrics.confusion import PICTURED_PAIRS, ConfusedPair, Confusion
from train.metrics.hparams import HParamValue
from train.metrics.records import EpochRow, StepRow
from train.metrics.thumbnails import Thumbnail, read_class_thumbnails, read_thumbnails
from train.recipe.schedule import PhaseRow, scaled_image_count
from train.tools.agent_protocol import CONFUSION_FILE
from train.tools.records import read_record

COST_CURVE_POINTS = 80  # points of the curve of dollars
MAX_CURVE_POINTS = 400  # points of a curve: more cannot be told apart in a chart of this size
SCALARS = {
    "loss": "loss/train",
    "lr": "sizes/lr",
    "image_size": "sizes/image",
    "global_batch": "sizes/batch_total",
    "images_per_second": "times/images_per_second",
}
COLUMN_TYPES = [("time", "f8"), ("images", "i8"), ("attempt", "i8"), *((name, "f8") for name in SCALARS)]
ActivitySpan = tuple[MachineState, float, float]  # with begin and end in seconds
SpansByMachine = Mapping[str, Sequence[ActivitySpan]]
RelativeBox = tuple[float, float, float, float]  # left, top, width, height as fractions of an image


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """What was measured in one or several rows of steps; NaN for what was not. `time` is in seconds at work."""

    time: float
    images: int
    attempt: int
    loss: float
    lr: float
    image_size: float
    global_batch: float
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """A validation image, with the part of it that the validation sees as (width, height) in pixels.

    `square` is the center crop where the validation sees a rectangle instead, else None.
    """

    thumbnail: Thumbnail
    seen: RelativeBox
    pixels: tuple[int, int]
    square: RelativeBox | None


@dataclass(frozen=True, kw_only=True)
class ConfusedClasses:
    """A frequent error, with an image of the true class and one of the class that the network named."""

    pair: ConfusedPair
    true: Thumbnail
    predicted: Thumbnail


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All that a report shows of a job, in any state.

    Moments of epochs, steps, attempts (`timeline`), `activity` and `losses` (machine, moment) are in seconds at work.
    `schedule`, `forecast` and `forecast_comparison` are those of the result or, before it, of the plan. `settings` are
    those worth comparing with other jobs. `dollars_over_time` has points (seconds since the first launch of a machine,
    dollars until then). `confusion` is the last validation's or None, `provenance` what reproduces the numbers.
    """

    status: JobStatus
    result: JobResult | None
    model: str
    place: str  # of the machines, such as "this computer"
    data: str
    settings: Mapping[str, HParamValue]
    epochs: Sequence[EpochRow]
    steps: Sequence[StepPoint]
    schedule: Sequence[PhaseRow]
    timeline: Sequence[AttemptRow]
    activity: SpansByMachine
    losses: Sequence[tuple[str, float]]
    forecast: Forecast | None
    forecast_comparison: Sequence[TermComparison]
    cost: JobCost
    dollars_over_time: Sequence[tuple[float, float]]
    sample_images: Sequence[SampleImage]
    confusion: Confusion | None
    confused_classes: Sequence[ConfusedClasses]
    provenance: Mapping[str, str]

    @property
    def job(self) -> str:
        """The ID of the job, and the name that its user gave it."""
        return f"{self.status.job} {self.status.name}".rstrip()


# --- what each machine did ------------------------------------------------------------------------------------------


def drawn_state(state: MachineState) -> MachineState:
    """Return the state as which the chart of machines shows a state: what comes before the training is SETUP."""
    if state in (MachineState.TRAINING, MachineState.VALIDATING, MachineState.LOST):
        return state
    is_starting = state != MachineState.WAITING and str(state) in {*map(str, SetupStep)}
    return MachineState.SETUP if is_starting else MachineState.WAITING


def machine_activity(run: Run, attempts: Sequence[AttemptRow]) -> SpansByMachine:
    """Return each machine's activity, by the wall clock; LOST until it came back, or the job's end if it did not."""
    spans_by_machine = {
        name: [(drawn_state(state), begin, end) for state, begin, end in timeline.state_spans(run.folder, name)]
        for name in run.spec.machine_names
    }
    memberships = [row.machines for row in attempts if row.machines]
    job_end = max((end for spans in spans_by_machine.values() for *_, end in spans), default=0.0)
    for name, spans in spans_by_machine.items():
        was_member = any(name in names for names in memberships)
        if spans and was_member and name not in memberships[-1] and spans[-1][2] < job_end:
            spans.append((MachineState.LOST, spans[-1][2], job_end))
    return spans_by_machine


class WorkClock:
    """Clock of the time in which a job was at work: the time between a stop and a resume is left out."""

    def __init__(self, spans_by_machine: SpansByMachine, start_time: float = 0.0) -> None:
        """Count the time in which a machine has an activity but LOST; without any, from `start_time` until now."""
        active_spans = sorted(
            (begin, end)
            for spans in spans_by_machine.values()
            for state, begin, end in spans
            if state != MachineState.LOST
        )
        intervals: list[list[float]] = []
        for begin, end in active_spans:
            if intervals and begin <= intervals[-1][1]:
                intervals[-1][1] = max(intervals[-1][1], end)
            else:
                intervals.append([begin, end])
        self.busy_intervals = intervals or [[start_time, max(start_time, time.time())]]
        self.seconds_before_interval = [0.0, *accumulate(end - begin for begin, end in self.busy_intervals)]

    def seconds_at(self, timestamp: float) -> float:
        """Return the seconds at work until a moment of the wall clock."""
        index = bisect_right(self.busy_intervals, timestamp, key=lambda interval: interval[0]) - 1
        if index < 0:
            return 0.0
        begin, end = self.busy_intervals[index]
        return self.seconds_before_interval[index] + min(timestamp, end) - begin

    @property
    def start_time(self) -> float:
        """The moment at which the work began."""
        return self.busy_intervals[0][0]


def machine_losses(run_folder: RunFolder, spans_by_machine: SpansByMachine) -> list[tuple[str, float]]:
    """Return (machine, moment) of each loss: of an agent without which the next attempt of the launch goes on.

    A new agent may have its place already. The moment is when it was last alive, or else when the next began.
    """
    moved = timeline.moved_launches(run_folder)
    attempts = [attempt for attempt in run_folder.attempts.all() if attempt.members]
    losses = []
    for attempt, next_attempt in pairwise(attempts):
        launch_id, next_launch_id = (moved.get(each.launch_id, each.launch_id) for each in (attempt, next_attempt))
        for member, name in zip(attempt.members, attempt.machine_names, strict=True):
            if next_launch_id == launch_id and member not in next_attempt.members:
                moments = [
                    begin
                    for state, begin, _ in spans_by_machine.get(name, ())
                    if state == MachineState.LOST and attempt.time - 1 <= begin <= next_attempt.time + 1
                ]
                losses.append((name, moments[-1] if moments else next_attempt.time))
    return losses


# --- the facts of a job -----------------------------------------------------------------------------------------------


def collect_facts(job: Job) -> JobFacts:
    """Return the facts of a job in any state. A damaged file raises what `Job.report_damaged_files` expects."""
    spec, command, result = job.spec, job.spec.own_command, job.result
    attempts = job.timeline()
    activity = machine_activity(job.run, attempts)
    clock = WorkClock(activity, spec.created)
    planned_schedule = spec.schedule.table() if spec.schedule else []
    schedule = (result and result.schedule) or planned_schedule
    confusion = read_record(job.run_folder.network_folder / CONFUSION_FILE, Confusion)
    cost, dollars_over_time = _cost_over_time(job)
    return JobFacts(
        status=job.status(),
        result=result,
        model=command.short_text if command else spec.recipe.model.name,
        place=job.backend.description,
        data="" if command else spec.recipe.data.name,
        settings=comparable_settings(job),
        epochs=[replace(row, time=clock.seconds_at(row.time)) for row in job.run_folder.epochs()],
        steps=step_points(job.run_folder.steps(), clock),
        schedule=schedule,
        timeline=[replace(row, at=clock.seconds_at(row.at)) for row in attempts],
        activity={
            name: [(kind, clock.seconds_at(begin), clock.seconds_at(end)) for kind, begin, end in spans]
            for name, spans in activity.items()
        },
        losses=[(name, clock.seconds_at(moment)) for name, moment in machine_losses(job.run_folder, activity)],
        forecast=result.forecast if result and result.forecast else spec.forecast,
        forecast_comparison=(result and result.against) or (),
        cost=cost,
        dollars_over_time=dollars_over_time,
        sample_images=sample_images(job.path, schedule),
        confusion=confusion,
        confused_classes=confused_classes(job.path, confusion),
        provenance={name: value for name, value in _provenance(job, clock).items() if value},
    )


def _cost_over_time(job: Job) -> tuple[JobCost, list[tuple[float, float]]]:
    """Return what the job has cost, and points (seconds since the first launch of a machine, dollars until then)."""
    cost = job.backend.job_cost()
    if not cost.machines:
        return cost, []
    begin = min(machine.launched for machine in cost.machines)
    end = max(machine.ended or time.time() for machine in cost.machines)
    moments = [(end - begin) * index / COST_CURVE_POINTS for index in range(COST_CURVE_POINTS + 1)]
    return cost, [(moment, job.backend.job_cost(begin + moment).dollars) for moment in moments]


def _provenance(job: Job, clock: WorkClock) -> dict[str, str]:
    """Return what is needed to reproduce the numbers: code, versions, seed, data, times; "" for what is not known."""
    spec, result = job.spec, job.result
    processes = f"{_count(spec.machines, 'machine')} x {_count(spec.procs, 'process', 'processes')}"
    commit = (spec.git_commit or "not known").replace("+changes", ", with files that are not committed")
    if command := spec.own_command:
        project = spec.user_project.folder if spec.user_project else ""
        rows = {
            "command": command.short_text,
            "project": project,
            "commit of the program": commit,
            "data": spec.train.data,
            "processes": processes,
        }
    else:
        scale_note = "" if spec.train.scale == 1 else f": a rehearsal with {spec.train.scale:g} of all"
        versions = (result and result.versions) or {}
        rows = {
            "recipe": f"{spec.recipe.name}, {spec.recipe_file or 'from Python'}",
            "commit of the program": commit,
            "seed": str(spec.recipe.seed if result is None or result.seed is None else result.seed),
            "data": f"{spec.recipe.data.name}, {spec.data_source or spec.train.data}",
            "images": _describe_images(job) + scale_note,
            "training": text.describe_training(spec.recipe),
            "device": ", ".join(filter(None, (result.device, result.precision))) if result else "",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "processes": f"{processes}, schedule for {_count(spec.schedule_gpus, 'GPU')}",
        }
    rows |= {
        "job": spec.uid or spec.name,
        "launched": _format_utc(spec.created),
        "started work": _format_utc(clock.start_time),
    }
    if result and result.broken_images:
        rows["broken images"] = f"{result.broken_images}, each replaced by the next of its class; the log names them"
    if result and result.ids_wrong is not None:
        rows["images used"] = text.describe_image_usage(result.ids_wrong)
    return rows


def comparable_settings(job: Job) -> dict[str, HParamValue]:
    """Return the settings of a job, by name, that are worth comparing with other jobs."""
    if job.spec.own_command:
        return job.hparams
    recipe = job.spec.recipe
    # Of shapes that warm up within a part of a phase, the number of warm-up epochs would mislead.
    hparams = {name: value for name, value in job.hparams.items() if name not in ("model", "world", "warmup_epochs")}
    data = f"{recipe.data.name}, {_describe_images(job)}"
    return {"data": data, "training": text.describe_training(recipe), **hparams}


def _describe_images(job: Job) -> str:
    """Return the numbers of used images; before the first epoch, and of a shortened run, the planned numbers."""
    data = job.spec.recipe.data
    train_images, val_images = (scaled_image_count(count, job.spec.train.scale) for count in (data.train, data.val))
    if job.spec.train.max_steps is None and (epochs := job.run_folder.epochs()):
        train_images = max(epoch.train_images for epoch in epochs)
        val_images = max(epoch.val_images or val_images for epoch in epochs)
    return f"{train_images:,} for training, {val_images:,} for validation"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _format_utc(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timestamp))


# --- curves of the steps ---------------------------------------------------------------------------------------------


def step_points(rows: Iterable[StepRow], clock: WorkClock, max_points: int = MAX_CURVE_POINTS) -> list[StepPoint]:
    """Return at most `max_points` points; of several rows the mean loss, the median speed, else the last values."""
    cells = ((row.time, row.images, row.attempt, *map(row.scalars.get, SCALARS.values())) for row in rows)
    columns = np.fromiter(cells, COLUMN_TYPES)  # None becomes NaN
    point_count = min(len(columns), max_points)
    edges = [len(columns) * index // point_count for index in range(point_count + 1)] if point_count else []
    points = []
    for begin, end in pairwise(edges):
        part = columns[begin:end]
        last = dict(zip(columns.dtype.names or (), part[-1].item(), strict=True))
        last["time"] = clock.seconds_at(last["time"])
        last["loss"] = float(np.mean(known)) if len(known := _known(part["loss"])) else math.nan
        last["images_per_second"] = (
            float(np.median(known)) if len(known := _known(part["images_per_second"])) else math.nan
        )
        points.append(StepPoint(**last))
    return points


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


# --- validation images -----------------------------------------------------------------------------------------------


def sample_images(run_folder: Path, schedule: Sequence[PhaseRow]) -> list[SampleImage]:
    """Return the thumbnails of a run, with the crops that the last phase of `schedule` validates."""
    images = []
    for thumbnail in read_thumbnails(run_folder) if schedule else ():
        side, is_rectangle = schedule[-1].size, schedule[-1].rect_val
        height, width = rect_crop_shape(*thumbnail.size, side) if is_rectangle else (side, side)
        seen = center_crop_box(thumbnail.size, (height, width))
        square = center_crop_box(thumbnail.size, (side, side)) if is_rectangle else None
        images.append(SampleImage(thumbnail=thumbnail, seen=seen, pixels=(width, height), square=square))
    return images


def center_crop_box(image_size: tuple[int, int], crop_shape: tuple[int, int]) -> RelativeBox:
    """Return the part of an image of (width, height) that the center crop of shape (height, width) sees."""
    width, height = image_size
    whole_height, whole_width = resized = resized_size((height, width), crop_shape)
    top, left = center_corner(resized, crop_shape)
    return left / whole_width, top / whole_height, crop_shape[1] / whole_width, crop_shape[0] / whole_height


def confused_classes(run_folder: Path, confusion: Confusion | None) -> list[ConfusedClasses]:
    """Return the most frequent errors of the last validation for whose classes the run has kept images."""
    thumbnails = {thumbnail.label: thumbnail for thumbnail in read_class_thumbnails(run_folder)}
    pairs = confusion.most_confused(PICTURED_PAIRS) if confusion else []
    return [
        ConfusedClasses(pair=pair, true=thumbnails[pair.true], predicted=thumbnails[pair.predicted])
        for pair in pairs
        if {pair.true, pair.predicted} <= thumbnails.keys()
    ]
