"""A rented machine's way from its address to being one of ours: it boots, lets us in, gets a host key of its own."""

import time
from collections.abc import Callable, Mapping

from cluster.connectors.ssh import Refused as WrongKey
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from infra.aws.instances.instances import Instance

from .instances import Rented
from .ssh_access import FOLDER, gate_of, keep_key, own_keys

BOOT_SECONDS = 900.0
EACH = 1.0
READY = f"cd {FOLDER} && if [ -e failed ]; then cat failed; elif [ -e ready ]; then echo ready; fi"
Look = Callable[[], Mapping[str, Instance]]


class Boot:
    """Waits for the machines of one job; several at once, each in a thread of the fleet's."""

    def __init__(self, rented: Rented, stopping: Callable[[], str]) -> None:
        self.rented, self.stopping = rented, stopping

    def greet(self, fleet: Fleet, name: str, look: Look) -> None:
        """Wait until a machine has booted, and make the bootstrap host key worthless.

        `look` says which machines are there. Raises `SetupFailed`, `ClusterError`.
        """
        begun, one = time.monotonic(), look().get(name)
        if one is None:
            raise SetupFailed("EC2 took it away")
        fleet.board.step(name, "booting")
        while said := self._waits_for(fleet, one, look()):
            current = look().get(name)
            if current is None or current.id != one.id:
                raise SetupFailed(f"EC2 took it away: {one.id}")
            if time.monotonic() - begun > BOOT_SECONDS:
                raise SetupFailed(f"{said}, after {BOOT_SECONDS:.0f} s")
            if why := self.stopping():
                raise SetupFailed(why)
            time.sleep(EACH)
        fleet.board.step(name, "booting", time.monotonic() - begun)
        if one.id not in own_keys(self.rented.journal):
            key = fleet.remotes[name].run(["sudo", "-n", "imgnet-hostkey"], timeout=60).out.decode().strip()
            keep_key(self.rented.journal, one, key)

    def _waits_for(self, fleet: Fleet, one: Instance, present: Mapping[str, Instance]) -> str:
        """Return what a machine that boots still waits for, "" when it is ready. Raises `SetupFailed`, `WrongKey`."""
        gate = gate_of(present)
        if gate and not one.public and gate.id not in own_keys(self.rented.journal):  # its key is about to change
            return f"machine {gate.name}, through which it is reached, has not booted"
        try:
            said = fleet.remotes[one.name].run(["sh", "-c", READY], check=False, timeout=20).out.decode().strip()
        except WrongKey:
            raise
        except ClusterError as error:
            return str(error)
        if said not in ("", "ready"):
            raise SetupFailed(f"its boot went wrong: {said}")
        return "" if said else "it has not finished booting"
