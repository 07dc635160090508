"""What only matters where machines cost money: end a job at once, what it has cost, more time for it."""

import contextlib
import time
from typing import Any

from cluster.connectors import tmux
from cluster.errors import ClusterError
from cluster.state import result, timeline
from train.tools.filesystem import to_json_bytes, write_atomic

from .job import Job

DOWN_REASON = "ended by the user (imgnet-cluster down)"
JOB_LOCK_TIMEOUT_SECONDS = 60.0  # for another command to finish with the job


def terminate_job(job: Job) -> None:
    """End a job at once and all that it rents, also what is left of one that has ended.

    Returns when nothing is there any more. Raises `ClusterError` with what is not gone.
    """
    if job.is_waiting:
        return job.stop()
    if not job.has_ended:
        with contextlib.suppress(OSError):  # a full disk keeps nobody from ending what costs
            write_atomic(job.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "reason": DOWN_REASON}))
        tmux.kill_session(job.name, job.path)  # its supervisor would rent machines for those that we end
    with job.locked(JOB_LOCK_TIMEOUT_SECONDS):
        silent = job.backend.terminate(job.spec, job.run_folder)
        try:
            if not job.has_ended:
                result.write_result(job.run_folder, job.spec, job.backend, silent, DOWN_REASON, "stopped")
        except OSError as error:
            raise ClusterError(f"{job.name}: its machines are gone; its result cannot be written: {error}") from error


def cost_report(job: Job, target_top5: float | None = None) -> dict[str, Any]:
    """Return what a job has cost: rows for machines, sums, and what they bought. Raises `ClusterError`.

    `to_target` is what had been spent when the validation first reached `top5` percent, "wasted" what went into steps
    that had to be done again, and into the pauses after losses.
    """
    if job.spec.backend != "aws":
        raise ClusterError(f"{job.name} ran on {job.backend.DESCRIPTION}, which costs nothing here")
    from cluster.backends.aws import admin

    def until(moment: float) -> float:
        return float(admin.job_cost(job.path, moment)["dollars"])

    said, epochs = admin.job_cost(job.path), job.metric_rows("epoch")
    steps = job.metric_rows("train")
    hit = next((row["time"] for row in epochs if target_top5 is not None and (row["top5"] or 0.0) >= target_top5), None)
    begin, end = (steps[0]["time"], epochs[-1]["time"]) if steps and epochs else (0.0, 0.0)
    trained = until(end) - until(begin) if epochs else 0.0
    losses = timeline.lost_intervals(job.path, job.run_folder.shared)
    return {
        "job": job.name,
        **said,
        "per_epoch": trained / len(epochs) if epochs else None,
        "to_target": None if hit is None else until(hit),
        "wasted": sum(until(last) - until(first) for first, last in losses) if steps else None,
        "wasted_seconds": sum(last - first for first, last in losses),
    }


def last_rented_type(job: Job) -> str:
    """Return the type of the machine that a job rented last, "" when it rented none."""
    return str(next((one["type"] for one in reversed(_aws_cost(job).get("machines", []))), ""))


def machines_without_price(job: Job) -> list[str]:
    """Return the machines that a job rented and whose price nobody knew: they are in no sum of dollars."""
    return list(_aws_cost(job).get("unknown", []))


def _aws_cost(job: Job) -> dict[str, Any]:
    if job.spec.backend != "aws":
        return {}
    from cluster.backends.aws import admin

    return admin.job_cost(job.path)


def extend(job: Job, hours: float) -> None:
    """Let a job's machines live for so many hours since the first came. Raises `ClusterError` with who did not hear."""
    if job.spec.backend != "aws" or job.has_ended:
        raise ClusterError(f"{job.name} has no rented machines at work; imgnet-cluster status {job.name}")
    from cluster.backends.aws import backend

    backend.extend_time_limit(job.spec, job.run_folder, hours)
