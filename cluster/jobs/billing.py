"""What only matters where machines cost money: end a job at once, what it has cost, more time for it."""

import contextlib
import time
from typing import Any

from cluster.connectors import tmux
from cluster.errors import ClusterError
from cluster.state import result, timeline
from train.tools.filesystem import as_json, replace

from .job import Job

ENDING = "ended by the user (imgnet-cluster down)"
BUSY_SECONDS = 60.0  # for another command to finish with the job


def down(job: Job) -> None:
    """End a job at once and all that it rents, also what is left of one that has ended.

    Returns when nothing is there any more. Raises `ClusterError` with what is not gone.
    """
    if job.waiting:
        return job.stop()
    if not job.ended:
        with contextlib.suppress(OSError):  # a full disk keeps nobody from ending what costs
            replace(job.folders.shared / "stop", as_json({"time": time.time(), "reason": ENDING}))
        tmux.kill(job.name, job.run)  # its supervisor would rent machines for those that we end
    with job.locked(BUSY_SECONDS):
        silent = job.backend.terminate(job.spec, job.folders)
        try:
            if not job.ended:
                result.settle(job.folders, job.spec, job.backend, silent, ENDING, "stopped")
        except OSError as error:
            raise ClusterError(f"{job.name}: its machines are gone; its result cannot be written: {error}") from error


def cost(job: Job, top5: float | None = None) -> dict[str, Any]:
    """Return what a job has cost: rows for machines, sums, and what they bought. Raises `ClusterError`.

    `to_target` is what had been spent when the validation first reached `top5` percent, "wasted" what went into steps
    that had to be done again, and into the pauses after losses.
    """
    if job.spec.backend != "aws":
        raise ClusterError(f"{job.name} ran on {job.backend.DESCRIPTION}, which costs nothing here")
    from cluster.backends.aws import admin

    def until(moment: float) -> float:
        return float(admin.cost(job.run, moment)["dollars"])

    said, epochs = admin.cost(job.run), job.lines("epoch")
    steps = job.lines("train")
    hit = next((row["time"] for row in epochs if top5 is not None and (row["top5"] or 0.0) >= top5), None)
    begin, end = (steps[0]["time"], epochs[-1]["time"]) if steps and epochs else (0.0, 0.0)
    trained = until(end) - until(begin) if epochs else 0.0
    losses = timeline.losses(job.run, job.folders.shared)
    return {
        "job": job.name,
        **said,
        "per_epoch": trained / len(epochs) if epochs else None,
        "to_target": None if hit is None else until(hit),
        "wasted": sum(until(last) - until(first) for first, last in losses) if steps else None,
        "wasted_seconds": sum(last - first for first, last in losses),
    }


def rented_type(job: Job) -> str:
    """Return the type of the machine that a job rented last, "" when it rented none."""
    return str(next((one["type"] for one in reversed(_bill(job).get("machines", []))), ""))


def unpriced(job: Job) -> list[str]:
    """Return the machines that a job rented and whose price nobody knew: they are in no sum of dollars."""
    return list(_bill(job).get("unknown", []))


def _bill(job: Job) -> dict[str, Any]:
    if job.spec.backend != "aws":
        return {}
    from cluster.backends.aws import admin

    return admin.cost(job.run)


def extend(job: Job, hours: float) -> None:
    """Let a job's machines live for so many hours since the first came. Raises `ClusterError` with who did not hear."""
    if job.spec.backend != "aws" or job.ended:
        raise ClusterError(f"{job.name} has no rented machines at work; imgnet-cluster status {job.name}")
    from cluster.backends.aws import backend

    backend.extend(job.spec, job.folders, hours)
