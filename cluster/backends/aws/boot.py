"""A rented machine's way from its address to being one of ours: it boots, lets us in, gets a host key of its own."""

import time
from collections.abc import Callable, Mapping

from cluster.connectors.ssh import SSHRefused as WrongKey
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from infra.aws.instances.instances import Instance

from .instances import JobInstances
from .ssh_access import REMOTE_FOLDER, find_jump_host, own_host_keys, record_host_key

BOOT_TIMEOUT_SECONDS = 900.0
BOOT_POLL_SECONDS = 1.0
BOOT_STATE_SCRIPT = f"cd {REMOTE_FOLDER} && if [ -e failed ]; then cat failed; elif [ -e ready ]; then echo ready; fi"
ListInstances = Callable[[], Mapping[str, Instance]]


class BootWaiter:
    """Waits for the machines of one job; several at once, each in a thread of the fleet's."""

    def __init__(self, job_instances: JobInstances, get_stop_reason: Callable[[], str]) -> None:
        self.job_instances, self.get_stop_reason = job_instances, get_stop_reason

    def wait_until_ready(self, fleet: Fleet, name: str, list_instances: ListInstances) -> None:
        """Wait until a machine has booted, and make the bootstrap host key worthless.

        `look` says which machines are there. Raises `SetupFailed`, `ClusterError`.
        """
        begun, one = time.monotonic(), list_instances().get(name)
        if one is None:
            raise SetupFailed("EC2 took it away")
        fleet.setup_progress.set_step(name, "booting")
        while said := self._pending_reason(fleet, one, list_instances()):
            current = list_instances().get(name)
            if current is None or current.id != one.id:
                raise SetupFailed(f"EC2 took it away: {one.id}")
            if time.monotonic() - begun > BOOT_TIMEOUT_SECONDS:
                raise SetupFailed(f"{said}, after {BOOT_TIMEOUT_SECONDS:.0f} s")
            if why := self.get_stop_reason():
                raise SetupFailed(why)
            time.sleep(BOOT_POLL_SECONDS)
        fleet.setup_progress.set_step(name, "booting", time.monotonic() - begun)
        if one.id not in own_host_keys(self.job_instances.journal):
            key = fleet.connectors[name].run(["sudo", "-n", "imgnet-hostkey"], timeout=60).out.decode().strip()
            record_host_key(self.job_instances.journal, one, key)

    def _pending_reason(self, fleet: Fleet, instance: Instance, instances: Mapping[str, Instance]) -> str:
        """Return what a machine that boots still waits for, "" when it is ready. Raises `SetupFailed`, `WrongKey`."""
        gate = find_jump_host(instances)
        if (
            gate and not instance.public_ip and gate.id not in own_host_keys(self.job_instances.journal)
        ):  # its key is about to change
            return f"machine {gate.name}, through which it is reached, has not booted"
        try:
            said = (
                fleet.connectors[instance.name]
                .run(["sh", "-c", BOOT_STATE_SCRIPT], check=False, timeout=20)
                .out.decode()
                .strip()
            )
        except WrongKey:
            raise
        except ClusterError as error:
            return str(error)
        if said not in ("", "ready"):
            raise SetupFailed(f"its boot went wrong: {said}")
        return "" if said else "it has not finished booting"
