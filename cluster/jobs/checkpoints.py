"""A job's newest whole checkpoint, on this computer: brought home first where it lies on machines elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import Progress, bring, newest_in

from .job import Job

if TYPE_CHECKING:
    from cluster.machines.fleet import Fleet


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
