"""The interface of a cloud to the controller of rented jobs: rent machines, list them, end them, and tell their cost.

A provider keeps a journal in the run folder and writes to it before it sends a request, so that after a crash the same
request is repeated and nothing is rented twice. Each machine is tagged with its job from its creation: the tags say
what exists. Messages for the user go to a logger below "infra" or "cluster.backends".

The boot script of a machine powers the machine off at the end of its time, mounts the shared folder, and writes a
line to `ready` in REMOTE_FOLDER at its end, or the reason of a failure to `failed`. It installs two commands:
`imgnet-limit SECONDS` sets the power-off anew, and `imgnet-hostkey` replaces the host key that the machine booted with
and prints the new one. An agent is told of an interruption by the machine's metadata service at
`JobSpec.metadata_address` (cluster/agent/watchdog.py), or by the file `notice` in its work folder.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from cluster.connectors.hosts_file import Host
from cluster.state import supervisor_records
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec, RequestedLimits
from infra.costs import JobCost, TrafficForecast
from infra.errors import Interrupted
from infra.rented_machine import RentedMachine
from train.tools import host

REMOTE_FOLDER = "~/.imgnet"  # on every rented machine; its boot script creates the folder
# From the time limit until the machine powers off: for the last checkpoint and its download.
POWEROFF_GRACE_SECONDS = 900
SHORT_GRACE_SHARE = 0.25  # of the time until power-off, where that is too short for the grace above
MAX_HOURS_WITHOUT_LIMIT = 48.0
MachineT = TypeVar("MachineT", bound=RentedMachine)

logger = logging.getLogger(__name__)


class NoExchangeLeft(Exception):
    """A machine is broken, and the job may exchange no more. The text has the reason, in one line."""


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
        self.max_exchanges = spec.recovery.max_exchanges
        self._exchange_lock = threading.Lock()  # held while exchanged machines are counted and another is terminated
        self._changed_hours: float | None = None
        self._changed_dollars: float | None = None

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
        """When the first machine of this launch was granted, by `host.unix_time`; None before it."""

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
        """Raise `NoCredentials` without credentials, with `ask_cloud` also when the cloud does not accept them.

        With `ask_cloud` also raises `AdoptedElsewhere`.
        """
        return

    def require_ownership(self) -> None:
        """Raise `AdoptedElsewhere` when another computer has adopted the job. This one may then only terminate it."""
        return

    # --- machines -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def finish_open_requests(self) -> None:
        """Send requests again whose answer a crash lost. The cloud knows them, so no machine is rented twice."""

    @abstractmethod
    def list_machines(self) -> dict[str, MachineT]:
        """Return the live machines. A machine that is left out is certainly gone.

        This and all that rents or terminates single machines raises as `require_ownership` does.
        """

    @abstractmethod
    def rent_all(self) -> dict[str, MachineT]:
        """Rent all `first_names` in one place, or none of them; then the spares that are due. Raises `NoMachines`."""

    @abstractmethod
    def rent_replacement(self, name: str) -> MachineT:
        """Rent one machine in place of a lost one, beside the others. Raises `MachinesRefused`."""

    @property
    def first_names(self) -> tuple[str, ...]:
        """The machines that are rented together. All others are spares, which the job can start without."""
        return self.spec.machine_names

    @property
    def rents_spares_late(self) -> bool:
        """Whether spares are rented only while another machine is at risk. They are none of the `first_names`."""
        return False

    def ensure_reachable(self, machines: dict[str, MachineT]) -> dict[str, MachineT]:
        """Give an address to each machine that cannot be reached yet, and return all machines.

        Machines that stay unreachable are terminated and left out; their replacements are rented in another way.
        """
        return machines

    @abstractmethod
    def terminate(self, ids: list[str], reason: str, is_exchange: bool = False) -> None:
        """Terminate some machines. The journal marks them as ended by the job, so replacements may be rented.

        `is_exchange`: they are broken, and others are rented in their place. `exchanged_ids` then has them.
        """

    @property
    @abstractmethod
    def exchanged_ids(self) -> Set[str]:
        """The machines of this launch that were terminated because they are broken, by the journal."""

    @property
    def exchanges_left(self) -> int:
        """How many machines of this launch may still be exchanged.

        Other machines of the same type and place are as good as a broken one was. When the next ones break too, the
        cause is elsewhere, and every further machine would only cost money.
        """
        return max(0, self.max_exchanges - len(self.exchanged_ids))

    def release_broken(self, machine: MachineT, reason: str) -> None:
        """Terminate a broken machine, in whose place another may be rented. Raises `NoExchangeLeft`, `CloudError`.

        The journal has the machines that were exchanged, so a supervisor that is started again counts on.
        """
        with self._exchange_lock:
            earlier_ids = self.exchanged_ids - {machine.id}
            if len(earlier_ids) >= self.max_exchanges:
                raise NoExchangeLeft(
                    f"{reason}; machines exchanged before: {len(earlier_ids)} of {self.max_exchanges} (--max-exchanges)"
                )
            logger.warning("machine %s (%s): %s; it is exchanged", machine.name, machine.id, reason)
            self.terminate([machine.id], reason, is_exchange=True)

    @abstractmethod
    def terminate_job(self) -> list[str]:
        """Terminate everything of the job that is billed, and wait until the cloud confirms it. Idempotent.

        Ignores a stop request. Returns a line for each resource that is not gone.
        """

    @abstractmethod
    def set_expiry(self, expiry_time: float) -> None:
        """Tag the machines with the time after which `gc` removes them, in seconds since 1970."""

    def read_console(self, machine: MachineT) -> str:
        """Return what a machine printed while it booted, "" if the cloud does not tell."""
        return ""

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
        """Return what the machines of a run folder and their traffic have cost until `moment`. Reads files only."""

    @property
    @abstractmethod
    def dollars_per_hour(self) -> float | None:
        """The price of all machines where they are now, with disks, addresses and expected traffic; None: unknown."""

    @property
    def closing_time(self) -> float | None:
        """When the cloud ends the machines whatever the job does, in seconds since 1970; None for never."""
        return None

    def total_dollars(self, moment: float) -> float:
        """Return the known dollars until `moment`."""
        return self.job_cost(self.run_folder.path, moment).dollars

    @property
    def earlier_cost(self) -> float:
        """The cost of the job's earlier launches, in dollars."""
        return self.total_dollars(self.first_machine_time or host.unix_time())

    def change_limits(self, hours: float | None, dollars: float | None) -> None:
        """Let this object use other limits than the requested ones, those that are not None."""
        self._changed_hours, self._changed_dollars = hours, dollars

    @property
    def max_hours(self) -> float | None:
        """The requested time limit in hours, None for none."""
        return self._requested_limits.max_hours if self._changed_hours is None else self._changed_hours

    @property
    def expected_traffic(self) -> TrafficForecast:
        """What the traffic of one launch of the job is expected to cost; a part of `dollars_per_hour`."""
        return TrafficForecast()

    @property
    def max_dollars(self) -> float | None:
        """The limit for all machines of the job together, None for no limit."""
        if self._changed_dollars is not None:
            return self._changed_dollars
        requested = self._requested_limits.cloud
        return requested.max_dollars if requested else None

    @property
    def _requested_limits(self) -> RequestedLimits:
        """The limits in the run folder's job.json: `extend` may have changed them since this process started."""
        written = self.run_folder.read_limits()
        return written or RequestedLimits(max_hours=self.spec.max_hours, cloud=self.spec.rental_facts)

    def with_machine_limits(self, spec: JobSpec) -> JobSpec:
        """Return the specification that the machines get. Its time limit keeps the limit in dollars too."""
        max_hours, grace_seconds = self.compute_limits(self.dollars_per_hour)
        limit_name = self._explain_limit(max_hours, grace_seconds)
        return replace(spec, max_hours=max_hours, poweroff_grace=grace_seconds, limit_name=limit_name)

    def compute_limits(self, dollars_per_hour: float | None) -> tuple[float, float]:
        """Return the time limit in hours since this launch's first machine, and the seconds from it until power-off."""
        max_dollars = self.max_dollars
        other_dollars = 0.0 if max_dollars is None else self._other_dollars(dollars_per_hour)
        return compute_limits(self.max_hours, max_dollars, dollars_per_hour, other_dollars, self._seconds_until_closing)

    @property
    def _seconds_until_closing(self) -> float:
        """The seconds from the first machine of this launch until the cloud ends all machines."""
        closing_time = self.closing_time
        return math.inf if closing_time is None else closing_time - (self.first_machine_time or host.unix_time())

    def _explain_limit(self, max_hours: float, grace_seconds: float) -> str:
        """Return what set this time limit when it was not the requested hours, else ""."""
        if 3600 * max_hours + grace_seconds >= self._seconds_until_closing - 1:
            return f"the end of its reserved machines on {self.cloud_name}"
        requested_hours = MAX_HOURS_WITHOUT_LIMIT if self.max_hours is None else self.max_hours
        if self.max_dollars is None or max_hours >= requested_hours:
            return ""
        return f"the limit of ${self.max_dollars:,.2f} (--max-price-total)"

    def _other_dollars(self, dollars_per_hour: float | None) -> float:
        """Return what the job costs beside `dollars_per_hour` since this launch's first machine.

        The cost of earlier launches, of traffic that does not come by the hour, and of more traffic than expected.
        """
        start = self.first_machine_time
        dollars_once = self.expected_traffic.dollars_once
        if not dollars_per_hour or start is None:
            return self.earlier_cost + dollars_once
        now = host.unix_time()
        if self.has_moved:  # the earlier machines had another price
            return self.total_dollars(now) - dollars_per_hour * (now - start) / 3600 + dollars_once
        cost, earlier_cost = (self.job_cost(self.run_folder.path, moment) for moment in (now, start))
        expected_dollars = dollars_once + self.expected_traffic.dollars_per_hour * (now - start) / 3600
        excess_dollars = max(0.0, cost.traffic_dollars - earlier_cost.traffic_dollars - expected_dollars)
        return earlier_cost.dollars + dollars_once + excess_dollars

    @property
    def is_price_limit_reached(self) -> bool:
        """Whether the job has to stop now, so that it ends within its price limit.

        The agents stop at the time limit that was computed when the machines were rented. More traffic than was
        expected then shortens the time.
        """
        now = host.unix_time()
        if self.max_dollars is None:
            return False
        if self.total_dollars(now) >= self.max_dollars:
            return True
        hours, _ = self.compute_limits(self.dollars_per_hour)
        is_limited_by_price = self.max_hours is None or hours < self.max_hours
        return bool(self.first_machine_time and is_limited_by_price and now - self.first_machine_time >= 3600 * hours)

    @property
    def power_off_time(self) -> float:
        """When the machines of this launch power themselves off at the latest: after time limit and grace period."""
        max_hours, grace_seconds = self.compute_limits(self.dollars_per_hour)
        return (self.first_machine_time or host.unix_time()) + 3600 * max_hours + grace_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether all machines of this launch should be off."""
        return self.first_machine_time is not None and host.unix_time() > self.power_off_time


def compute_limits(
    max_hours: float | None,
    max_dollars: float | None,
    dollars_per_hour: float | None,
    spent_dollars: float = 0.0,
    seconds_until_closing: float = math.inf,
) -> tuple[float, float]:
    """Return the time limit in hours and the grace period in seconds from the limit until power-off.

    At the limit, the job saves a checkpoint and ends. `max_hours` is the user's time limit; None means until
    the cloud ends the machines, or 48 hours. Limit and grace period together stay within what is left of `max_dollars`,
    of which `spent_dollars` were gone when the machines started, and within the time until the cloud ends the machines.
    """
    seconds = max(0.0, seconds_until_closing)
    if max_hours is None:
        max_hours = MAX_HOURS_WITHOUT_LIMIT if math.isinf(seconds) else seconds / 3600
    grace_seconds = float(POWEROFF_GRACE_SECONDS)
    if max_dollars is not None and dollars_per_hour:
        seconds = min(seconds, 3600 * max(0.0, max_dollars - spent_dollars) / dollars_per_hour)
    if seconds < 3600 * max_hours + grace_seconds:
        grace_seconds = min(grace_seconds, max(SHORT_GRACE_SHARE * seconds, seconds - 3600 * max_hours))
        max_hours = min(max_hours, (seconds - grace_seconds) / 3600)
    return max_hours, grace_seconds


def find_jump_host(machines: Mapping[str, MachineT]) -> MachineT | None:
    """Return the first machine with a public address, through which all others are reached."""
    return next((machine for machine in machines.values() if machine.public_ip), None)


class ActivityHandler(logging.Handler):
    """Shows what clouds and their controller log, but for warnings, as the job's activity, which `status` has."""

    @classmethod
    def install(cls, run_folder: RunFolder) -> None:
        """Show the activity in a run folder, instead of in the one of an earlier controller of this process."""
        handler = cls(run_folder)
        for name in ("infra", "cluster.backends"):
            activity_logger = logging.getLogger(name)
            others = [other for other in activity_logger.handlers if not isinstance(other, cls)]
            activity_logger.handlers[:] = [*others, handler]

    def __init__(self, run_folder: RunFolder) -> None:
        super().__init__()
        self.run_folder = run_folder

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message to the run folder."""
        if record.levelno == logging.INFO:
            supervisor_records.write_activity(self.run_folder.path, record.getMessage())
