"""What a backend that rents machines reports: what a launch would rent, offers, rented jobs, leftovers and costs.

The fields of rows that commands print as JSON have the names that the JSON has.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.state.spec import JobSpec
from train.tools.records import encode


@dataclass(frozen=True, kw_only=True)
class RentalSummary:
    """What a launch would rent."""

    machines: int
    type: str
    market: str
    region: str
    gpus: str  # of each machine: "8 x A100", or "none"
    zones: tuple[str, ...]  # with the first choice of type and market, in the order in which they are tried
    other_choices: tuple[str, ...]  # what is tried next, one line each
    dollars_per_hour: float | None  # of all machines, None when unknown
    minutes: float | None  # forecast of the whole run, None when there is none
    dollars: float | None
    max_hours: float
    poweroff_grace: float  # seconds from the time limit until the machines power off
    max_dollars: float | None
    is_dollar_limit_set: bool  # by the user; else the limit follows from the hours and the dearest place
    ssh_address: str
    missing_stack_parts: tuple[str, ...]  # what the launch would create


class RentalPlan(ABC):
    """What a launch would rent, with everything that the user confirms."""

    @abstractmethod
    def summary(self, spec: JobSpec) -> RentalSummary:
        """Return what the user is shown: machines, type, market, zones, prices, limits, resources to create."""

    @abstractmethod
    def preview_requests(self, spec: JobSpec) -> list[tuple[str, Mapping[str, object]]]:
        """Return the requests that a launch would send to rent the machines, as (action, arguments)."""


@dataclass(frozen=True, kw_only=True)
class OfferRow:
    """A machine type that is on offer in a zone, with prices in dollars an hour and the forecast of a recipe."""

    type: str
    zone: str
    gpus: int
    gpu: str
    gpu_gb: int
    efa: int
    gbit: float
    spot: float | None
    on_demand: float | None
    on_demand_shipped: bool  # the price is that of the table that ships with the program
    machines: int  # for the forecast
    minutes: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class RentedJob:
    """A job that has rented machines, as their tags describe it."""

    job: str
    uid: str
    machines: int
    state: str  # of the machines: "2 running, 1 pending"
    type: str
    market: str
    zone: str
    since: str
    expires: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """The rented resources of a region that no live job needs, and those that may be needed."""

    region: str
    remove: dict[str, str]  # why each job's resources can be removed, by the job's uid
    stay: tuple[str, ...]  # why each other job's resources stay


@dataclass(frozen=True, kw_only=True)
class MachineCost:
    """What one machine of a job has cost. Times are in seconds since 1970."""

    id: str
    name: str
    type: str
    market: str
    zone: str
    launched: float
    ended: float | None  # None while the machine is billed
    price: float | None  # dollars an hour at the launch, None when unknown
    seconds: float  # billed time
    dollars: float | None  # of the machine alone, None when its price is unknown
    disk_dollars: float
    address_dollars: float
    why: str  # why it ended, "" while it is billed

    @property
    def total_dollars(self) -> float:
        """The known dollars of machine, disk and address."""
        return (self.dollars or 0.0) + self.disk_dollars + self.address_dollars

    def to_json(self) -> dict[str, object]:
        """Return the row as plain data, with the sum of its dollars."""
        return {**encode(self), "all": self.total_dollars}


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """What the machines of a job have cost."""

    machines: tuple[MachineCost, ...] = ()  # in the order of their launch
    shared_address_dollars: float = 0.0  # of addresses that belong to the job and to no machine

    @property
    def dollars(self) -> float:
        """All known dollars."""
        return sum(machine.total_dollars for machine in self.machines) + self.shared_address_dollars

    @property
    def machine_dollars(self) -> float:
        """The known dollars of the machines without disks and addresses."""
        return sum(machine.dollars or 0.0 for machine in self.machines)

    @property
    def disk_dollars(self) -> float:
        """The dollars of the disks."""
        return sum(machine.disk_dollars for machine in self.machines)

    @property
    def address_dollars(self) -> float:
        """The dollars of the public addresses."""
        return sum(machine.address_dollars for machine in self.machines) + self.shared_address_dollars

    @property
    def unknown(self) -> list[str]:
        """The IDs of the machines whose price is unknown. They are in no sum."""
        return [machine.id for machine in self.machines if machine.dollars is None]

    @property
    def running(self) -> int:
        """The number of machines that are still billed."""
        return sum(machine.ended is None for machine in self.machines)

    def to_json(self) -> dict[str, object]:
        """Return rows and sums as plain data."""
        return {
            "machines": [machine.to_json() for machine in self.machines],
            "dollars": self.dollars,
            "machine_dollars": self.machine_dollars,
            "disk_dollars": self.disk_dollars,
            "address_dollars": self.address_dollars,
            "hours": sum(machine.seconds for machine in self.machines) / 3600,
            "unknown": self.unknown,
            "running": self.running,
        }
