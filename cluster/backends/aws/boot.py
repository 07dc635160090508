"""Waits until a new instance has booted, accepts ssh connections and shows a host key of its own."""

import time
from collections.abc import Callable, Mapping

from cluster.connectors.ssh import SSHRefused
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from cluster.state.states import SetupStep
from infra.aws.instances.instances import Instance

from .instances import JobInstances
from .ssh_access import REMOTE_FOLDER, find_jump_host, own_host_keys, record_host_key

BOOT_TIMEOUT_SECONDS = 900.0
BOOT_POLL_SECONDS = 1.0
# The instance's user data creates `ready` at its end, or `failed` with the reason.
BOOT_STATE_SCRIPT = f"cd {REMOTE_FOLDER} && if [ -e failed ]; then cat failed; elif [ -e ready ]; then echo ready; fi"
ListInstances = Callable[[], Mapping[str, Instance]]


class BootWaiter:
    """Waits for the instances of one job. Called for several instances at once, each in a thread of the fleet's pool.

    `get_stop_reason` returns why the job is to stop, "" while it goes on.
    """

    def __init__(self, job_instances: JobInstances, get_stop_reason: Callable[[], str]) -> None:
        self.job_instances = job_instances
        self.get_stop_reason = get_stop_reason

    def wait_until_ready(self, fleet: Fleet, name: str, list_instances: ListInstances) -> None:
        """Wait until a machine has booted, then let it replace its host key.

        User data contains the key that the instance boots with, and is no secret. `list_instances` returns the
        job's live instances by machine name. Raises `SetupFailed` when the instance is gone, its boot failed or took
        too long, or the job is to stop; `ClusterError` when the new host key cannot be read.
        """
        start = time.monotonic()
        instance = list_instances().get(name)
        if instance is None:
            raise SetupFailed("EC2 terminated the instance before it booted")
        fleet.setup_progress.set_step(name, SetupStep.BOOTING)
        while pending_reason := self._pending_reason(fleet, instance, list_instances()):
            current = list_instances().get(name)
            if current is None or current.id != instance.id:
                raise SetupFailed(f"EC2 terminated instance {instance.id} during boot")
            if time.monotonic() - start > BOOT_TIMEOUT_SECONDS:
                raise SetupFailed(f"{pending_reason}, after {BOOT_TIMEOUT_SECONDS:.0f} s")
            if stop_reason := self.get_stop_reason():
                raise SetupFailed(stop_reason)
            time.sleep(BOOT_POLL_SECONDS)
        fleet.setup_progress.set_step(name, SetupStep.BOOTING, time.monotonic() - start)
        if instance.id not in own_host_keys(self.job_instances.journal):
            response = fleet.connectors[name].run(["sudo", "-n", "imgnet-hostkey"], timeout=60)
            record_host_key(self.job_instances.journal, instance, response.out.decode().strip())

    def _pending_reason(self, fleet: Fleet, instance: Instance, instances: Mapping[str, Instance]) -> str:
        """Return what a booting instance still waits for, "" when it is ready.

        Raises `SetupFailed` when its boot failed, `SSHRefused` when it shows another host key than expected.
        """
        jump_host = find_jump_host(instances)
        if jump_host and not instance.public_ip and jump_host.id not in own_host_keys(self.job_instances.journal):
            # The jump host is about to replace its host key; a connection through it would break.
            return f"machine {jump_host.name}, the jump host, has not booted"
        connector = fleet.connectors[instance.name]
        try:
            state = connector.run(["sh", "-c", BOOT_STATE_SCRIPT], check=False, timeout=20).out.decode().strip()
        except SSHRefused:
            raise
        except ClusterError as error:
            return str(error)
        if state not in ("", "ready"):
            raise SetupFailed(f"boot failed: {state}")
        return "" if state else "it has not finished booting"
