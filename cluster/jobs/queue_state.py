"""Queued jobs: what each one waits for, which hosts and GPUs are free, and whether the queue's process is alive.

A job is waiting while its job.json names a queue, and there is neither a result nor a marker that it was started.
"""

import contextlib
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.local import module_command, visible_gpus
from cluster.errors import BadInput, ClusterError
from cluster.state.run_folder import Run, run_folders
from cluster.state.spec import JobSpec
from train.tools.files import locked
from train.tools.records import DamagedRecord

QUEUE_START_SECONDS = 20.0  # for the process of a queue to take its lock
MAX_JOBS_LISTED = 3


def queue_lock_path(runs_folder: Path, queue_id: str) -> Path:
    """Return the lock file that a queue's process holds while it lives."""
    return runs_folder / f".queue-{queue_id}.lock"


def queue_start_marker(runs_folder: Path, queue_id: str) -> Path:
    """Return the file whose modification time is the last start of the queue's process."""
    return runs_folder / f".queue-{queue_id}.asked"


def queued_runs(runs_folder: Path, queue_id: str | None = None) -> list[Run]:
    """Return the runs of a queue (None: of all jobs), ordered by job number. Damaged ones are left out."""
    runs = []
    for run_folder in run_folders(runs_folder):
        with contextlib.suppress(OSError, DamagedRecord):
            run = Run.read(run_folder.path)
            runs += [run] if queue_id in (None, run.spec.queue) else []
    return runs


def describe_wait(run: Run) -> str:
    """Return what a waiting job waits for: the unfinished jobs before it in its queue."""
    names = [
        other.folder.path.name
        for other in queued_runs(run.folder.path.parent, run.spec.queue)
        if other.folder.number < run.folder.number and not other.folder.result_path.exists()
    ]
    if len(names) > MAX_JOBS_LISTED:
        names = [*names[: MAX_JOBS_LISTED - 1], f"{len(names) - MAX_JOBS_LISTED + 1} more"]
    return f"waiting for {', '.join(names)}" if names else "waiting for its turn"


def ensure_queue_process(runs_folder: Path, queue_id: str) -> None:
    """Start a queue's process when none runs, holding its lock, so that only one caller does. Raises `ClusterError`."""
    start_marker = queue_start_marker(runs_folder, queue_id)
    with contextlib.suppress(BlockingIOError), locked(queue_lock_path(runs_folder, queue_id), 0):
        # A process that was started a moment ago may not have taken its lock yet.
        if not (start_marker.exists() and 0 <= time.time() - start_marker.stat().st_mtime < QUEUE_START_SECONDS):
            argv = module_command("cluster.jobs.queue", str(runs_folder), queue_id)
            tmux.start_session(f"queue-{queue_id}", runs_folder, "queue", argv)
            start_marker.touch()


def running_specs(runs_folder: Path, queue_id: str | None = None) -> list[JobSpec]:
    """Return the specs of all jobs, or of those of a queue, that have started and not ended."""
    return [
        run.spec
        for run in queued_runs(runs_folder, queue_id)
        if run.folder.launch_path.exists() and not run.folder.result_path.exists()
    ]


def with_free_machines(run: Run) -> JobSpec:
    """Return the spec with the free machines of its hosts file that it needs. Raises `ClusterError` for too few."""
    spec = run.spec
    needed_count = len(spec.machine_names)
    machines = spec.host_list
    if not spec.hosts or len(machines) <= needed_count:
        return spec
    other_specs: list[JobSpec] = []
    if spec.queue:
        running = running_specs(run.folder.path.parent, spec.queue)
        other_specs = [other_spec for other_spec in running if other_spec.name != spec.name]
    used_addresses = {host.endpoint for other_spec in other_specs for host in other_spec.host_list}
    free_machines = tuple(host for host in machines if host.endpoint not in used_addresses)
    if len(free_machines) < needed_count:
        names = ", ".join(other_spec.name for other_spec in other_specs)
        verb = "is" if len(free_machines) == 1 else "are"
        raise ClusterError(
            f"{spec.name} needs {needed_count} machines, {len(free_machines)} {verb} free; "
            f"wait for {names}, or stop one"
        )
    return replace(spec, hosts=replace(spec.hosts, machines=free_machines[:needed_count]))


def with_gpus(run: Run) -> JobSpec:
    """Return the spec with a GPU for each local trainer, the least used first; with none if there are too few."""
    spec = run.spec
    visible = visible_gpus() if spec.is_one_computer else ()
    if not visible:  # other machines have their own, and what drivers do not list in /proc is torch's to find
        return replace(spec, gpus_of_computer=None)
    if len(visible) < spec.trainer_count:
        return replace(spec, gpus_of_computer=())
    others = [other for other in running_specs(run.folder.path.parent) if other.uid != spec.uid]
    uses = Counter(gpu for other in others for gpu in other.gpus_of_computer or ())
    chosen = sorted(visible, key=lambda gpu: uses[gpu])[: spec.trainer_count]
    return replace(spec, gpus_of_computer=tuple(gpu for gpu in visible if gpu in chosen))


def check_enough_gpus(spec: JobSpec, parallel: int) -> None:
    """Raise `BadInput` when one local job would have GPUs for all its trainers, and `parallel` jobs would not."""
    gpu_count = len(visible_gpus())
    if spec.is_one_computer and parallel > 1 and spec.trainer_count <= gpu_count < parallel * spec.trainer_count:
        procs = gpu_count // (parallel * len(spec.machine_names))
        advice = f"pass --procs {procs}, or leave --parallel out" if procs else "leave it out"
        raise BadInput(
            f"--parallel {parallel}: {parallel} jobs of {spec.trainer_count} trainer processes need a GPU for each "
            f"process, and this computer has {gpu_count}; {advice}"
        )


def check_enough_machines(spec: JobSpec, parallel: int) -> None:
    """Raise `BadInput` when `parallel` jobs need more machines than the hosts file lists."""
    needed_count = parallel * len(spec.machine_names)
    listed_count = len(spec.host_list)
    if spec.hosts and not spec.cloud and needed_count > listed_count:
        raise BadInput(
            f"--parallel {parallel} with {len(spec.machine_names)} machines per job needs {needed_count} machines; "
            f"the hosts file lists {listed_count}; lower --parallel or --machines"
        )
