"""What a job wants of AWS, as its job.json keeps it: what the user saw and said yes to, for whoever carries it out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from infra.aws.instances.request import DISK_GB, Place
from infra.aws.market.billing import ADDRESS_HOUR, DISK_GB_HOUR

MARKETS = {"spot": ("spot",), "on-demand": ("on-demand",), "spot-then-on-demand": ("spot", "on-demand")}
BESIDE = DISK_GB * DISK_GB_HOUR + ADDRESS_HOUR  # dollars an hour of a machine's disk and address
GRACE = 900  # seconds beyond the limit until the power goes: for the last save, and for bringing it home
METADATA = "http://169.254.169.254"  # of EC2's metadata service, on every machine


@dataclass(frozen=True, kw_only=True)
class Wish:
    """`places` in the order in which they are asked; `address` is whom ssh is open to; `owner` who pays.

    `max_dollars` is the limit for all of the job's machines together, None: only time limits it.
    """

    places: tuple[Place, ...]
    address: str
    owner: str
    max_dollars: float | None = None
    ami: str | None = None
    group: bool = True
    account: str = ""  # whose machines they are: other credentials would find none, and take that for their end
    gpus: int = 0  # of each machine: fewer is a fault, not a smaller machine
    fixed: bool = False  # the address was said (--from), and is not that of the computer that looks after the job
    index: str | None = None  # where pip finds a torch for cards that the usual one has left behind

    @property
    def region(self) -> str:
        """Where it begins."""
        return self.places[0].region

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `of` makes an equal Wish."""
        return asdict(self)

    @classmethod
    def of(cls, value: dict[str, Any] | None) -> Self:
        """Return what `to_json` described."""
        value = value or {}
        return cls(**{**value, "places": tuple(Place(**one) for one in value["places"])})

    def rate(self, machines: int, place: Place) -> float | None:
        """Return the dollars an hour of so many machines there, with their disks and addresses; None: unknown."""
        return None if place.price is None else machines * (place.price + BESIDE)

    def limits(self, machines: int, place: Place, hours: float | None, spent: float = 0.0) -> tuple[float, float]:
        """Return the hours after which the job saves and ends, and the seconds after that until the power goes.

        `hours` is the limit of time, None: two days. Both together keep to what is left of the limit of dollars, of
        which `spent` was gone when the machines came.
        """
        hours, late, rate = 48.0 if hours is None else hours, float(GRACE), self.rate(machines, place)
        if self.max_dollars is not None and rate:
            total = 3600 * max(0.0, self.max_dollars - spent) / rate
            if total < 3600 * hours + late:
                late = min(late, max(total / 4, total - 3600 * hours))
                hours = min(hours, (total - late) / 3600)
        return hours, late


def order(places: Sequence[Place], regions: Sequence[str], types: Sequence[str], markets: Sequence[str]) -> list[Place]:
    """Sort places: regions as asked, then types, then markets, then zones by price; unknown prices last."""

    def rank(one: Place) -> tuple[int, int, int, float, str]:
        price = one.price if one.price is not None else float("inf")
        return regions.index(one.region), types.index(one.type), markets.index(one.market), price, one.zone

    return sorted(places, key=rank)
