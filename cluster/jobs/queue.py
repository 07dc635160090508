"""The queue of a sweep: its jobs start one after the other, so many at once. `python -m cluster.jobs.queue RUNS QUEUE`.

The run folders are the queue; nothing else is remembered. The process may be killed at any time: whoever looks at a
waiting job starts it again (`waiting.ensure`). A lock lets no second one in, and each job's own lock and its note that
it has begun see to it that no job is started twice.
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

from cluster.backends import registry
from cluster.connectors.local import visible_gpu_count
from cluster.errors import BadInput, ClusterError
from cluster.planning.plan import Plan
from train.tools.filesystem import locked, one_line_error

from . import queue_state, store, submit
from .job import Job, JobBusy
from .supervisor import log_message

QUEUE_POLL_SECONDS, QUEUE_RETRY_SECONDS = 0.5, 5.0


def resolve_parallel(plans: Sequence[Plan], parallel: int | None = None) -> int:
    """Return how many of these jobs run at once: as asked, else 1 here, and what the hosts file has machines for.

    Raises `BadInput` when there is no room for so many.
    """
    widest = max((one.spec for one in plans), key=lambda spec: len(spec.machine_names))
    if parallel is None:
        there = len((widest.hosts or {}).get("machines", []))
        return max(1, min(len(plans), there // len(widest.machine_names)))
    if parallel < 1:
        raise BadInput(f"--parallel: must be at least 1, not {parallel}")
    queue_state.check_enough_machines(widest, parallel)
    gpus = visible_gpu_count() if widest.backend == "local" and parallel > 1 else 0
    if gpus:  # the trainers of each job begin at the first GPU
        raise BadInput(f"--parallel {parallel}: the jobs would share this computer's GPUs ({gpus}); leave it out")
    return parallel


def enqueue(plans: Sequence[Plan], parallel: int | None = None) -> list[Job]:
    """Make a job of each plan and run `parallel` of them at a time (None: as `places` says), in this order.

    Returns when the first has begun. Raises `BadInput`, `ClusterError`; then there is none of them.
    """
    if not plans:
        raise BadInput("no recipes: there is nothing to queue")
    parallel, queue = resolve_parallel(plans, parallel), uuid4().hex[:8]
    for one in plans:
        registry.get_backend(one.spec.backend).check(one.spec, store.runs_folder())
    made: list[Job] = []
    try:
        for one in plans:
            made.append(submit.create_job(replace(one.spec, queue=queue, parallel=parallel)))
        queue_state.ensure_queue_process(store.runs_folder(), queue)
    except BaseException:
        for job in made:
            shutil.rmtree(job.path, ignore_errors=True)
        raise
    deadline = time.monotonic() + queue_state.QUEUE_START_SECONDS
    while made[0].is_waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    return made


def start_queued_job(job: Job) -> None:
    """Start a job whose turn has come, unless it waits no longer. One that cannot start has failed, with the reason."""
    try:
        with job.locked():
            if not job.is_waiting:
                return
            job.claim_machines()
            job.backend.check(job.spec, job.path.parent)
            if job.is_alive:  # started by one that was killed before it could note it
                job.run_folder.started_marker.touch()
            else:
                job.start_locked()
    except JobBusy:
        return
    except (ClusterError, OSError) as error:
        job.fail(one_line_error(error))


def advance_queue(runs_folder: Path, queue_id: str) -> bool:
    """Look after the jobs that run, and start as many as there is room for. Returns whether any has not ended."""
    left = [job for job in _queue_jobs(runs_folder, queue_id) if not job.has_ended]
    running = [job for job in left if not job.is_waiting]
    for job in running:
        with _log_errors(job):
            job.refresh()
    busy = sum(not job.has_ended for job in running)
    for job in [one for one in left if one.is_waiting]:
        if busy < job.spec.parallel:
            with _log_errors(job):
                start_queued_job(job)
            busy += not (job.is_waiting or job.has_ended)
    return bool(left)


def _queue_jobs(runs_folder: Path, queue_id: str) -> list[Job]:
    found = [Job(folders.path) for folders in queue_state.queue_run_folders(runs_folder, queue_id)]
    whole = []
    for job in found:
        with contextlib.suppress(ClusterError):  # a damaged one is not ours to mend, and stops nobody
            whole += [job] if job.spec.queue == queue_id else []
    return whole


@contextlib.contextmanager
def _log_errors(job: Job) -> Iterator[None]:
    """Write down in the job's folder what goes wrong with it; the others go on."""
    try:
        yield
    except ClusterError as error:
        log_message(job, str(error))
    except Exception:  # of ours, or of a library
        log_message(job, traceback.format_exc())


def main() -> int:
    """Run a queue to its end. Returns 0, also when another process is at it."""
    runs, queue = Path(sys.argv[1]), sys.argv[2]
    try:
        with locked(queue_state.queue_lock_path(runs, queue), 2.0):  # someone may just be asking whether we live
            while _advance_or_retry(runs, queue):
                time.sleep(QUEUE_POLL_SECONDS)
            queue_state.remove_queue_files(runs, queue)
    except BlockingIOError:
        print(f"queue {queue}: another process is at work", file=sys.stderr)
    return 0


def _advance_or_retry(runs_folder: Path, queue_id: str) -> bool:
    try:
        return advance_queue(runs_folder, queue_id)
    except Exception:  # a disk that is full, a folder that vanished under our eyes: tried again
        print(traceback.format_exc(), flush=True)
        time.sleep(QUEUE_RETRY_SECONDS)
        return True


if __name__ == "__main__":
    sys.exit(main())
