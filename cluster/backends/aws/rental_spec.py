"""Rental specification: what the user confirmed at launch, stored in job.json for the supervisor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cluster.backends.rented.provider import compute_limits
from cluster.state.spec import RentalFacts
from infra.aws.instances.request import DISK_GB
from infra.aws.launch_request import Internet, Place
from infra.aws.market.billing import ADDRESS_DOLLARS_PER_HOUR, DISK_DOLLARS_PER_GB_HOUR, NAT_DOLLARS_PER_HOUR
from train.tools.records import decode, encode

MARKETS = {"spot": ("spot",), "on-demand": ("on-demand",), "spot-then-on-demand": ("spot", "on-demand")}
DISK_DOLLARS_PER_HOUR = DISK_GB * DISK_DOLLARS_PER_GB_HOUR  # of one machine
METADATA_URL = "http://169.254.169.254"  # EC2's instance metadata service, on every machine


@dataclass(frozen=True, kw_only=True)
class RentalSpec(RentalFacts):
    """The machines that a job rents."""

    places: tuple[Place, ...]  # tried in this order
    ssh_address: str  # CIDR range that may connect over ssh
    owner: str  # who pays: the value of the owner tag
    max_dollars: float | None = None  # for all machines of the job together; None: only time limits the job
    ami: str | None = None
    internet: Internet = Internet.PUBLIC  # NAT also when EC2 refuses the public addresses
    use_placement_group: bool = True
    # The AWS account of the machines. Credentials of another account would find none of them, and the supervisor
    # would take them for terminated.
    account_id: str = ""
    is_address_fixed: bool = False  # the user set the address (--from); else it follows the supervisor's computer

    @property
    def region(self) -> str:
        """The region that is tried first."""
        return self.places[0].region

    def to_json(self) -> dict[str, object]:
        """Return plain data from which `from_json` makes an equal specification."""
        return dict(encode(self))

    @classmethod
    def from_json(cls, value: Mapping[str, object] | None) -> Self:
        """Make the specification that `to_json` described. Raises `DamagedRecord`."""
        return decode(cls, value or {}, "the rental specification in job.json")

    def dollars_per_hour(self, machine_count: int, place: Place) -> float | None:
        """Return the price of `machine_count` machines with disks and internet; None when it is unknown."""
        if place.price is None:
            return None
        return machine_count * (place.price + DISK_DOLLARS_PER_HOUR) + internet_dollars(self.internet, machine_count)

    def compute_limits(self, machine_count: int, place: Place, max_hours: float | None) -> tuple[float, float]:
        """Return the time limit in hours and the grace period in seconds of machines at a place."""
        rate = self.dollars_per_hour(machine_count, place)
        return compute_limits(max_hours, self.max_dollars, rate)


def internet_dollars(internet: Internet, machine_count: int) -> float:
    """Return the dollars an hour of the machines' way to the internet, without traffic; one can always log in."""
    match internet:
        case Internet.PUBLIC:
            return machine_count * ADDRESS_DOLLARS_PER_HOUR
        case Internet.NAT:
            return NAT_DOLLARS_PER_HOUR + ADDRESS_DOLLARS_PER_HOUR
        case Internet.NONE:
            return ADDRESS_DOLLARS_PER_HOUR


def sort_places(
    places: Sequence[Place], regions: Sequence[str], types: Sequence[str], markets: Sequence[str]
) -> list[Place]:
    """Sort places by region, type and market, each in the given order, then by price. Unknown prices come last."""

    def sort_key(place: Place) -> tuple[int, int, int, float, str]:
        price = place.price if place.price is not None else float("inf")
        return regions.index(place.region), types.index(place.type), markets.index(place.market), price, place.zone

    return sorted(places, key=sort_key)
