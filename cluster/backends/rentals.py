"""What a cloud reports without a run folder: what a launch would rent, offers, rented jobs, leftovers.

The fields of rows that commands print as JSON have the names that the JSON has.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from cluster.connectors.hosts_file import Host
from cluster.errors import ClusterError
from cluster.state.spec import JobSpec
from infra.offers import CapacityBlockRow, LaunchFinding
from infra.rented_machine import RentedMachine
from train.data.fetch.sources import Source
from train.recipe.schema import Recipe
from train.tools.process_log import Progress


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
    max_hours: float
    poweroff_grace: float  # seconds from the time limit until the machines power off
    max_dollars: float | None  # from now on
    is_dollar_limit_set: bool  # by the user; else the limit follows from the hours and the dearest place
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
        return "; ".join(filter(None, (self._describe_running(), self._describe_requested())))

    def describe(self, job: str) -> str:
        """Return what the job of this name rents, and how to end it."""
        return f"{self}; to end them now: imgnet-cluster down {job}"

    def _describe_running(self) -> str:
        if not self.machines:
            return ""
        subject = "1 machine" if self.machines == 1 else f"{self.machines} machines"
        if self.is_overdue:
            return f"{subject} should be off since {self.power_off}, but nothing has confirmed it"
        if self.machines == 1:
            return f"{subject} still runs and is billed; it powers off at {self.power_off}"
        return f"{subject} still run and are billed; they power off at {self.power_off}"

    def _describe_requested(self) -> str:
        if not self.requested:
            return ""
        subject = "1 machine that was" if self.requested == 1 else f"{self.requested} machines that were"
        return f"{subject} requested may run and be billed until {self.power_off}: the answer is not known"

    @property
    def power_off(self) -> str:
        """When the machines power off, in the time zone of this computer; with the date unless it is today's."""
        if not self.power_off_time:
            return "the end of their time"
        moment = time.localtime(self.power_off_time)
        is_today = moment[:3] == time.localtime()[:3]
        return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)


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


class JobAdoption(ABC):
    """A rented job that this computer takes over from another one: how to log in to it, and what it may rent."""

    uid: str
    hosts: Mapping[str, Host]  # how to reach each of its machines, by name
    shared: str  # the folder on each machine with the jobs' descriptions

    @abstractmethod
    def with_terms(self, spec: JobSpec) -> JobSpec:
        """Return a job's description from the shared folder with what the account says of machines and money."""

    @abstractmethod
    def take_over(self, run_path: Path, launch_id: str) -> None:
        """Write what the backend needs to a run folder, and become the only computer that supervises the job.

        Raises `ClusterError` when another computer adopts it at the same time.
        """


class CloudAdministration(ABC):
    """A cloud without a run folder: its stack, tagged resources, prices, permissions.

    Everything works from tags alone, on a computer that never saw the jobs. The stack of a region is what its jobs
    share. A region of None is the one that the user's environment names. Methods raise `ClusterError`. Lines are for
    the user, one for each resource.
    """

    backend: ClassVar[str]  # the name of the backend that rents from this cloud

    @abstractmethod
    def resolve_regions(self, requested: Sequence[str]) -> list[str]:
        """Return the requested regions, or the environment's region if none is requested."""

    @abstractmethod
    def regions_of(self, spec: JobSpec) -> set[str]:
        """Return the regions in which a job of this cloud may have rented machines."""

    @abstractmethod
    def ensure_stack(
        self, region: str | None, address: str | None, bucket: str | None, tag_texts: Sequence[str] = ()
    ) -> str:
        """Create what is missing of a region's stack, and return a line about the stack.

        `address` is the address range that may connect over ssh, None for this computer. `tag_texts` are tags of the
        user, KEY=VALUE. Raises `BadInput` for one that the cloud would refuse.
        """

    @abstractmethod
    def missing_stack_parts(self, region: str | None) -> list[str]:
        """Return a line for each part that `ensure_stack` would create."""

    @abstractmethod
    def has_stack(self, region: str) -> bool:
        """Return whether a part of a region's stack exists that `remove_stack` would remove, or its data."""

    @abstractmethod
    def remove_stack(self, region: str | None, delete_data: bool) -> list[str]:
        """Remove a region's stack, unless machines still run in it. Returns a line for each resource that is left."""

    @abstractmethod
    def rented_jobs(self, region: str) -> list[RentedJob]:
        """Return a row for each job that rents anything in a region."""

    @abstractmethod
    def rented_machines(self, region: str, uid: str) -> Sequence[RentedMachine]:
        """Return the machines of a job in a region, by name, including machines that ended recently."""

    def begin_adoption(self, region: str, uid: str) -> JobAdoption:
        """Find a rented job by its tags, and let this computer log in to its machines.

        The other computer supervises the job until `JobAdoption.take_over`, but may lose its own access to the machines
        earlier. Raises `NoSuchJob`, `ClusterError`.
        """
        raise ClusterError(f"jobs of {self.backend} cannot be adopted")

    @abstractmethod
    def terminate_job(self, region: str, uid_or_name: str) -> list[str]:
        """Terminate a job found by the tags of its resources, by its uid or, if that is unambiguous, by its name.

        Another owner's job has to be named by its uid. Returns a line for each resource that is not gone. Raises
        `NoSuchJob`.
        """

    @abstractmethod
    def terminate_jobs(self, region: str, uids: Sequence[str]) -> list[str]:
        """Terminate all resources of some jobs. Returns a line for each that is not gone."""

    @abstractmethod
    def find_garbage(self, region: str, local_jobs: Mapping[str, bool], include_unknown: bool) -> Garbage:
        """Find the resources in a region that no live job needs.

        `local_jobs` says for each job of this runs folder whether it is alive. Any other job is another computer's: it
        is left alone until it expires by the cloud's clock, unless `include_unknown`.
        """

    @abstractmethod
    def offer_rows(
        self, region: str | None, gpu: str | None, recipe: Recipe | None, machine_count: int | None
    ) -> list[OfferRow]:
        """Return a row for each machine type and zone on offer, with prices.

        With a recipe, each row has the forecast minutes and dollars on `machine_count` machines (None: the recipe's
        number), and the cheapest row is first.
        """

    def capacity_block_rows(
        self, region: str | None, gpu: str | None, machine_count: int, hours: float
    ) -> list[CapacityBlockRow]:
        """Return the blocks of reserved machines that can be bought, those that last `hours` first. Buys nothing."""
        raise ClusterError(f"{self.backend} sells no capacity blocks")

    @abstractmethod
    def check_launch(
        self,
        region: str | None,
        types: Sequence[str],
        machine_count: int,
        market: str,
        tag_texts: Sequence[str] = (),
        reservation: str | None = None,
    ) -> list[LaunchFinding]:
        """Check everything that a launch needs from the cloud, perhaps in reserved machines.

        `tag_texts` are as for `ensure_stack`.
        """

    @abstractmethod
    def iam_policies(self, region: str | None = None, data: str | None = None) -> Mapping[str, object]:
        """Return the least permissions of user and machines, for a region or all, with `data` also to read there."""


class ObjectStore(Source, Protocol):
    """A packed data set in a cloud's object store. Made from its URL."""

    def upload(self, folder: Path, progress: Progress) -> tuple[int, int]:
        """Upload a packed set. Files that are there already are skipped; the manifests come last.

        A set with a manifest is therefore always complete. `progress` is called with the bytes done and in total.
        Returns the number of files uploaded and of files skipped. Raises `FetchError`, `ClusterError`, `OSError`.
        """
