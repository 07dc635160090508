"""The interface of a cloud to the controller of rented jobs: rent machines, list them, end them, and tell their cost.

A provider keeps a journal in the run folder and writes to it before it sends a request, so that after a crash the same
request is repeated and nothing is rented twice. Each machine is tagged with its job from its creation: the tags say
what exists. Messages for the user go to a logger below "infra" or "cluster.backends".

The boot script of a machine powers the machine off at the end of its time, mounts the shared folder, and creates
`ready` in REMOTE_FOLDER at its end, or `failed` with the reason. It installs two commands: `imgnet-limit SECONDS` sets
the power-off anew, and `imgnet-hostkey` replaces the host key that the machine booted with and prints the new one. An
agent is told of an interruption by the machine's metadata service at `JobSpec.metadata_address`
(cluster/agent/watchdog.py), or by the file `notice` in its work folder.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from cluster.connectors.hosts_file import Host
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from infra.costs import JobCost
from infra.errors import Interrupted
from infra.rented_machine import RentedMachine
from train.tools.filesystem import read_json

JOURNAL_FILE = "cloud.jsonl"  # in the run folder; without it, nothing was ever rented
REMOTE_FOLDER = "~/.imgnet"  # on every rented machine; its boot script creates the folder
# From the time limit until the machine powers off: for the last checkpoint and its download.
POWEROFF_GRACE_SECONDS = 900
MAX_HOURS_WITHOUT_LIMIT = 48.0
MachineT = TypeVar("MachineT", bound=RentedMachine)


class CloudProvider(ABC, Generic[MachineT]):
    """The machines that one job rents from one cloud. An object belongs to one process.

    `get_stop_reason` returns why the job is to stop, "" while it goes on; a wait then raises `Interrupted`.
    Methods that ask the cloud raise `CloudError`. Machines are listed by their names "0", "1", ...
    """

    cloud_name: ClassVar[str]  # in messages

    def __init__(self, spec: JobSpec, run_folder: RunFolder, get_stop_reason: Callable[[], str] = lambda: "") -> None:
        self.spec = spec
        self.run_folder = run_folder
        self.get_stop_reason = get_stop_reason

    def sleep_unless_stopping(self, seconds: float) -> None:
        """Sleep. Raises `Interrupted` as soon as the job is to stop."""
        deadline = time.monotonic() + seconds
        while True:
            if reason := self.get_stop_reason():
                raise Interrupted(reason)
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return
            time.sleep(min(0.5, seconds_left))

    # --- this launch, from the journal --------------------------------------------------------------------------------

    @abstractmethod
    def record_launch(self, launch_id: str) -> None:
        """Record the start of a launch. Idempotent: a restarted supervisor repeats the call."""

    @abstractmethod
    def record_move(self, launch_id: str) -> None:
        """Record that the launch continues on other machines, under a new launch ID."""

    @property
    @abstractmethod
    def first_machine_time(self) -> float | None:
        """When the first machine of this launch was granted, in seconds since 1970; None before it."""

    @property
    @abstractmethod
    def has_moved(self) -> bool:
        """Whether all machines of this launch were rented more than once."""

    @property
    @abstractmethod
    def is_terminating(self) -> bool:
        """Whether a command began to terminate the machines of this launch. Then nothing is rented for it any more."""

    @abstractmethod
    def external_termination_reason(self) -> str:
        """Return why the last machines of this launch ended, if neither the cloud nor the job did; else ""."""

    def check_access(self, ask_cloud: bool) -> None:
        """Raise `NoCredentials` without credentials, with `ask_cloud` also when the cloud does not accept them."""
        return

    # --- machines -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def finish_open_requests(self) -> None:
        """Send requests again whose answer a crash lost. The cloud knows them, so no machine is rented twice."""

    @abstractmethod
    def list_machines(self) -> dict[str, MachineT]:
        """Return the live machines. A machine that is left out is certainly gone."""

    @abstractmethod
    def rent_all(self) -> dict[str, MachineT]:
        """Rent all machines of the job in one place, or none. Raises `NoMachines`."""

    @abstractmethod
    def rent_replacement(self, name: str) -> MachineT:
        """Rent one machine in place of a lost one, beside the others. Raises `MachinesRefused`."""

    def ensure_reachable(self, machines: dict[str, MachineT]) -> dict[str, MachineT]:
        """Give one machine a public address if none has one, and return the updated machines."""
        return machines

    @abstractmethod
    def terminate(self, ids: list[str], reason: str) -> None:
        """Terminate some machines. The journal marks them as ended by the job, so replacements may be rented."""

    @abstractmethod
    def terminate_job(self) -> list[str]:
        """Terminate everything of the job that is billed, and wait until the cloud confirms it. Idempotent.

        Ignores a stop request. Returns a line for each resource that is not gone.
        """

    @abstractmethod
    def set_expiry(self, expiry_time: float) -> None:
        """Tag the machines with the time after which `gc` removes them, in seconds since 1970."""

    # --- access -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def hosts(self, machines: Mapping[str, MachineT]) -> dict[str, Host]:
        """Return how to reach each machine. Reads the journal only."""

    @abstractmethod
    def has_own_host_key(self, machine: MachineT) -> bool:
        """Whether the journal has the host key that a machine generated itself."""

    @abstractmethod
    def record_host_key(self, machine: MachineT, key: str) -> None:
        """Write the host key that a machine generated itself to the journal."""

    def access_warning(self) -> str:
        """Return why this computer may no longer reach the machines, and what to do, else ""."""
        return ""

    # --- cost and limits ----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def job_cost(cls, run_path: Path, moment: float) -> JobCost:
        """Return what the machines of a run folder have cost until `moment`. Reads the journal only."""

    @property
    @abstractmethod
    def max_dollars(self) -> float | None:
        """The limit for all machines of the job together, None for no limit."""

    @property
    @abstractmethod
    def dollars_per_hour(self) -> float | None:
        """The price of all machines where they are now, with disks and addresses; None when it is unknown."""

    def total_dollars(self, moment: float) -> float:
        """Return the known dollars until `moment`."""
        return self.job_cost(self.run_folder.path, moment).dollars

    @property
    def earlier_cost(self) -> float:
        """The cost of the job's earlier launches, in dollars."""
        return self.total_dollars(self.first_machine_time or time.time())

    @property
    def max_hours(self) -> float | None:
        """The requested time limit in hours, read from the run folder because `extend` may have changed it."""
        max_hours: float | None = (read_json(self.run_folder.spec_path) or {}).get("max_hours", self.spec.max_hours)
        return max_hours

    def compute_limits(self, dollars_per_hour: float | None, hours: float | None = None) -> tuple[float, float]:
        """Return the time limit in hours since this launch's first machine, and the seconds from it until power-off.

        `hours` replaces the requested time limit.
        """
        spent_dollars = self.earlier_cost
        if dollars_per_hour and self.first_machine_time and self.has_moved:
            # The limit counts from the first machine and assumes today's rate for all of that time. Correct this by the
            # difference to what the earlier machines really cost.
            now = time.time()
            spent_dollars = self.total_dollars(now) - dollars_per_hour * (now - self.first_machine_time) / 3600
        max_hours = self.max_hours if hours is None else hours
        return compute_limits(max_hours, self.max_dollars, dollars_per_hour, spent_dollars)

    @property
    def is_overdue(self) -> bool:
        """Whether the time limit and the grace period of this launch are over, so that all machines should be off."""
        if self.first_machine_time is None:
            return False
        max_hours, grace_seconds = self.compute_limits(self.dollars_per_hour)
        return time.time() - self.first_machine_time > 3600 * max_hours + grace_seconds


def compute_limits(
    max_hours: float | None, max_dollars: float | None, dollars_per_hour: float | None, spent_dollars: float = 0.0
) -> tuple[float, float]:
    """Return the time limit in hours and the grace period in seconds from the limit until power-off.

    At the limit, the job saves a checkpoint and ends. `max_hours` is the user's time limit, None means 48 hours. Limit
    and grace period together stay within what is left of `max_dollars`, of which `spent_dollars` were gone when the
    machines started.
    """
    max_hours = MAX_HOURS_WITHOUT_LIMIT if max_hours is None else max_hours
    grace_seconds = float(POWEROFF_GRACE_SECONDS)
    if max_dollars is not None and dollars_per_hour:
        affordable_seconds = 3600 * max(0.0, max_dollars - spent_dollars) / dollars_per_hour
        if affordable_seconds < 3600 * max_hours + grace_seconds:
            grace_seconds = min(grace_seconds, max(affordable_seconds / 4, affordable_seconds - 3600 * max_hours))
            max_hours = min(max_hours, (affordable_seconds - grace_seconds) / 3600)
    return max_hours, grace_seconds


def find_jump_host(machines: Mapping[str, MachineT]) -> MachineT | None:
    """Return the first machine with a public address, through which all others are reached."""
    return next((machine for machine in machines.values() if machine.public_ip), None)
