"""Collects what a report shows of a job, from the run folder. No machine is asked."""

import time
from collections.abc import Sequence

from cluster.backends.base import BilledBackend
from cluster.jobs.job import Job
from cluster.plots.job_facts import CostFacts, EpochPoint, JobFacts, TimelineRow
from cluster.state.job_result import JobResult
from cluster.state.spec import JobSpec
from cluster.state.status import effective_rows
from train.metrics import text
from train.metrics.confusion import Confusion
from train.metrics.records import EpochRow
from train.recipe.history import EpochResult
from train.recipe.schedule import PhaseRow, scaled_image_count
from train.tools.agent_protocol import CONFUSION_FILE
from train.tools.records import read_record

from .activity import WorkClock, extend_losses_to_job_end, machine_activity, machine_losses
from .sample_images import confused_classes, sample_images
from .step_curve import StepColumns, read_curve_rows

COST_CURVE_POINTS = 80  # points of the curve of dollars


def collect_facts(job: Job) -> JobFacts:
    """Return the facts of a job in any state.

    Raises `ClusterError` when the run folder is damaged.
    """
    with job.report_damaged_files():
        return _collect_facts(job)


def _collect_facts(job: Job) -> JobFacts:
    spec = job.spec
    command = spec.own_command
    result = job.result
    status = job.status()
    timeline = job.timeline()
    activity = extend_losses_to_job_end(machine_activity(job.run), timeline)
    steps = StepColumns(effective_rows(job.run_folder, read_curve_rows))
    clock = WorkClock(activity, steps.times[0] if steps.times else spec.created)
    schedule = (result and result.schedule) or _planned_schedule(job)
    confusion = read_record(job.run_folder.network_folder / CONFUSION_FILE, Confusion)
    return JobFacts(
        job=job.name,
        status=status,
        result=result,
        model=command.text if command else spec.recipe.model.name,
        settings=comparable_settings(job),
        data="" if command else spec.recipe.data.name,
        backend=job.backend.description,
        machines=spec.machines,
        processes=spec.machines * spec.procs,
        epochs=epochs_over_time(job.epochs(), result.epochs if result else (), clock),
        steps=steps.points(clock),
        schedule=schedule,
        timeline=[TimelineRow(**vars(row), seconds=clock.seconds_at(row.at)) for row in timeline],
        activity={
            name: [(kind, clock.seconds_at(begin), clock.seconds_at(end)) for kind, begin, end in spans]
            for name, spans in activity.items()
        },
        losses=[(name, clock.seconds_at(moment)) for name, moment in machine_losses(timeline, activity)],
        hosts={name: machine.host for name, machine in job.machine_details().items()},
        forecast=result.forecast if result and result.forecast else job.spec.forecast,
        forecast_comparison=(result and result.against) or (),
        cost=cost_over_time(job, result),
        sample_images=sample_images(job.path, schedule[-1] if schedule else None),
        confusion=confusion,
        confused_classes=confused_classes(job.path, confusion),
        provenance=provenance(job, result, clock),
    )


def epochs_over_time(
    metrics_rows: Sequence[EpochRow], result_epochs: Sequence[EpochResult], clock: WorkClock
) -> list[EpochPoint]:
    """Return the finished epochs. They come from the metrics, or from the result of an old run that has no metrics."""
    if metrics_rows:
        return [EpochPoint(seconds=clock.seconds_at(row.time), images=row.images, result=row) for row in metrics_rows]
    points = []
    seconds = 0.0
    images = 0
    for row in result_epochs:
        seconds += row.seconds
        images += row.train_images
        points.append(EpochPoint(seconds=seconds, images=images, result=row))
    return points


def _planned_schedule(job: Job) -> list[PhaseRow]:
    """Return the rows of the planned schedule, for a job without a result; none for a command."""
    schedule = job.spec.schedule
    return schedule.table() if schedule else []


def cost_over_time(job: Job, result: JobResult | None) -> CostFacts:
    """Return what the job has cost."""
    backend = job.backend
    if not isinstance(backend, BilledBackend):
        return CostFacts(total=result.dollars if result else 0.0)
    cost = backend.job_cost()
    over_time = []
    if cost.machines:
        begin = min(machine.launched for machine in cost.machines)
        end = max(machine.ended or time.time() for machine in cost.machines)
        for index in range(COST_CURVE_POINTS + 1):
            moment = begin + (end - begin) * index / COST_CURVE_POINTS
            over_time.append((moment - begin, backend.job_cost(moment).dollars))
    return CostFacts(total=cost.dollars, machines=cost.machines, over_time=over_time, unknown=cost.unknown)


def provenance(job: Job, result: JobResult | None, clock: WorkClock) -> list[tuple[str, str]]:
    """Return what is needed to reproduce the numbers: code, versions, seed, data, times. Unknown rows are left out."""
    spec = job.spec
    machines = _format_count(spec.machines, "machine")
    processes = _format_count(spec.procs, "process", "es")
    if command := spec.own_command:
        rows = [
            ("command", command.text),
            ("project", spec.user_project.folder if spec.user_project else ""),
            ("commit of the program", _describe_commit(spec.git_commit)),
            ("data", spec.train.data),
            ("processes", f"{machines} x {processes}"),
        ]
    else:
        rows = [*_recipe_provenance(job, result), ("processes", f"{machines} x {processes}, {_schedule_size(spec)}")]
    rows += [
        ("job", spec.uid or spec.name),
        ("launched", format_utc(spec.created)),
        ("started work", format_utc(clock.start_time)),
    ]
    if result and result.ids_wrong is not None:
        rows.append(("images used", "; ".join(result.ids_wrong) or "every image exactly once in every epoch"))
    return [(name, value) for name, value in rows if value]


def _schedule_size(spec: JobSpec) -> str:
    return f"schedule for {_format_count(spec.schedule_gpus, 'GPU')}"


def _recipe_provenance(job: Job, result: JobResult | None) -> list[tuple[str, str]]:
    """Return the rows that only a recipe has: its file, seed, images, versions."""
    spec = job.spec
    scale_note = "" if spec.train.scale == 1 else f": a rehearsal with {spec.train.scale:g} of all"
    versions = (result and result.versions) or {}
    seed = spec.recipe.seed if result is None or result.seed is None else result.seed
    device = (result.device, result.precision) if result else ()
    return [
        ("recipe", f"{spec.recipe.name}, {spec.recipe_file or 'from Python'}"),
        ("commit of the program", _describe_commit(spec.git_commit)),
        ("seed", str(seed)),
        ("data", f"{spec.recipe.data.name}, {spec.data_source or spec.train.data}"),
        ("images", _describe_images(job) + scale_note),
        ("training", text.describe_training(spec.recipe)),
        ("device", ", ".join(filter(None, device))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def comparable_settings(job: Job) -> dict[str, str | int | float | None]:
    """Return the settings of a job, by name, that are worth comparing with other jobs; None where it would mislead."""
    hparams = job.hparams
    if job.spec.own_command:
        return {name: value for name, value in hparams.items() if name != "command"}
    recipe = job.spec.recipe
    # These shapes warm up within a part of a phase, so the number of warm-up epochs would be wrong.
    warms_up_within_phase = any(phase.shape in ("one_cycle", "gradual_warmup") for phase in recipe.phases)
    return {
        "data": f"{recipe.data.name}, {_describe_images(job)}",
        "training": text.describe_training(recipe),
        "highest learning rate": hparams["lr"],
        "epochs of warm-up": None if warms_up_within_phase else hparams["warmup_epochs"],
        "epochs planned": hparams["epochs"],
        "first global batch": hparams["batch_first"],
        "largest global batch": hparams["batch_largest"],
        "largest image size": hparams["size_largest"],
        "seed": hparams["seed"],
    }


def _describe_images(job: Job) -> str:
    """Return the numbers of used images; before the first epoch, and of a shortened run, the planned numbers."""
    data = job.spec.recipe.data
    train_images, val_images = (scaled_image_count(count, job.spec.train.scale) for count in (data.train, data.val))
    if job.spec.train.max_steps is None and (epochs := job.epochs()):
        train_images = max(epoch.train_images for epoch in epochs)
        val_images = max(epoch.val_images or val_images for epoch in epochs)
    return f"{train_images:,} for training, {val_images:,} for validation"


def _describe_commit(commit: str | None) -> str:
    """Return the commit that `git_commit` found, and whether the working tree had other changes."""
    if commit is None:
        return "not known"
    name = commit.removesuffix("+changes")
    return name if name == commit else f"{name}, with files that are not committed"


def _format_count(number: int, noun: str, plural_suffix: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural_suffix}"


def format_utc(timestamp: float) -> str:
    """Return a moment of the wall clock in UTC, as text for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timestamp))
