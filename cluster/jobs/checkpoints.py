"""A job's newest whole checkpoint, on this computer: brought home first where it lies on machines elsewhere."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.connectors.local import Machine
from cluster.errors import ClusterError
from train.tools.filesystem import newest_sealed, replace, unseal

from .job import Job

if TYPE_CHECKING:
    from cluster.machines.fleet import Fleet

PATTERNS = ("step-*.pt", "resume-*.pt")  # what an attempt saved, and what it began with
NAME = re.compile(r"(\d+)/(step|resume)-(\d+)[\w-]*\.pt")
Progress = Callable[[int, int], None]


def newest(job: Job, progress: Progress = lambda done, total: None) -> Path:
    """Return the newest whole checkpoint of a job. Raises `ClusterError`: there is none, or its machines are away.

    `progress` is told the bytes that have come from another machine, and of how many.
    """
    found, why = newest_in(job.folders.shared), ""
    if job.backend.REMOTE and not (found and job.ended):
        try:
            found = _from_machines(job, progress) or found
        except ClusterError as error:
            why = str(error)
    if found:
        return found
    if why:
        raise ClusterError(f"{job.name}: its checkpoints stay on its machines, and these do not give one: {why}")
    raise ClusterError(f"{job.name} is {job.state} and has saved nothing yet; imgnet-cluster status {job.name}")


def newest_in(shared: Path) -> Path | None:
    """Return the newest whole checkpoint in a shared folder: the last attempt's that has any."""
    for attempt in sorted((shared / "checkpoints").glob("[0-9]*"), reverse=True):
        for pattern in PATTERNS:
            if found := newest_sealed(attempt, pattern):
                return found
    return None


def _from_machines(job: Job, progress: Progress) -> Path | None:
    """Bring it from the first machine that answers. Raises `ClusterError` when none does."""
    here, last = _fleet(job), ClusterError("none is known yet")
    for name, remote in here.remotes.items():
        try:
            return bring(remote, here.machines.job_folder(name), job.folders.shared, progress)
        except KeyError:  # which was never set up
            continue
        except ClusterError as error:
            last = error
    raise last


def _fleet(job: Job) -> "Fleet":
    from cluster.backends import ssh
    from cluster.backends.aws import backend

    return backend.fleet(job.spec, job.folders) if job.spec.cloud else ssh.fleet(job.folders)


def bring(machine: Machine | Any, shared: str, home: Path, progress: Progress) -> Path | None:
    """Bring the newest whole checkpoint of a machine's `shared` folder to that at `home`; None: there is none.

    Raises `ClusterError` when the machine does not answer, `OSError` when the disk here is full.
    """
    there = {name: size for name, size in machine.files(f"{shared}/checkpoints").items() if NAME.fullmatch(name)}
    for name in sorted(there, key=_age, reverse=True):
        target, data = home / "checkpoints" / name, bytearray()
        if not target.exists():
            while len(data) < there[name] and (part := machine.read_from(f"{shared}/checkpoints/{name}", len(data))):
                data += part
                progress(len(data), there[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            replace(target, bytes(data))
        try:
            unseal(target)
            return target
        except ValueError:  # damaged, or replaced by a newer one meanwhile
            target.unlink()
    return None


def _age(name: str) -> tuple[int, bool, int]:
    """The later, the larger: what an attempt saved is newer than what it began with."""
    found = NAME.fullmatch(name)
    assert found
    return int(found[1]), found[2] == "step", int(found[3])
