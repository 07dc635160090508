"""Exchanges broken machines: those whose boot failed, whose driver hangs, or that lost a GPU. Only so many of a launch.

Other machines of the same type and place are as good as the broken one was. When the next ones break too, the cause is
elsewhere, and every further machine would only cost money.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Generic

from cluster.connectors import untrusted
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import RunFolder
from cluster.state.status import read_agent_status
from infra.rented_machine import RentedMachine
from train.tools.agent_protocol import Fault

from .provider import CloudProvider, MachineT

logger = logging.getLogger(__name__)


class NoExchangeLeft(Exception):
    """A machine is broken, and as many were exchanged as the job allows. The text has the reason, in one line."""


class MachineExchange(Generic[MachineT]):
    """Counts the exchanged machines of one job. May be used from several threads."""

    def __init__(self, provider: CloudProvider[MachineT], max_exchanges: int) -> None:
        self.provider = provider
        self.max_exchanges = max_exchanges
        self.lock = threading.Lock()  # held while machines are counted and another one is terminated

    def choose(self, broken: Mapping[str, str], live_machines: Mapping[str, MachineT]) -> dict[str, str]:
        """Return which live broken machines may be exchanged, with the reasons. The job can do without the others."""
        live_broken = [(name, reason) for name, reason in broken.items() if name in live_machines]
        left = self.max_exchanges - len(self.provider.exchanged_ids) if live_broken else 0
        return dict(live_broken[: max(0, left)])

    def release(self, machine: MachineT, reason: str) -> None:
        """Terminate a broken machine, in whose place another may be rented. Raises `NoExchangeLeft`, `CloudError`.

        The provider's journal has the machines that were exchanged, so a supervisor that is started again counts on.
        """
        with self.lock:
            earlier_ids = self.provider.exchanged_ids - {machine.id}
            if len(earlier_ids) >= self.max_exchanges:
                raise NoExchangeLeft(
                    f"{reason}; machines exchanged before: {len(earlier_ids)} of {self.max_exchanges} (--max-exchanges)"
                )
            logger.warning("machine %s (%s): %s; it is exchanged", machine.name, machine.id, reason)
            self.provider.terminate([machine.id], reason, is_exchange=True)


def final_status(run_folder: RunFolder, machine: RentedMachine) -> MachineStatus | None:
    """Return the last status of a live machine's agent, None unless the agent has ended.

    None also when the status is that of the machine which had the name before. Raises `DamagedRecord`.
    """
    status = read_agent_status(run_folder, machine.name)
    return status if status and status.ended and status.address == machine.private_ip else None


def broken_reason(status: MachineStatus | None) -> str:
    """Return why an agent with this final status ended, if its machine is broken, else ""."""
    if status is None or status.fault != Fault.MACHINE:
        return ""
    return untrusted.one_line(status.reason) or "it is broken"
