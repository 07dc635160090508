"""Downloads what a finished job has trained before its machines are terminated."""

import logging
from collections.abc import Callable, Mapping

from cluster.errors import ClusterError
from cluster.machines import trained_files
from cluster.machines.fleet import Fleet
from cluster.state.spec import JobSpec
from infra.aws.instances.instances import Instance

from .instances import JobInstances

logger = logging.getLogger(__name__)

# The limit keeps a slow download from being billed for long: the machine powers off 10 minutes after the job anyway.
DOWNLOAD_TIMEOUT_SECONDS = 480.0


def download(
    spec: JobSpec,
    fleet: Fleet,
    provider: JobInstances,
    machines: Mapping[str, Instance],
    set_activity: Callable[[str], None],
) -> None:
    """Download the network of a job that has trained to its end, or the checkpoints of a command that has ended.

    That goes through one machine, preferably one with a public address. All other machines are terminated first,
    since they would only be billed. Errors are logged and not raised: the files also stay in the machines' shared
    folder, and a retry would keep the machine billed.
    """
    if not machines or not trained_files.has_final_files(spec, provider.run_folder):
        return

    def report_progress(done_bytes: int, total_bytes: int) -> None:
        set_activity(f"downloading what was trained: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")

    def download_all() -> None:
        machine, job_folder = fleet.connectors[name], fleet.provisioner.job_folder(name)
        trained_files.download_final_files(spec, machine, job_folder, provider.run_folder, report_progress)

    try:
        name = min(machines, key=lambda name: (not machines[name].public_ip, int(name)))
        other_ids = [machine.id for machine in machines.values() if machine.name != name]
        if other_ids:
            provider.terminate(other_ids, "the job has ended")
        trained_files.run_in_time(download_all, DOWNLOAD_TIMEOUT_SECONDS)
    except (ClusterError, OSError, KeyError) as error:
        logger.info(f"what was trained stays in the machines' shared folder: {error}")
