"""What the rented machines of a job have cost, on any cloud.

The fields have the names that `cost -o json` has.
"""

from dataclasses import dataclass

from train.tools.records import encode


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
    nat_dollars: float = 0.0  # of the job's NAT gateway and its address

    @property
    def dollars(self) -> float:
        """All known dollars."""
        return sum(machine.total_dollars for machine in self.machines) + self.shared_address_dollars + self.nat_dollars

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
            "hours": sum(machine.seconds for machine in self.machines) / 3600,
            "unknown": self.unknown,
            "running": self.running,
        }
