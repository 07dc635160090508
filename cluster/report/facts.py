"""What a report says of a job, as plain data. Reads what is at home."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cluster.errors import ClusterError
from cluster.jobs.job import Job
from train.metrics import text
from train.recipe.schedule import Schedule, scaled

from .activity import Clock, lives, losses, until_the_end
from .sample_images import pictures

POINTS = 400  # of a curve: what a chart of a hand's breadth can show
MOMENTS = 80  # of the curve of dollars
Facts = dict[str, Any]


def facts(job: Job) -> Facts:
    """Return what there is to show of a job in whatever state.

    Raises `ClusterError` when the run folder is damaged.
    """
    try:
        return _facts(job)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ClusterError(f"{job.run}: a file in it is damaged ({type(error).__name__}: {error})") from error


def _facts(job: Job) -> Facts:
    spec, result, status = job.spec, job.result or {}, job.status()
    timeline = job.timeline()
    found = until_the_end(lives(job.folders, spec.names), timeline)
    lines = job.lines("train")
    clock = Clock(found, lines[0]["time"] if lines else spec.created)
    rows = result.get("schedule") or _schedule(job)
    return {
        "job": job.name,
        "status": status,
        "result": result,
        "model": spec.recipe.model.name,
        "settings": settings(job),
        "data": spec.recipe.data.name,
        "where": job.backend.DESCRIPTION,
        "machines": spec.machines,
        "processes": spec.machines * spec.procs,
        "epochs": epochs(job.lines("epoch"), result.get("epochs") or [], clock),
        "train": thin([_step(row, clock) for row in lines]),
        "schedule": rows,
        "timeline": [{**one, "seconds": clock.at(one["at"])} for one in timeline],
        "lives": {
            name: [(kind, clock.at(begin), clock.at(end)) for kind, begin, end in some] for name, some in found.items()
        },
        "losses": [(name, clock.at(moment)) for name, moment in losses(timeline, found)],
        "hosts": {name: one["host"] for name, one in job.machines().items()},
        "forecast": result.get("forecast") or spec.forecast,
        "against": result.get("against") or [],
        "dollars": dollars(job, result),
        "images": pictures(job.run, rows[-1] if rows else {}),
        "provenance": provenance(job, result, clock),
    }


def epochs(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], clock: Clock) -> list[Facts]:
    """Return the epochs' rows with "at" (seconds at work) and "images" seen; those of the result where no lines are."""
    if lines:
        return [{**row, "at": clock.at(row["time"])} for row in lines]
    found, at, seen = [], 0.0, 0
    for row in rows:
        at, seen = at + row["seconds"], seen + row["train_images"]
        found.append({**row, "at": at, "images": seen})
    return found


def _step(row: Mapping[str, Any], clock: Clock) -> Facts:
    """A line of the metrics in short; what an older trainer did not write is None."""
    names = {
        "loss": "train/loss", "lr": "sizes/lr", "size": "sizes/image", "batch": "sizes/batch_total",
        "speed": "times/images_per_second",
    }  # fmt: skip
    known = {"images": row["images"], "at": clock.at(row["time"]), "attempt": row.get("attempt", 1)}
    return {**known, **{key: row.get(one) for key, one in names.items()}}


def thin(rows: Sequence[Facts], most: int = POINTS) -> list[Facts]:
    """Return at most so many rows: of several one, with their mean loss, median speed, and the last one's rest."""
    if len(rows) <= most:
        return list(rows)
    edges = [len(rows) * one // most for one in range(most + 1)]
    parts = [rows[begin:end] for begin, end in pairwise(edges)]
    return [
        {**part[-1], "loss": _of(statistics.fmean, part, "loss"), "speed": _of(statistics.median, part, "speed")}
        for part in parts
    ]


def _of(how: Callable[[list[float]], float], rows: Sequence[Facts], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return how(values) if values else None


def _schedule(job: Job) -> list[Facts]:
    """What is planned, of a job that has no result yet."""
    spec = job.spec
    images = scaled(spec.recipe.data.train, spec.scale)
    return Schedule(spec.recipe, images, spec.gpus, spec.max_steps).table()


def dollars(job: Job, result: Mapping[str, Any]) -> Facts:
    """Return what the job has cost: "total", rows of "machines", and ("over") the sum after so many seconds."""
    if job.spec.backend != "aws":
        return {"total": result.get("dollars", 0.0), "machines": [], "over": [], "unknown": []}
    from cluster.backends.aws import admin

    said = admin.cost(job.run)
    begin = min((one["launched"] for one in said["machines"]), default=0.0)
    end = max((one["ended"] or time.time() for one in said["machines"]), default=0.0)
    moments = [begin + (end - begin) * one / MOMENTS for one in range(MOMENTS + 1)] if said["machines"] else []
    return {
        "total": said["dollars"],
        "machines": said["machines"],
        "over": [(one - begin, admin.cost(job.run, one)["dollars"]) for one in moments],
        "unknown": said["unknown"],
    }


def provenance(job: Job, result: Mapping[str, Any], clock: Clock) -> list[tuple[str, str]]:
    """Return by what the numbers can be had again: code, versions, seed, data, times."""
    spec = job.spec
    versions, machines = result.get("versions") or {}, _count(spec.machines, "machine")
    rows = [
        ("recipe", f"{spec.recipe.name}, {spec.recipe_file or 'from Python'}"),
        ("git commit", str(spec.git_commit or "not known")),
        ("seed", str(result.get("seed", spec.recipe.seed))),
        ("data", f"{spec.recipe.data.name}, {spec.source or spec.data}"),
        ("images", _images(job) + ("" if spec.scale == 1 else f": a rehearsal with {spec.scale:g} of all")),
        ("training", text.settings(spec.recipe)),
        ("processes", f"{machines} x {_count(spec.procs, 'process', 'es')}, schedule for {_count(spec.gpus, 'GPU')}"),
        ("device", ", ".join(str(result[name]) for name in ("device", "precision") if name in result)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("job", spec.uid or spec.name),
        ("launched", stamp(spec.created)),
        ("began", stamp(clock.first)),
    ]
    if "ids_wrong" in result:
        rows.append(("images used", "; ".join(result["ids_wrong"]) or "every image exactly once in every epoch"))
    return [(name, said) for name, said in rows if said]


def settings(job: Job) -> Facts:
    """Return what was asked of a job, by words, to stand beside what was asked of others; None: it would mislead."""
    recipe, known = job.spec.recipe, job.hparams
    rising = any(one.shape in ("one_cycle", "gradual_warmup") for one in recipe.phases)  # in parts of phases, too
    return {
        "data": f"{recipe.data.name}, {_images(job)}",
        "training": text.settings(recipe),
        "highest rate": known["lr"],
        "epochs of warm-up": None if rising else known["warmup_epochs"],
        "epochs planned": known["epochs"],
        "first global batch": known["batch_first"],
        "largest global batch": known["batch_largest"],
        "largest side, pixels": known["size_largest"],
        "seed": known["seed"],
    }


def _images(job: Job) -> str:
    data, scale = job.spec.recipe.data, job.spec.scale
    return f"{scaled(data.train, scale):,} to train on, {scaled(data.val, scale):,} to validate"


def _count(number: int, what: str, more: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else more}"


def stamp(moment: float) -> str:
    """Return a moment of the wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
