"""The newest complete checkpoint of a job on this computer, downloaded from the machines of the job where necessary."""

from pathlib import Path

from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import newest_local_checkpoint
from train.tools.process_log import Progress, no_progress

from .job import Job


def newest_checkpoint(job: Job, progress: Progress = no_progress) -> Path:
    """Return the path of the newest complete checkpoint of a job.

    `progress` is called with the bytes that have been downloaded from another machine, and with their total.

    Raises `ClusterError` when the job has not saved one yet, or when its machines cannot be reached and none is here.
    """
    path = newest_local_checkpoint(job.run_folder.shared)
    failure = ""
    if job.backend.is_remote and not (path and job.has_ended):
        try:
            path = job.backend.download_checkpoint(progress) or path
        except ClusterError as error:
            failure = str(error)
    if path:
        return path
    if failure:
        raise ClusterError(f"{job.name}: its checkpoints are on its machines, and no machine sent one: {failure}")
    raise ClusterError(f"{job.name} is {job.state} and has saved nothing yet; see: imgnet-cluster status {job.name}")
