"""Jobs that wait for their turn: whom they wait for, whose machines are free, and whether somebody sees to the queue.

A job waits as long as its job.json names a queue and there is neither a result nor a note that it has begun.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.connectors import tmux
from cluster.connectors.local import module_command
from cluster.errors import BadInput, ClusterError
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.tools.filesystem import locked, read_json

QUEUE_START_SECONDS = 20.0  # for a queue's process to take its lock
MAX_JOBS_LISTED = 3


def queue_lock_path(runs_folder: Path, queue_id: str) -> Path:
    """Return the file that a queue's process holds as long as it lives."""
    return runs_folder / f".queue-{queue_id}.lock"


def queue_start_marker(runs_folder: Path, queue_id: str) -> Path:
    """Return the file whose time is that of the last start of the queue's process."""
    return runs_folder / f".queue-{queue_id}.asked"


def has_left_queue(run_folder: RunFolder, spec: JobSpec) -> bool:
    """Whether the job waits no longer: it was started, it has ended, or it never stood in a queue."""
    return not spec.queue or run_folder.started_marker.exists() or run_folder.result_path.exists()


def queue_run_folders(runs_folder: Path, queue_id: str) -> list[RunFolder]:
    """Return the run folders of a queue, in the order of their numbers; damaged ones are left out."""
    found = []
    for path in runs_folder.glob("job-*/job.json"):
        said = read_json(path) if path.parent.name[4:].isdecimal() else None
        if isinstance(said, dict) and said.get("queue") == queue_id:
            found.append(RunFolder(path.parent))
    return sorted(found, key=lambda one: int(one.path.name[4:]))


def describe_wait(run_folder: RunFolder, spec: JobSpec) -> str:
    """Return whom a waiting job waits for: those of its queue that come before it and have not ended."""
    mine = int(run_folder.path.name[4:])
    ahead = [
        one.path.name
        for one in queue_run_folders(run_folder.path.parent, spec.queue)
        if int(one.path.name[4:]) < mine and not one.result_path.exists()
    ]
    if len(ahead) > MAX_JOBS_LISTED:
        ahead = [*ahead[: MAX_JOBS_LISTED - 1], f"{len(ahead) - MAX_JOBS_LISTED + 1} more"]
    return f"waiting for {', '.join(ahead)}" if ahead else "waiting for its turn"


def ensure_queue_process(runs_folder: Path, queue_id: str) -> None:
    """Start a queue's process when none is at work: the computer was off, or somebody killed it.

    Whoever asks holds its lock meanwhile, so that of many who look at once one starts it. Raises `ClusterError`.
    """
    last = queue_start_marker(runs_folder, queue_id)
    with contextlib.suppress(BlockingIOError), locked(queue_lock_path(runs_folder, queue_id), 0):
        if not (last.exists() and 0 <= time.time() - last.stat().st_mtime < QUEUE_START_SECONDS):
            tmux.start_session(
                f"queue-{queue_id}",
                runs_folder,
                "queue",
                module_command("cluster.jobs.queue", str(runs_folder), queue_id),
            )
            last.touch()


def remove_queue_files(runs_folder: Path, queue_id: str) -> None:
    """Remove the files of a queue that is empty. Called by who holds the lock: nobody will ask for it again."""
    for path in (queue_start_marker(runs_folder, queue_id), queue_lock_path(runs_folder, queue_id)):
        path.unlink(missing_ok=True)


def running_specs(runs_folder: Path, queue_id: str) -> list[JobSpec]:
    """Return what was asked of those jobs of a queue that have begun and not ended."""
    found = []
    for one in queue_run_folders(runs_folder, queue_id):
        if one.launch_path.exists() and not one.result_path.exists():
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                found.append(JobSpec.from_json(read_json(one.spec_path) or {}))
    return found


def with_free_machines(run_folder: RunFolder, spec: JobSpec) -> JobSpec:
    """Return the spec with machines of its hosts file that no other job of its queue is at work on, but no more.

    One that has its machines keeps them. Raises `ClusterError` when too few are free.
    """
    wanted, machines = len(spec.machine_names), (spec.hosts or {}).get("machines", [])
    if len(machines) <= wanted:
        return spec
    others = (
        [one for one in running_specs(run_folder.path.parent, spec.queue) if one.name != spec.name]
        if spec.queue
        else []
    )
    taken = {_host_address(host) for one in others for host in (one.hosts or {}).get("machines", [])}
    free = [host for host in machines if _host_address(host) not in taken]
    if len(free) < wanted:
        names = ", ".join(one.name for one in others)
        raise ClusterError(f"{spec.name} wants {wanted} machines, {len(free)} are free; wait for {names}, or stop one")
    return replace(spec, hosts={**(spec.hosts or {}), "machines": free[:wanted]})


def _host_address(host: Mapping[str, Any]) -> tuple[str, int]:
    return str(host["host"]).lower(), host.get("port") or 22


def check_enough_machines(spec: JobSpec, parallel: int) -> None:
    """Raise `BadInput` when so many jobs at once want more machines than the hosts file names."""
    wanted, there = parallel * len(spec.machine_names), len((spec.hosts or {}).get("machines", []))
    if spec.hosts and not spec.cloud and wanted > there:
        raise BadInput(
            f"--parallel {parallel} with {len(spec.machine_names)} machines each wants {wanted}; the hosts file names {there}; "
            "lower --parallel or --machines"
        )
