"""The newest complete checkpoint of a job on this computer, downloaded from the machines of the job where necessary."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import DownloadProgress, download_checkpoint, newest_local_checkpoint

from .job import Job

if TYPE_CHECKING:
    from cluster.machines.fleet import Fleet


def newest_checkpoint(job: Job, progress: DownloadProgress = lambda done, total: None) -> Path:
    """Return the path of the newest complete checkpoint of a job.

    `progress` is called with the bytes that have been downloaded from another machine, and with their total.

    Raises `ClusterError` when the job has not saved one yet, or when its machines cannot be reached and none is here.
    """
    path = newest_local_checkpoint(job.run_folder.shared)
    failure = ""
    if job.backend.IS_REMOTE and not (path and job.has_ended):
        try:
            path = _download_from_machines(job, progress) or path
        except ClusterError as error:
            failure = str(error)
    if path:
        return path
    if failure:
        raise ClusterError(f"{job.name}: its checkpoints are on its machines, and no machine sent one: {failure}")
    raise ClusterError(f"{job.name} is {job.state} and has saved nothing yet; see: imgnet-cluster status {job.name}")


def _download_from_machines(job: Job, progress: DownloadProgress) -> Path | None:
    """Download the newest checkpoint from the first machine that answers. Raises `ClusterError` when none does."""
    fleet = _job_fleet(job)
    last_error = ClusterError("no machine is known yet")
    for name, connector in fleet.connectors.items():
        try:
            remote_folder = fleet.provisioner.job_folder(name)
            return download_checkpoint(connector, remote_folder, job.run_folder.shared, progress)
        except KeyError:  # the machine was never set up
            continue
        except ClusterError as error:
            last_error = error
    raise last_error


def _job_fleet(job: Job) -> "Fleet":
    from cluster.backends import ssh
    from cluster.backends.aws import backend

    return backend.open_fleet(job.spec, job.run_folder) if job.spec.cloud else ssh.get_fleet(job.run_folder)
