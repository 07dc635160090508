"""What a job wants of AWS, as its job.json keeps it: what the user saw and said yes to, for whoever carries it out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from infra.aws.instances.request import DISK_GB, Place
from infra.aws.market.billing import ADDRESS_DOLLARS_PER_HOUR, DISK_DOLLARS_PER_GB_HOUR

MARKETS = {"spot": ("spot",), "on-demand": ("on-demand",), "spot-then-on-demand": ("spot", "on-demand")}
OVERHEAD_DOLLARS_PER_HOUR = (
    DISK_GB * DISK_DOLLARS_PER_GB_HOUR + ADDRESS_DOLLARS_PER_HOUR
)  # dollars an hour of a machine's disk and address
POWEROFF_GRACE_SECONDS = (
    900  # seconds beyond the limit until the power goes: for the last save, and for bringing it home
)
METADATA_URL = "http://169.254.169.254"  # of EC2's metadata service, on every machine


@dataclass(frozen=True, kw_only=True)
class RentalSpec:
    """`places` in the order in which they are asked; `address` is whom ssh is open to; `owner` who pays.

    `max_dollars` is the limit for all of the job's machines together, None: only time limits it.
    """

    places: tuple[Place, ...]
    ssh_address: str
    owner: str
    max_dollars: float | None = None
    ami: str | None = None
    use_placement_group: bool = True
    account_id: str = ""  # whose machines they are: other credentials would find none, and take that for their end
    gpus_per_machine: int = 0  # of each machine: fewer is a fault, not a smaller machine
    is_address_fixed: bool = (
        False  # the address was said (--from), and is not that of the computer that looks after the job
    )
    torch_index_url: str | None = None  # where pip finds a torch for cards that the usual one has left behind

    @property
    def region(self) -> str:
        """Where it begins."""
        return self.places[0].region

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `of` makes an equal Wish."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Self:
        """Return what `to_json` described."""
        value = value or {}
        return cls(**{**value, "places": tuple(Place(**one) for one in value["places"])})

    def dollars_per_hour(self, machine_count: int, place: Place) -> float | None:
        """Return the dollars an hour of so many machines there, with their disks and addresses; None: unknown."""
        return None if place.price is None else machine_count * (place.price + OVERHEAD_DOLLARS_PER_HOUR)

    def compute_limits(
        self, machine_count: int, place: Place, max_hours: float | None, spent_dollars: float = 0.0
    ) -> tuple[float, float]:
        """Return the hours after which the job saves and ends, and the seconds after that until the power goes.

        `hours` is the limit of time, None: two days. Both together keep to what is left of the limit of dollars, of
        which `spent` was gone when the machines came.
        """
        max_hours, late, rate = (
            48.0 if max_hours is None else max_hours,
            float(POWEROFF_GRACE_SECONDS),
            self.dollars_per_hour(machine_count, place),
        )
        if self.max_dollars is not None and rate:
            total = 3600 * max(0.0, self.max_dollars - spent_dollars) / rate
            if total < 3600 * max_hours + late:
                late = min(late, max(total / 4, total - 3600 * max_hours))
                max_hours = min(max_hours, (total - late) / 3600)
        return max_hours, late


def sort_places(
    places: Sequence[Place], regions: Sequence[str], types: Sequence[str], markets: Sequence[str]
) -> list[Place]:
    """Sort places: regions as asked, then types, then markets, then zones by price; unknown prices last."""

    def rank(one: Place) -> tuple[int, int, int, float, str]:
        price = one.price if one.price is not None else float("inf")
        return regions.index(one.region), types.index(one.type), markets.index(one.market), price, one.zone

    return sorted(places, key=rank)
