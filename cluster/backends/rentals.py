"""What a cloud reports without a run folder: what a launch would rent, offers, rented jobs, leftovers.

The fields of rows that commands print as JSON have the names that the JSON has.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RentalPlan:
    """What a launch would rent, with all facts that the user confirms."""

    machines: int
    type: str
    market: str
    gpus: str  # of each machine: "8 x A100", or "none"
    spares: str  # how many of the machines are spares that are rented in another way, and how; "" for none
    dollars_per_hour: float | None  # of all machines, None when unknown
    on_demand_dollars_per_hour: float | None = None  # of all machines, where their own price is unknown
    minutes: float | None  # forecast of the whole run, None when there is none
    forecast_source: str = "presets"  # of its constants: "presets", or the job that measured them
    dollars: float | None
    # Of disks, addresses, a NAT gateway and the expected traffic: an hour, and once.
    other_dollars: tuple[float, float] = (0.0, 0.0)
    max_hours: float
    poweroff_grace: float  # seconds from the time limit until the machines power off
    max_dollars: float | None  # from now on, at today's prices
    ceiling_dollars: float | None = None  # from now on if spot prices rise to those on demand; None: unknown, no spot
    is_dollar_limit_set: bool  # by the user; else it follows from the hours and the dearest place
    spent_dollars: float | None = None  # by a job that is resumed, of which only the rest is planned; None: a new job
    traffic: tuple[str, ...]  # what is billed by amount: the expected cost, then what it assumes, a line each
    # What else the launch does, gets and costs, a label and a line each: ("then", another choice), ("image", its name).
    facts: tuple[tuple[str, str], ...] = ()
    requests: tuple[tuple[str, Mapping[str, object]], ...]  # that rent the machines, as (action, arguments)


@dataclass(frozen=True, kw_only=True)
class RentalLimit:
    """When the machines of a launch end at the latest."""

    hours: float  # from the start of the first machine until the job saves and stops
    dollars: float | None  # cost of the whole job once the machines are off; None: unknown price


@dataclass(frozen=True, kw_only=True)
class RentedNow:
    """What a job rents at the moment, by its run folder: the cloud is not asked."""

    machines: int
    requested: int = 0  # machines that may run: the answer to their request is not known
    dollars_per_hour: float | None = None  # None: unknown price
    # When the machines power themselves off at the latest, in seconds since 1970; None: the cloud is not set up here.
    power_off_time: float | None = None
    is_overdue: bool = False  # whether that time is past by the job's clock

    def __str__(self) -> str:
        lines = []
        if self.machines and self.is_overdue:
            subject = "1 machine" if self.machines == 1 else f"{self.machines} machines"
            lines.append(f"{subject} should be off since {self.power_off}, but nothing has confirmed it")
        elif self.machines == 1:
            lines.append(f"1 machine still runs and is billed; it powers off at {self.power_off}")
        elif self.machines:
            lines.append(f"{self.machines} machines still run and are billed; they power off at {self.power_off}")
        if self.requested:
            subject = "1 machine that was" if self.requested == 1 else f"{self.requested} machines that were"
            lines.append(f"{subject} requested may run and be billed until {self.power_off}: the answer is not known")
        return "; ".join(lines)

    def describe(self, job: str) -> str:
        """Return what the job of this name rents, and how to end it."""
        return f"{self}; to end them now: imgnet-cluster down {job}"

    @property
    def power_off(self) -> str:
        """When the machines power off, in the time zone of this computer; with the date unless it is today's."""
        if not self.power_off_time:
            return "the end of their time"
        moment = time.localtime(self.power_off_time)
        is_today = moment[:3] == time.localtime()[:3]
        return time.strftime("%H:%M %Z" if is_today else "%Y-%m-%d %H:%M %Z", moment)


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
    """A job that has rented machines, or left something that is billed, as the tags describe it."""

    job: str
    uid: str
    machines: int
    state: str  # of the machines: "2 running, 1 pending"; without machines what is left, with its price
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
