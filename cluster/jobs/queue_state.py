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
from cluster.connectors.local import python
from cluster.errors import BadInput, ClusterError
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.tools.filesystem import locked, read_json

BOOT_SECONDS = 20.0  # for a queue's process to take its lock
MOST_NAMES = 3


def lock_file(runs: Path, queue: str) -> Path:
    """Return the file that a queue's process holds as long as it lives."""
    return runs / f".queue-{queue}.lock"


def asked_file(runs: Path, queue: str) -> Path:
    """Return the file whose time is that of the last start of the queue's process."""
    return runs / f".queue-{queue}.asked"


def begun(folders: Folders, spec: Spec) -> bool:
    """Whether the job waits no longer: it was started, it has ended, or it never stood in a queue."""
    return not spec.queue or folders.begun.exists() or folders.result.exists()


def siblings(runs: Path, queue: str) -> list[Folders]:
    """Return the run folders of a queue, in the order of their numbers; damaged ones are left out."""
    found = []
    for path in runs.glob("job-*/job.json"):
        said = read_json(path) if path.parent.name[4:].isdecimal() else None
        if isinstance(said, dict) and said.get("queue") == queue:
            found.append(Folders(path.parent))
    return sorted(found, key=lambda one: int(one.run.name[4:]))


def doing(folders: Folders, spec: Spec) -> str:
    """Return whom a waiting job waits for: those of its queue that come before it and have not ended."""
    mine = int(folders.run.name[4:])
    ahead = [
        one.run.name
        for one in siblings(folders.run.parent, spec.queue)
        if int(one.run.name[4:]) < mine and not one.result.exists()
    ]
    if len(ahead) > MOST_NAMES:
        ahead = [*ahead[: MOST_NAMES - 1], f"{len(ahead) - MOST_NAMES + 1} more"]
    return f"waiting for {', '.join(ahead)}" if ahead else "waiting for its turn"


def ensure(runs: Path, queue: str) -> None:
    """Start a queue's process when none is at work: the computer was off, or somebody killed it.

    Whoever asks holds its lock meanwhile, so that of many who look at once one starts it. Raises `ClusterError`.
    """
    last = asked_file(runs, queue)
    with contextlib.suppress(BlockingIOError), locked(lock_file(runs, queue), 0):
        if not (last.exists() and 0 <= time.time() - last.stat().st_mtime < BOOT_SECONDS):
            tmux.start(f"queue-{queue}", runs, "queue", python("cluster.jobs.queue", str(runs), queue))
            last.touch()


def forget(runs: Path, queue: str) -> None:
    """Remove the files of a queue that is empty. Called by who holds the lock: nobody will ask for it again."""
    for path in (asked_file(runs, queue), lock_file(runs, queue)):
        path.unlink(missing_ok=True)


def at_work(runs: Path, queue: str) -> list[Spec]:
    """Return what was asked of those jobs of a queue that have begun and not ended."""
    found = []
    for one in siblings(runs, queue):
        if one.launch.exists() and not one.result.exists():
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                found.append(Spec.from_json(read_json(one.spec) or {}))
    return found


def with_machines(folders: Folders, spec: Spec) -> Spec:
    """Return the spec with machines of its hosts file that no other job of its queue is at work on, but no more.

    One that has its machines keeps them. Raises `ClusterError` when too few are free.
    """
    wanted, machines = len(spec.names), (spec.hosts or {}).get("machines", [])
    if len(machines) <= wanted:
        return spec
    others = [one for one in at_work(folders.run.parent, spec.queue) if one.name != spec.name] if spec.queue else []
    taken = {_place(host) for one in others for host in (one.hosts or {}).get("machines", [])}
    free = [host for host in machines if _place(host) not in taken]
    if len(free) < wanted:
        names = ", ".join(one.name for one in others)
        raise ClusterError(f"{spec.name} wants {wanted} machines, {len(free)} are free; wait for {names}, or stop one")
    return replace(spec, hosts={**(spec.hosts or {}), "machines": free[:wanted]})


def _place(host: Mapping[str, Any]) -> tuple[str, int]:
    return str(host["host"]).lower(), host.get("port") or 22


def check_room(spec: Spec, parallel: int) -> None:
    """Raise `BadInput` when so many jobs at once want more machines than the hosts file names."""
    wanted, there = parallel * len(spec.names), len((spec.hosts or {}).get("machines", []))
    if spec.hosts and not spec.cloud and wanted > there:
        raise BadInput(
            f"--parallel {parallel} with {len(spec.names)} machines each wants {wanted}; the hosts file names {there}; "
            "lower --parallel or --machines"
        )
