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
from cluster.connectors.local import gpu_count
from cluster.errors import BadInput, ClusterError
from cluster.planning.plan import Plan
from train.tools.filesystem import locked, one_line

from . import queue_state, store, submit
from .job import Busy, Job
from .supervisor import log

BEAT, RETRY = 0.5, 5.0


def places(plans: Sequence[Plan], parallel: int | None = None) -> int:
    """Return how many of these jobs run at once: as asked, else 1 here, and what the hosts file has machines for.

    Raises `BadInput` when there is no room for so many.
    """
    widest = max((one.spec for one in plans), key=lambda spec: len(spec.names))
    if parallel is None:
        there = len((widest.hosts or {}).get("machines", []))
        return max(1, min(len(plans), there // len(widest.names)))
    if parallel < 1:
        raise BadInput(f"--parallel: must be at least 1, not {parallel}")
    queue_state.check_room(widest, parallel)
    gpus = gpu_count() if widest.backend == "local" and parallel > 1 else 0
    if gpus:  # the trainers of each job begin at the first GPU
        raise BadInput(f"--parallel {parallel}: the jobs would share this computer's GPUs ({gpus}); leave it out")
    return parallel


def enqueue(plans: Sequence[Plan], parallel: int | None = None) -> list[Job]:
    """Make a job of each plan and run `parallel` of them at a time (None: as `places` says), in this order.

    Returns when the first has begun. Raises `BadInput`, `ClusterError`; then there is none of them.
    """
    if not plans:
        raise BadInput("no recipes: there is nothing to queue")
    parallel, queue = places(plans, parallel), uuid4().hex[:8]
    for one in plans:
        registry.get(one.spec.backend).check(one.spec, store.runs())
    made: list[Job] = []
    try:
        for one in plans:
            made.append(submit._create(replace(one.spec, queue=queue, parallel=parallel)))
        queue_state.ensure(store.runs(), queue)
    except BaseException:
        for job in made:
            shutil.rmtree(job.run, ignore_errors=True)
        raise
    deadline = time.monotonic() + queue_state.BOOT_SECONDS
    while made[0].waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    return made


def begin(job: Job) -> None:
    """Start a job whose turn has come, unless it waits no longer. One that cannot start has failed, with the reason."""
    try:
        with job.locked():
            if not job.waiting:
                return
            job.take_machines()
            job.backend.check(job.spec, job.run.parent)
            if job.alive:  # started by one that was killed before it could note it
                job.folders.begun.touch()
            else:
                job.start_held()
    except Busy:
        return
    except (ClusterError, OSError) as error:
        job.fail(one_line(error))


def step(runs: Path, queue: str) -> bool:
    """Look after the jobs that run, and start as many as there is room for. Returns whether any has not ended."""
    left = [job for job in _jobs(runs, queue) if not job.ended]
    running = [job for job in left if not job.waiting]
    for job in running:
        with _noted(job):
            job.refresh()
    busy = sum(not job.ended for job in running)
    for job in [one for one in left if one.waiting]:
        if busy < job.spec.parallel:
            with _noted(job):
                begin(job)
            busy += not (job.waiting or job.ended)
    return bool(left)


def _jobs(runs: Path, queue: str) -> list[Job]:
    found = [Job(folders.run) for folders in queue_state.siblings(runs, queue)]
    whole = []
    for job in found:
        with contextlib.suppress(ClusterError):  # a damaged one is not ours to mend, and stops nobody
            whole += [job] if job.spec.queue == queue else []
    return whole


@contextlib.contextmanager
def _noted(job: Job) -> Iterator[None]:
    """Write down in the job's folder what goes wrong with it; the others go on."""
    try:
        yield
    except ClusterError as error:
        log(job, str(error))
    except Exception:  # of ours, or of a library
        log(job, traceback.format_exc())


def main() -> int:
    """Run a queue to its end. Returns 0, also when another process is at it."""
    runs, queue = Path(sys.argv[1]), sys.argv[2]
    try:
        with locked(queue_state.lock_file(runs, queue), 2.0):  # someone may just be asking whether we live
            while _step_or_wait(runs, queue):
                time.sleep(BEAT)
            queue_state.forget(runs, queue)
    except BlockingIOError:
        print(f"queue {queue}: another process is at work", file=sys.stderr)
    return 0


def _step_or_wait(runs: Path, queue: str) -> bool:
    try:
        return step(runs, queue)
    except Exception:  # a disk that is full, a folder that vanished under our eyes: tried again
        print(traceback.format_exc(), flush=True)
        time.sleep(RETRY)
        return True


if __name__ == "__main__":
    sys.exit(main())
