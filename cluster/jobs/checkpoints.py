"""A job's newest whole checkpoint, on this computer: brought home first where it lies on machines elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import DownloadProgress, download_checkpoint, newest_local_checkpoint

from .job import Job

if TYPE_CHECKING:
    from cluster.machines.fleet import Fleet


def newest_checkpoint(job: Job, progress: DownloadProgress = lambda done, total: None) -> Path:
    """Return the newest whole checkpoint of a job. Raises `ClusterError`: there is none, or its machines are away.

    `progress` is told the bytes that have come from another machine, and of how many.
    """
    found, why = newest_local_checkpoint(job.run_folder.shared), ""
    if job.backend.IS_REMOTE and not (found and job.has_ended):
        try:
            found = _download_from_machines(job, progress) or found
        except ClusterError as error:
            why = str(error)
    if found:
        return found
    if why:
        raise ClusterError(f"{job.name}: its checkpoints stay on its machines, and these do not give one: {why}")
    raise ClusterError(f"{job.name} is {job.state} and has saved nothing yet; imgnet-cluster status {job.name}")


def _download_from_machines(job: Job, progress: DownloadProgress) -> Path | None:
    """Bring it from the first machine that answers. Raises `ClusterError` when none does."""
    here, last = _job_fleet(job), ClusterError("none is known yet")
    for name, remote in here.connectors.items():
        try:
            return download_checkpoint(remote, here.provisioner.job_folder(name), job.run_folder.shared, progress)
        except KeyError:  # which was never set up
            continue
        except ClusterError as error:
            last = error
    raise last


def _job_fleet(job: Job) -> "Fleet":
    from cluster.backends import ssh
    from cluster.backends.aws import backend

    return backend.open_fleet(job.spec, job.run_folder) if job.spec.cloud else ssh.get_fleet(job.run_folder)
