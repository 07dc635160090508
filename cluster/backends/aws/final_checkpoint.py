"""Downloads the final checkpoint before the instances of a finished job are terminated."""

import time
from collections.abc import Callable, Mapping

from cluster.errors import ClusterError
from cluster.machines import checkpoint_files
from cluster.machines.fleet import Fleet
from infra.aws.errors import CloudError
from infra.aws.instances.instances import Instance

from .instances import JobInstances

# The limit keeps a slow download from being billed for long: the instance powers off 10 minutes after the job anyway.
DOWNLOAD_TIMEOUT_SECONDS = 480.0


def download_final_checkpoint(
    fleet: Fleet, job_instances: JobInstances, instances: Mapping[str, Instance], set_activity: Callable[[str], None]
) -> None:
    """Download the newest checkpoint through one instance, preferably one with a public address.

    All other instances are terminated first, since they would only be billed. Errors are logged and not raised: the
    checkpoint also stays on the stack's shared file system, and a retry would keep the instance billed.
    """
    if not instances:
        return
    start = time.monotonic()

    def report_progress(done_bytes: int, total_bytes: int) -> None:
        set_activity(f"downloading the network: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
        if time.monotonic() - start > DOWNLOAD_TIMEOUT_SECONDS:
            raise ClusterError(f"not complete after {DOWNLOAD_TIMEOUT_SECONDS:.0f} s")

    try:
        name = min(instances, key=lambda name: (not instances[name].public_ip, int(name)))
        other_ids = [instance.id for instance in instances.values() if instance.name != name]
        if other_ids:
            job_instances.terminate(other_ids, "the job is done")
        checkpoint_files.download_checkpoint(
            fleet.connectors[name], fleet.provisioner.job_folder(name), job_instances.run_folder.shared, report_progress
        )
    except (ClusterError, CloudError, OSError, KeyError) as error:
        job_instances.log(f"the network stays on the stack's shared file system: {error}")
