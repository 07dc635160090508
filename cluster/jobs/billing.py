"""Operations on jobs whose machines cost money: terminate at once, report the cost, extend the time limit."""

import contextlib
from dataclasses import dataclass

from cluster.backends.rentals import RentalLimit
from cluster.connectors import tmux
from cluster.errors import ClusterError
from cluster.state import result, timeline
from cluster.state.states import JobState
from infra.costs import JobCost

from .job import Job
from .store import intact_jobs
from .supervision import job_lock, terminate_machines

DOWN_REASON = "ended by the user (imgnet-cluster down)"
# For another process to finish its change of the job. A supervisor that ends the job may wait for a minute until
# machines of its last request are visible.
JOB_LOCK_TIMEOUT_SECONDS = 120.0


def rented_jobs() -> list[Job]:
    """Return the jobs of this runs folder that run, or ran, on rented machines. Damaged run folders are left out."""
    return [job for job in intact_jobs() if job.spec.cloud]


def unfinished_jobs() -> list[Job]:
    """Return the jobs of this runs folder that have not ended, waiting jobs first. Damaged run folders are left out."""
    unfinished = [job for job in intact_jobs() if not job.has_ended]
    return sorted(unfinished, key=lambda job: not job.is_waiting)


def terminate_job(job: Job) -> list[str]:
    """Terminate a job and all its rented machines at once, also what remains of a job that has ended.

    Returns the machines that did not answer, none of them rented. Raises `ClusterError` with what is left.
    """
    if job.is_waiting:
        job.stop()
        return []
    if not job.has_ended:
        with contextlib.suppress(OSError):  # a full disk must not prevent the termination of machines that cost money
            job.run_folder.request_stop(DOWN_REASON)
        # The supervisor would replace the machines that are terminated below.
        tmux.kill_session(job.run_folder.tmux_session, job.path)
    with job_lock(job.path, JOB_LOCK_TIMEOUT_SECONDS):
        silent_machines = terminate_machines(job.backend)
        try:
            if not job.has_ended:
                result.write_result(job.run, job.backend, silent_machines, DOWN_REASON, JobState.STOPPED)
        except OSError as error:
            raise ClusterError(f"{job.name}: its machines are gone; its result cannot be written: {error}") from error
    return silent_machines


@dataclass(frozen=True, kw_only=True)
class CostReport:
    """What a job has cost in all, and for its results. Dollars are None where there is no such result."""

    job: str
    backend: str  # where its machines are, such as "this computer"
    is_billed: bool  # False: its machines are not rented, and nothing of it costs money
    cost: JobCost
    per_epoch: float | None
    to_target: float | None  # spent until validation first reached the target
    wasted: float | None  # spent on steps that had to be repeated, and in the pauses after losses
    wasted_seconds: float
    rented_now: str = ""  # what is still billed, and how to end it
    warning: str = ""  # why the job may cost more than this computer knows: another one has adopted it

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        numbers = {name: getattr(self, name) for name in ("per_epoch", "to_target", "wasted", "wasted_seconds")}
        return {"job": self.job, "is_billed": self.is_billed, **self.cost.to_json(), **numbers, "warning": self.warning}


def cost_report(job: Job, target_top5: float | None = None) -> CostReport:
    """Return what a job has cost: nothing if its machines are not rented. The target is an accuracy in percent.

    Of a job that another computer has adopted, the cost until then: what it has rented since is known there only.

    Raises `ClusterError` when a file of the run folder is damaged.
    """

    def dollars_until(moment: float) -> float:
        return job.backend.job_cost(moment).dollars

    with job.report_damaged_files():
        epochs = job.run_folder.epochs()
        first_step = next(job.run_folder.steps(), None)
        target_time = None
        if target_top5 is not None:
            target_time = next((row.time for row in epochs if (row.top5 or 0.0) >= target_top5), None)
        begin, end = (first_step.time, epochs[-1].time) if first_step and epochs else (0.0, 0.0)
        training_dollars = dollars_until(end) - dollars_until(begin) if epochs else 0.0
        history = timeline.read_timeline(job.run_folder, job.spec.own_command is not None)
        lost_dollars = sum(dollars_until(end) - dollars_until(start) for start, end in history.lost)
        adoption = job.supervision.adoption
        rented = job.backend.rented_now()
        return CostReport(
            job=job.name,
            backend=job.backend.description,
            is_billed=job.backend.is_billed,
            cost=job.backend.job_cost(adoption.adopted_since if adoption else None),
            per_epoch=training_dollars / len(epochs) if epochs else None,
            to_target=None if target_time is None else dollars_until(target_time),
            wasted=lost_dollars if first_step else None,
            wasted_seconds=history.lost_seconds,
            rented_now=rented.describe(job.run.handle) if rented else "",
            warning=f"{adoption.error}; its cost since then: imgnet-cluster cost, on that computer" if adoption else "",
        )


def rental_limit(job: Job, hours: float | None = None, dollars: float | None = None) -> RentalLimit | None:
    """Return the limit of a job's rented machines, None without any. `hours` and `dollars` replace its own limits."""
    if job.has_ended or job.is_waiting or not job.backend.is_billed:
        return None
    return job.backend.rental_limit(hours, dollars)


def extend(job: Job, hours: float | None = None, dollars: float | None = None) -> float | None:
    """Set the time limit of a job's machines, in hours since the first of them started, its price limit, or both.

    Returns the hours after which the machines end, None for a job that has ended: its price limit can be raised before
    it is resumed. Raises `ClusterError` when the job has no rented machines at work, `BadInput` for a limit that is
    over already, `ClusterError` with the machines that did not get the change.
    """
    if not job.backend.is_billed:
        raise ClusterError(
            f"{job.name} has no rented machines: it runs on {job.backend.description}; to change its time limit: "
            f"imgnet-cluster stop {job.run.handle}, then imgnet-cluster resume {job.run.handle} --max-hours HOURS"
        )
    if job.has_ended and (hours is not None or job.state == JobState.DONE):
        hint = f"see: imgnet-cluster status {job.run.handle}"
        raise ClusterError(f"{job.name} is {job.state}: no machines are running; {hint}")
    if job.is_waiting:
        raise ClusterError(f"{job.name} waits in its queue; it has no machines yet")
    return job.backend.extend_limits(hours, dollars)
