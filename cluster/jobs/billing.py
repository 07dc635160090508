"""Operations on jobs whose machines cost money: terminate at once, report the cost, extend the time limit."""

import contextlib
import time
from typing import Any

from cluster.connectors import tmux
from cluster.errors import ClusterError
from cluster.state import result, timeline
from cluster.state.states import JobState
from train.tools.filesystem import to_json_bytes, write_atomic

from .job import Job

DOWN_REASON = "ended by the user (imgnet-cluster down)"
JOB_LOCK_TIMEOUT_SECONDS = 60.0  # for another command to finish its change of the job


def terminate_job(job: Job) -> None:
    """Terminate a job and all its rented machines at once, also what remains of a job that has ended.

    Returns when nothing of it is left. Raises `ClusterError` with what could not be terminated.
    """
    if job.is_waiting:
        return job.stop()
    if not job.has_ended:
        with contextlib.suppress(OSError):  # a full disk must not prevent the termination of machines that cost money
            write_atomic(job.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "reason": DOWN_REASON}))
        # The supervisor would replace the machines that are terminated below.
        tmux.kill_session(job.name, job.path)
    with job.locked(JOB_LOCK_TIMEOUT_SECONDS):
        silent_machines = job.backend.terminate(job.spec, job.run_folder)
        try:
            if not job.has_ended:
                result.write_result(
                    job.run_folder, job.spec, job.backend, silent_machines, DOWN_REASON, JobState.STOPPED
                )
        except OSError as error:
            raise ClusterError(f"{job.name}: its machines are gone; its result cannot be written: {error}") from error


def cost_report(job: Job, target_top5: float | None = None) -> dict[str, Any]:
    """Return what a job has cost: a row for each machine, sums in dollars, and the dollars per epoch.

    "to_target" is what had been spent when validation first reached `target_top5` percent. "wasted" is what was spent
    on steps that had to be repeated, and in the pauses after losses; "wasted_seconds" is their duration.

    Raises `ClusterError` when the machines of the job were not rented.
    """
    if job.spec.backend != "aws":
        raise ClusterError(
            f"{job.name} did not run on rented machines but on {job.backend.DESCRIPTION}; it has no cost"
        )
    from cluster.backends.aws import admin

    def dollars_until(moment: float) -> float:
        return float(admin.job_cost(job.path, moment)["dollars"])

    total = admin.job_cost(job.path)
    epochs = job.metric_rows("epoch")
    steps = job.metric_rows("train")
    target_time = None
    if target_top5 is not None:
        target_time = next((row["time"] for row in epochs if (row["top5"] or 0.0) >= target_top5), None)
    begin, end = (steps[0]["time"], epochs[-1]["time"]) if steps and epochs else (0.0, 0.0)
    training_dollars = dollars_until(end) - dollars_until(begin) if epochs else 0.0
    losses = timeline.lost_intervals(job.path, job.run_folder.shared)
    return {
        "job": job.name,
        **total,
        "per_epoch": training_dollars / len(epochs) if epochs else None,
        "to_target": None if target_time is None else dollars_until(target_time),
        "wasted": sum(dollars_until(end) - dollars_until(start) for start, end in losses) if steps else None,
        "wasted_seconds": sum(end - start for start, end in losses),
    }


def last_rented_type(job: Job) -> str:
    """Return the type of the machine that a job rented last, "" when it rented none."""
    machines = _aws_cost(job).get("machines", [])
    return str(machines[-1]["type"]) if machines else ""


def machines_without_price(job: Job) -> list[str]:
    """Return the IDs of rented machines whose price is unknown. They are not part of any sum of dollars."""
    return list(_aws_cost(job).get("unknown", []))


def _aws_cost(job: Job) -> dict[str, Any]:
    """Return the cost of a job on AWS, {} for other backends."""
    if job.spec.backend != "aws":
        return {}
    from cluster.backends.aws import admin

    return admin.job_cost(job.path)


def extend(job: Job, hours: float) -> None:
    """Set the time limit of a job's machines, in hours since the first of them started.

    Raises `ClusterError` when the job has no rented machines at work, or with the machines that did not get the change.
    """
    if job.spec.backend != "aws" or job.has_ended:
        raise ClusterError(f"{job.name} has no rented machines at work; see: imgnet-cluster status {job.name}")
    from cluster.backends.aws import backend

    backend.extend_time_limit(job.spec, job.run_folder, hours)
