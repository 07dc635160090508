"""What a report says of a job, as plain data. Reads what is at home."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cluster.errors import ClusterError
from cluster.jobs.job import Job
from train.metrics import text
from train.recipe.schedule import Schedule, scaled_image_count

from .activity import WorkClock, extend_losses_to_job_end, machine_activity, machine_losses
from .sample_images import sample_images

MAX_CURVE_POINTS = 400  # of a curve: what a chart of a hand's breadth can show
COST_CURVE_POINTS = 80  # of the curve of dollars
JsonDict = dict[str, Any]


def collect_facts(job: Job) -> JsonDict:
    """Return what there is to show of a job in whatever state.

    Raises `ClusterError` when the run folder is damaged.
    """
    try:
        return _collect_facts(job)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ClusterError(f"{job.path}: a file in it is damaged ({type(error).__name__}: {error})") from error


def _collect_facts(job: Job) -> JsonDict:
    spec, result, status = job.spec, job.result or {}, job.status()
    timeline = job.timeline()
    found = extend_losses_to_job_end(machine_activity(job.run_folder, spec.machine_names), timeline)
    lines = job.metric_rows("train")
    clock = WorkClock(found, lines[0]["time"] if lines else spec.created)
    rows = result.get("schedule") or _planned_schedule(job)
    return {
        "job": job.name,
        "status": status,
        "result": result,
        "model": spec.recipe.model.name,
        "settings": comparable_settings(job),
        "data": spec.recipe.data.name,
        "where": job.backend.DESCRIPTION,
        "machines": spec.machines,
        "processes": spec.machines * spec.procs,
        "epochs": epochs_over_time(job.metric_rows("epoch"), result.get("epochs") or [], clock),
        "train": downsample([_training_row(row, clock) for row in lines]),
        "schedule": rows,
        "timeline": [{**one, "seconds": clock.seconds_at(one["at"])} for one in timeline],
        "lives": {
            name: [(kind, clock.seconds_at(begin), clock.seconds_at(end)) for kind, begin, end in some]
            for name, some in found.items()
        },
        "losses": [(name, clock.seconds_at(moment)) for name, moment in machine_losses(timeline, found)],
        "hosts": {name: one["host"] for name, one in job.machine_details().items()},
        "forecast": result.get("forecast") or spec.forecast,
        "against": result.get("against") or [],
        "dollars": cost_over_time(job, result),
        "images": sample_images(job.path, rows[-1] if rows else {}),
        "provenance": provenance(job, result, clock),
    }


def epochs_over_time(
    metrics_lines: Sequence[Mapping[str, Any]], result_epochs: Sequence[Mapping[str, Any]], clock: WorkClock
) -> list[JsonDict]:
    """Return the epochs' rows with "at" (seconds at work) and "images" seen; those of the result where no lines are."""
    if metrics_lines:
        return [{**row, "at": clock.seconds_at(row["time"])} for row in metrics_lines]
    found, at, seen = [], 0.0, 0
    for row in result_epochs:
        at, seen = at + row["seconds"], seen + row["train_images"]
        found.append({**row, "at": at, "images": seen})
    return found


def _training_row(row: Mapping[str, Any], clock: WorkClock) -> JsonDict:
    """A line of the metrics in short; what an older trainer did not write is None."""
    names = {
        "loss": "train/loss", "lr": "sizes/lr", "size": "sizes/image", "batch": "sizes/batch_total",
        "speed": "times/images_per_second",
    }  # fmt: skip
    known = {"images": row["images"], "at": clock.seconds_at(row["time"]), "attempt": row.get("attempt", 1)}
    return {**known, **{key: row.get(one) for key, one in names.items()}}


def downsample(rows: Sequence[JsonDict], max_rows: int = MAX_CURVE_POINTS) -> list[JsonDict]:
    """Return at most so many rows: of several one, with their mean loss, median speed, and the last one's rest."""
    if len(rows) <= max_rows:
        return list(rows)
    edges = [len(rows) * one // max_rows for one in range(max_rows + 1)]
    parts = [rows[begin:end] for begin, end in pairwise(edges)]
    return [
        {
            **part[-1],
            "loss": _aggregate(statistics.fmean, part, "loss"),
            "speed": _aggregate(statistics.median, part, "speed"),
        }
        for part in parts
    ]


def _aggregate(function: Callable[[list[float]], float], rows: Sequence[JsonDict], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return function(values) if values else None


def _planned_schedule(job: Job) -> list[JsonDict]:
    """What is planned, of a job that has no result yet."""
    spec = job.spec
    images = scaled_image_count(spec.recipe.data.train, spec.scale)
    return Schedule(spec.recipe, images, spec.schedule_gpus, spec.max_steps).table()


def cost_over_time(job: Job, result: Mapping[str, Any]) -> JsonDict:
    """Return what the job has cost: "total", rows of "machines", and ("over") the sum after so many seconds."""
    if job.spec.backend != "aws":
        return {"total": result.get("dollars", 0.0), "machines": [], "over": [], "unknown": []}
    from cluster.backends.aws import admin

    said = admin.job_cost(job.path)
    begin = min((one["launched"] for one in said["machines"]), default=0.0)
    end = max((one["ended"] or time.time() for one in said["machines"]), default=0.0)
    moments = (
        [begin + (end - begin) * one / COST_CURVE_POINTS for one in range(COST_CURVE_POINTS + 1)]
        if said["machines"]
        else []
    )
    return {
        "total": said["dollars"],
        "machines": said["machines"],
        "over": [(one - begin, admin.job_cost(job.path, one)["dollars"]) for one in moments],
        "unknown": said["unknown"],
    }


def provenance(job: Job, result: Mapping[str, Any], clock: WorkClock) -> list[tuple[str, str]]:
    """Return by what the numbers can be had again: code, versions, seed, data, times."""
    spec = job.spec
    versions, machines = result.get("versions") or {}, _format_count(spec.machines, "machine")
    rows = [
        ("recipe", f"{spec.recipe.name}, {spec.recipe_file or 'from Python'}"),
        ("git commit", str(spec.git_commit or "not known")),
        ("seed", str(result.get("seed", spec.recipe.seed))),
        ("data", f"{spec.recipe.data.name}, {spec.data_source or spec.data}"),
        ("images", _describe_images(job) + ("" if spec.scale == 1 else f": a rehearsal with {spec.scale:g} of all")),
        ("training", text.describe_training(spec.recipe)),
        (
            "processes",
            f"{machines} x {_format_count(spec.procs, 'process', 'es')}, schedule for {_format_count(spec.schedule_gpus, 'GPU')}",
        ),
        ("device", ", ".join(str(result[name]) for name in ("device", "precision") if name in result)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("job", spec.uid or spec.name),
        ("launched", format_utc(spec.created)),
        ("began", format_utc(clock.start_time)),
    ]
    if "ids_wrong" in result:
        rows.append(("images used", "; ".join(result["ids_wrong"]) or "every image exactly once in every epoch"))
    return [(name, said) for name, said in rows if said]


def comparable_settings(job: Job) -> JsonDict:
    """Return what was asked of a job, by words, to stand beside what was asked of others; None: it would mislead."""
    recipe, known = job.spec.recipe, job.hparams
    rising = any(one.shape in ("one_cycle", "gradual_warmup") for one in recipe.phases)  # in parts of phases, too
    return {
        "data": f"{recipe.data.name}, {_describe_images(job)}",
        "training": text.describe_training(recipe),
        "highest rate": known["lr"],
        "epochs of warm-up": None if rising else known["warmup_epochs"],
        "epochs planned": known["epochs"],
        "first global batch": known["batch_first"],
        "largest global batch": known["batch_largest"],
        "largest side, pixels": known["size_largest"],
        "seed": known["seed"],
    }


def _describe_images(job: Job) -> str:
    data, scale = job.spec.recipe.data, job.spec.scale
    return f"{scaled_image_count(data.train, scale):,} to train on, {scaled_image_count(data.val, scale):,} to validate"


def _format_count(number: int, noun: str, plural_suffix: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural_suffix}"


def format_utc(timestamp: float) -> str:
    """Return a moment of the wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timestamp))
