"""Downloads the final checkpoint before the machines of a finished job are terminated."""

import logging
import time
from collections.abc import Callable, Mapping

from cluster.errors import ClusterError
from cluster.machines import checkpoint_files
from cluster.machines.fleet import Fleet
from infra.errors import CloudError

from .provider import CloudProvider, MachineT

logger = logging.getLogger(__name__)

# The limit keeps a slow download from being billed for long: the machine powers off 10 minutes after the job anyway.
DOWNLOAD_TIMEOUT_SECONDS = 480.0


def download_final_checkpoint(
    fleet: Fleet,
    provider: CloudProvider[MachineT],
    machines: Mapping[str, MachineT],
    set_activity: Callable[[str], None],
) -> None:
    """Download the newest checkpoint through one machine, preferably one with a public address.

    All other machines are terminated first, since they would only be billed. Errors are logged and not raised: the
    checkpoint also stays in the machines' shared folder, and a retry would keep the machine billed.
    """
    if not machines:
        return
    start = time.monotonic()

    def report_progress(done_bytes: int, total_bytes: int) -> None:
        set_activity(f"downloading the network: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
        if time.monotonic() - start > DOWNLOAD_TIMEOUT_SECONDS:
            raise ClusterError(f"not complete after {DOWNLOAD_TIMEOUT_SECONDS:.0f} s")

    try:
        name = min(machines, key=lambda name: (not machines[name].public_ip, int(name)))
        other_ids = [machine.id for machine in machines.values() if machine.name != name]
        if other_ids:
            provider.terminate(other_ids, "the job is done")
        checkpoint_files.download_checkpoint(
            fleet.connectors[name], fleet.provisioner.job_folder(name), provider.run_folder.shared, report_progress
        )
    except (ClusterError, CloudError, OSError, KeyError) as error:
        logger.info(f"the network stays in the machines' shared folder: {error}")
