"""The last thing that machines of a job that is done are paid for: its trained network comes home."""

import time
from collections.abc import Callable, Mapping

from cluster.errors import ClusterError
from cluster.machines.fleet import Fleet
from infra.aws.errors import CloudError
from infra.aws.instances.instances import Instance

from .instances import JobInstances

DOWNLOAD_TIMEOUT_SECONDS = 480.0  # at most; the machine ends by itself ten minutes after the job


def download_final_checkpoint(
    fleet: Fleet, job_instances: JobInstances, instances: Mapping[str, Instance], set_activity: Callable[[str], None]
) -> None:
    """Bring the newest checkpoint home through one machine, the one that can be reached best; the others end first.

    What goes wrong is said, and passed over: the checkpoint is on the shared file system too, and a machine bills.
    """
    from cluster.machines import checkpoint_files  # it knows all places that jobs run in

    begun = time.monotonic()

    def going_on(done: int, total: int) -> None:
        set_activity(f"bringing the network home: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        if time.monotonic() - begun > DOWNLOAD_TIMEOUT_SECONDS:
            raise ClusterError(f"not here after {DOWNLOAD_TIMEOUT_SECONDS:.0f} s")

    try:
        for name in sorted(instances, key=lambda one: (not instances[one].public_ip, int(one)))[:1]:
            if others := [one.id for one in instances.values() if one.name != name]:
                job_instances.terminate(others, "the job is done")
            checkpoint_files.download_checkpoint(
                fleet.connectors[name], fleet.provisioner.job_folder(name), job_instances.run_folder.shared, going_on
            )
    except (ClusterError, CloudError, OSError, KeyError) as error:
        job_instances.log(f"the network stays on the stack's shared file system: {error}")
