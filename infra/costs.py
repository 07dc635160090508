"""What the rented machines of a job have cost and moved.

The fields have the names that `cost -o json` has.
"""

from dataclasses import dataclass, fields

from train.tools.records import encode

GB = 1e9  # bytes; clouds bill traffic in these


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a job or one of its machines has moved and a cloud may bill by amount.

    Each number is measured, or a bound from above where it cannot be measured. Raises `ValueError` for one below 0:
    machines report them.
    """

    shared_read_bytes: int = 0  # from the shared folder, as its file system meters them
    shared_written_bytes: int = 0
    internet_bytes: int = 0  # over the machines' way to the internet, in both directions
    home_bytes: int = 0  # from the machines to the user's computer
    between_regions_bytes: int = 0  # from an object store in another region; expected, and not measured
    object_reads: int = 0  # requests to an object store
    stored_bytes: int = 0  # in the job's folder on the shared file system; each machine sees the same ones

    def __post_init__(self) -> None:
        if any(getattr(self, field.name) < 0 for field in fields(self)):
            raise ValueError("traffic: a number is below 0")

    def __add__(self, other: "Traffic") -> "Traffic":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Traffic(**{**sums, "stored_bytes": max(self.stored_bytes, other.stored_bytes)})

    def max_with(self, other: "Traffic") -> "Traffic":
        """Return the larger of both, number by number: counts only grow."""
        return Traffic(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    def scaled(self, factor: float) -> "Traffic":
        """Return the traffic times a factor, rounded."""
        return Traffic(**{f.name: round(getattr(self, f.name) * factor) for f in fields(self)})


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, kw_only=True)
class TrafficCost:
    """What one kind of traffic has cost."""

    name: str  # "shared folder, written"
    amount: float
    unit: str  # "GB", or "1000 requests"
    price: float  # dollars a unit
    dollars: float


@dataclass(frozen=True, kw_only=True)
class TrafficForecast:
    """What the traffic of a launch is expected to cost: before and after training, and in an hour of training."""

    dollars_once: float = 0.0
    dollars_per_hour: float = 0.0


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
    nat_dollars: float = 0.0  # of the job's NAT gateway and its address, without traffic
    traffic: tuple[TrafficCost, ...] = ()  # a row for each kind that there was
    requested: int = 0  # machines of a request whose answer is not known: they may run, and are in no sum
    earlier_dollars: float = 0.0  # of an adopted job: what it had cost apart from these machines
    stored_gb: float = 0.0  # at most, in the job's folder on the shared file system, which outlives the job
    stored_dollars_per_month: float = 0.0  # in no sum

    @property
    def dollars(self) -> float:
        """All known dollars."""
        machine_dollars = sum(machine.total_dollars for machine in self.machines)
        other_dollars = self.shared_address_dollars + self.nat_dollars + self.earlier_dollars
        return machine_dollars + other_dollars + self.traffic_dollars

    @property
    def traffic_dollars(self) -> float:
        """The dollars of everything that is billed by amount."""
        return sum(row.dollars for row in self.traffic)

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
            "nat_dollars": self.nat_dollars,
            "traffic_dollars": self.traffic_dollars,
            "earlier_dollars": self.earlier_dollars,
            "traffic": [encode(row) for row in self.traffic],
            "hours": sum(machine.seconds for machine in self.machines) / 3600,
            "unknown": self.unknown,
            "running": self.running,
            "stored_gb": self.stored_gb,
            "stored_dollars_per_month": self.stored_dollars_per_month,
            "requested": self.requested,
        }
