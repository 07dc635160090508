"""The queue of a sweep: starts its jobs one after the other, a given number of them at a time.

`python -m cluster.jobs.queue RUNS QUEUE_ID`. The run folders are the queue. It may be killed at any time: every
command that looks at a waiting job starts it again (`queue_state.ensure_queue_process`). A lock allows one process per
queue. The lock of each job and its started marker make sure that no job is started twice.
"""

import contextlib
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from cluster.backends.planner import Plan
from cluster.errors import BadInput, ClusterError
from cluster.notifications.notifier import Notifier
from cluster.state.spec import MAX_MACHINES
from train.tools import process_log
from train.tools.errors import one_line_error
from train.tools.files import locked
from train.tools.process import leave_terminal

from . import queue_state, store, submit
from .job import Job
from .supervision import JobBusy, job_lock

QUEUE_POLL_SECONDS = 0.5
QUEUE_RETRY_SECONDS = 5.0
LOCK_TIMEOUT_SECONDS = 2.0
START_POLL_SECONDS = 0.05


def resolve_parallel(plans: Sequence[Plan], parallel: int | None = None) -> int:
    """Return how many of these jobs run at a time.

    Without `parallel`, one on this computer, and as many as there are machines for in the hosts file. Raises `BadInput`
    when there are too few machines for `parallel` jobs, when they would share GPUs, and for several jobs of one name.
    """
    if len(plans) > 1 and (name := plans[0].spec.given_name):
        raise BadInput(f"--name {name}: names one job, and these are {len(plans)}; leave it out, or pass --only")
    largest_spec = max((plan.spec for plan in plans), key=lambda spec: (len(spec.machine_names), spec.procs))
    if parallel is None:
        listed_count = len(largest_spec.host_list)
        return max(1, min(len(plans), listed_count // len(largest_spec.machine_names)))
    if not 1 <= parallel <= MAX_MACHINES:
        raise BadInput(f"--parallel: must be from 1 to {MAX_MACHINES}, not {parallel}")
    queue_state.check_enough_machines(largest_spec, parallel)
    queue_state.check_enough_gpus(largest_spec, parallel)
    return parallel


def enqueue(plans: Sequence[Plan], parallel: int | None = None) -> list[Job]:
    """Create a job for each plan and run them in this order, `parallel` at a time (None: as `resolve_parallel` says).

    Returns when the first job has started. Raises `BadInput`, `ClusterError`; then no job is left behind.
    """
    if not plans:
        raise BadInput("there are no recipes to queue")
    parallel = resolve_parallel(plans, parallel)
    queue_id = uuid4().hex[:8]
    for plan in plans:
        submit.check(plan.spec)
    jobs: list[Job] = []
    try:
        for plan in plans:
            jobs.append(submit.create_job(replace(plan.spec, queue=queue_id, parallel=parallel)))
        queue_state.ensure_queue_process(store.runs_folder(), queue_id)
    except BaseException:
        for job in jobs:
            shutil.rmtree(job.path, ignore_errors=True)
        raise
    deadline = time.monotonic() + queue_state.QUEUE_START_SECONDS
    while jobs[0].is_waiting and time.monotonic() < deadline:
        time.sleep(START_POLL_SECONDS)
    return jobs


def start_queued_job(job: Job) -> None:
    """Start `job`, the next one of its queue, if it is still waiting. If it cannot start, record it as failed."""
    try:
        with job_lock(job.path):
            if not job.is_waiting:
                return
            job.claim_machines()
            job.backend.check(job.spec, job.path.parent)
            if job.is_alive:  # a queue process started it, and was killed before it could set the marker
                job.run_folder.started_marker.touch()
            else:
                job.start_locked()
    except JobBusy:
        return
    except (ClusterError, OSError) as error:
        job.fail(one_line_error(error))
        Notifier(job.run).finish()  # the job has no supervisor, which would tell users of the end


def advance_queue(runs_folder: Path, queue_id: str) -> bool:
    """Refresh the running jobs, and start as many waiting ones as may run. Returns whether a job is unfinished."""
    jobs = [Job(run.folder.path) for run in queue_state.queued_runs(runs_folder, queue_id)]
    unfinished_jobs = [job for job in jobs if not job.has_ended]
    running_jobs = [job for job in unfinished_jobs if not job.is_waiting]
    for job in running_jobs:
        with _log_errors(job):
            job.refresh()
    running_count = sum(not job.has_ended for job in running_jobs)
    # Looked up only now: a job may have been stopped while the running ones were refreshed.
    waiting_jobs = [job for job in unfinished_jobs if job.is_waiting]
    for job in waiting_jobs:
        if running_count < job.spec.parallel:
            with _log_errors(job):
                start_queued_job(job)
            if not (job.is_waiting or job.has_ended):
                running_count += 1
    return bool(unfinished_jobs)


@contextlib.contextmanager
def _log_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        process_log.append_message(job.run_folder.supervisor_log_path, __name__, str(error))
    except Exception:  # a bug, here or in a library
        process_log.append_message(job.run_folder.supervisor_log_path, __name__, traceback.format_exc())


def main() -> int:
    """Run a queue until all its jobs have ended. Returns 0, also when another process runs it already."""
    runs_folder = Path(sys.argv[1])
    queue_id = sys.argv[2]
    try:
        # With a timeout: a command may hold the lock for a moment, to see whether the process is alive.
        with locked(queue_state.queue_lock_path(runs_folder, queue_id), LOCK_TIMEOUT_SECONDS):
            is_unfinished = True
            while is_unfinished:
                try:
                    if is_unfinished := advance_queue(runs_folder, queue_id):
                        time.sleep(QUEUE_POLL_SECONDS)
                except Exception:  # such as a full disk: try again
                    print(traceback.format_exc(), flush=True)
                    time.sleep(QUEUE_RETRY_SECONDS)
            # No process will need the queue again.
            queue_state.queue_start_marker(runs_folder, queue_id).unlink(missing_ok=True)
            queue_state.queue_lock_path(runs_folder, queue_id).unlink(missing_ok=True)
    except BlockingIOError:
        print(f"queue {queue_id}: another process is running", file=sys.stderr)
    return 0


if __name__ == "__main__":
    leave_terminal()
    sys.exit(main())
