"""What a job may rent: as the user confirmed it at launch, in job.json; and as the tag of its instances says."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from cluster.errors import BadInput, ClusterError
from cluster.state.spec import RentalFacts
from infra.aws import prices
from infra.aws.instances.amis import ROOT_DISK_GB, Image
from infra.aws.launch_request import Internet, Place
from infra.aws.market.billing import MIN_BILLED_SECONDS
from infra.aws.market.instance_types import InstanceType
from infra.aws.stack.stack import Stack
from infra.costs import TrafficForecast
from train.tools.host import unix_time
from train.tools.records import decode, decode_json, encode

MARKETS = {"spot": ("spot",), "on-demand": ("on-demand",), "spot-then-on-demand": ("spot", "on-demand")}
# From the time limit until the machine powers off: for the last checkpoint and its download.
POWEROFF_GRACE_SECONDS = 900
SHORT_GRACE_SHARE = 0.25  # of the time until power-off, where that is too short for the grace above
MAX_HOURS_WITHOUT_LIMIT = 48.0
INSPECTION_SECONDS = 600.0  # for which the supervisor believes what the plan has found on AWS
METADATA_URL = "http://169.254.169.254"  # EC2's instance metadata service, on every machine


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the plan has found on AWS in its first region, so that the supervisor need not ask again.

    `stack` is None when parts are missing. `image` is that for GPUs of `gpu_arch`.
    """

    time: float
    region: str
    stack: Stack | None
    types: dict[str, InstanceType]
    gpu_arch: str
    image: Image


@dataclass(frozen=True, kw_only=True)
class RentalSpec(RentalFacts):
    """The machines that a job rents."""

    places: tuple[Place, ...]  # tried in this order
    on_demand_spares: int = 0  # the last machines, which are bought on demand; 0: spares are bought as all others
    spare_places: tuple[Place, ...] = ()  # where they are rented: one beside each of `places`
    late_spares: int = 0  # the last machines, which are rented once another is at risk
    ssh_address: str  # CIDR range that may connect over ssh
    owner: str  # who pays: the value of the owner tag
    user_tags: dict[str, str] = field(default_factory=dict)  # of everything that is created, beside our own
    ami: str | None = None
    internet: Internet = Internet.PUBLIC  # NAT also when EC2 refuses the public addresses in a network of ours
    network_ids: tuple[str, ...] = ()  # of the user's network and its subnets, () for the stack's own
    asked: tuple[str, ...] = ()  # the zones, network, subnets and reservation that the user has named
    use_placement_group: bool = True
    # The AWS account of the machines. Credentials of another account would find none of them, and the supervisor
    # would take them for terminated.
    account_id: str = ""
    is_address_fixed: bool = False  # the user set the address (--from); else it follows the supervisor's computer
    traffic: TrafficForecast = field(default_factory=TrafficForecast)  # as it was planned
    inspection: Inspection | None = None

    @property
    def fresh_inspection(self) -> Inspection | None:
        """What the plan has found, None when that was long ago."""
        seen = self.inspection
        return seen if seen and abs(unix_time() - seen.time) < INSPECTION_SECONDS else None

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

    def at(self, places: Sequence[Place]) -> Self:
        """Return the rental at some of its places only."""
        beside = {(place.zone, place.type) for place in places}
        spare_places = tuple(spare for spare in self.spare_places if (spare.zone, spare.type) in beside)
        return replace(self, places=tuple(places), spare_places=spare_places)

    def split_spares(self, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the machines that are rented by one request, and the spares that are rented otherwise or later."""
        count = len(names) - max(self.on_demand_spares, self.late_spares)
        return tuple(names[:count]), tuple(names[count:])

    @property
    def disk_gb(self) -> int:
        """The gigabytes of a machine's disks."""
        return sum(self.inspection.image.machine_disks.values()) if self.inspection else ROOT_DISK_GB

    def spare_place(self, place: Place) -> Place:
        """Return where a spare of the machines at a place is rented: in the same zone, on demand if spares are."""
        beside = (spare for spare in self.spare_places if (spare.zone, spare.type) == (place.zone, place.type))
        return next(beside, place)

    def machine_dollars_per_hour(self, machine_count: int, place: Place) -> float | None:
        """Return the price of `machine_count` machines, spares included, without disks; None when it is unknown."""
        spare_price = self.spare_place(place).price
        if place.price is None or spare_price is None:
            return None
        return (machine_count - self.on_demand_spares) * place.price + self.on_demand_spares * spare_price

    def dollars_per_hour(self, machine_count: int, place: Place) -> float | None:
        """Return the price of `machine_count` machines with disks, internet and traffic; None when it is unknown."""
        machine_dollars = self.machine_dollars_per_hour(machine_count, place)
        if machine_dollars is None:
            return None
        return machine_dollars + self.other_dollars_per_hour(machine_count)

    def other_dollars_per_hour(self, machine_count: int) -> float:
        """Return the price of the disks of `machine_count` machines, their way to the internet, and the traffic."""
        disk_dollars = machine_count * self.disk_gb * prices.DISK_PER_GB_HOUR
        return disk_dollars + internet_dollars(self.internet, machine_count) + self.traffic.dollars_per_hour

    def compute_limits(
        self, machine_count: int, place: Place, max_hours: float | None, spent_dollars: float = 0.0
    ) -> tuple[float, float]:
        """Return the time limit in hours and the grace period in seconds of machines at a place.

        `spent_dollars` is what earlier launches of the job have cost.
        """
        rate = self.dollars_per_hour(machine_count, place)
        seconds = place.closing_time - unix_time() if place.closing_time is not None else math.inf
        spent_dollars += self.traffic.dollars_once
        return compute_limits(max_hours, self.max_dollars, rate, spent_dollars, seconds_until_closing=seconds)

    def ceiling_dollars(
        self, machine_count: int, max_hours: float | None, spent_dollars: float, on_demand_places: Sequence[Place]
    ) -> float | None:
        """Return the highest cost from now on if spot prices rise to those on demand: EC2 charges no more.

        The limits follow from the prices of the places, whatever spot machines cost later, and so do not prevent it.
        None: a price is unknown, or nothing is rented as spot machines.
        """
        if all(place.market != "spot" for place in self.places):
            return None
        on_demand_prices = {(place.zone, place.type): place.price for place in on_demand_places}
        highest = 0.0
        for place in self.places:
            hours, grace_seconds = self.compute_limits(machine_count, place, max_hours, spent_dollars)
            price = on_demand_prices.get((place.zone, place.type)) if place.market == "spot" else place.price
            rate = self.dollars_per_hour(machine_count, replace(place, price=price))
            if rate is None:
                return None
            highest = max(highest, rate * (hours + grace_seconds / 3600))
        return highest + self.traffic.dollars_once

    def highest_dollars(self, machine_count: int, hours: float, spent_dollars: float) -> float | None:
        """Return the highest cost from now on: of `hours` at the dearest place, or the limit; None: unknown."""
        limit = None if self.max_dollars is None else self.max_dollars - spent_dollars
        rates = [self.dollars_per_hour(machine_count, place) for place in self.places]
        known_rates = [rate for rate in rates if rate is not None]
        if len(known_rates) < len(rates):
            return limit
        bound = max(known_rates) * hours + self.traffic.dollars_once
        return bound if limit is None else min(bound, limit)


@dataclass(frozen=True, kw_only=True)
class RentalTerms:
    """What a job may rent and spend, as a tag of its instances. A computer that adopts the job obeys these terms.

    They are not read from the job's description in the shared folder, which each of the job's machines can change;
    only the account can write tags. Times are in seconds since 1970.

    `exchanges` is the number of machines of this launch that may still be exchanged. `spent` is the job's cost in
    dollars until the time `at`. `start` is when the first machine of this launch was granted, None in the request for
    it.
    """

    machines: int
    spares: int
    exchanges: int
    hours: float | None
    dollars: float | None
    spent: float
    at: float
    start: float | None
    internet: Internet
    on_demand_spares: int = 0
    late_spares: int = 0
    traffic: tuple[float, float] = (0.0, 0.0)  # expected dollars: once, and per hour

    def to_tag(self) -> str:
        """Return the tag's value, which has at most 256 characters (AWS, "Tag restrictions")."""
        return json.dumps(encode(self), separators=(",", ":"))

    @classmethod
    def from_tag(cls, text: str) -> Self:
        """Return the terms of a tag's value. Raises `DamagedRecord`."""
        return decode_json(cls, text.encode(), "the tag imgnet:terms")

    @property
    def expected_traffic(self) -> TrafficForecast:
        """What the traffic of a launch is expected to cost."""
        dollars_once, dollars_per_hour = self.traffic
        return TrafficForecast(dollars_once=dollars_once, dollars_per_hour=dollars_per_hour)


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


def internet_dollars(internet: Internet, machine_count: int) -> float:
    """Return the dollars an hour of the machines' way to the internet, without traffic; one can always log in."""
    match internet:
        case Internet.PUBLIC:
            return machine_count * prices.ADDRESS_PER_HOUR
        case Internet.NAT:
            return prices.NAT_PER_HOUR + 2 * prices.ADDRESS_PER_HOUR  # its own address, and that for ssh
        case Internet.PRIVATE:
            return 0.0
        case Internet.NONE:
            return prices.ADDRESS_PER_HOUR


def sort_places(
    places: Sequence[Place],
    regions: Sequence[str],
    types: Sequence[str],
    markets: Sequence[str],
    spot_scores: Mapping[str, int],
) -> list[Place]:
    """Sort places by region, type and market, each in the given order, then by score and price.

    `spot_scores` are EC2's, by zone. An unknown score or price comes last.
    """

    def sort_key(place: Place) -> tuple[int, int, int, int, float, str]:
        score = spot_scores.get(place.zone, 0) if place.market == "spot" else 0
        order = regions.index(place.region), types.index(place.type), markets.index(place.market)
        return *order, -score, place.price if place.price is not None else float("inf"), place.zone

    return sorted(places, key=sort_key)


def drop_unpriced_places(rental_spec: RentalSpec, machine_count: int) -> tuple[RentalSpec, list[str]]:
    """Return the rental without places of unknown price, and their types and markets. Raises `ClusterError`."""
    priced = [
        place for place in rental_spec.places if rental_spec.machine_dollars_per_hour(machine_count, place) is not None
    ]
    unpriced = dict.fromkeys(
        f"{place.type} {'on-demand' if place.price is not None else place.market}"
        for place in rental_spec.places
        if place not in priced
    )
    if not priced:
        raise ClusterError(
            f"--max-price-total: the price of {', '.join(unpriced)} is unknown, so it cannot be limited; "
            "limit the time instead: --max-hours"
        )
    return rental_spec.at(priced), list(unpriced)


def check_hours(max_hours: float | None, start_seconds: float) -> None:
    """Raise `BadInput` for a time limit that boot and set-up alone would reach; they take `start_seconds`."""
    if max_hours is not None and 3600 * max_hours < start_seconds:
        raise BadInput(
            f"--max-hours {max_hours:g}: boot and set-up take about {start_seconds:.0f} s, so nothing would be "
            f"trained; the smallest limit that makes sense: --max-hours {_round_up(start_seconds / 3600)}"
        )


def drop_dear_places(
    rental_spec: RentalSpec,
    machine_count: int,
    traffic_by_type: Mapping[str, TrafficForecast],
    spent_dollars: float,
    start_seconds: float,
) -> tuple[RentalSpec, list[str]]:
    """Return the rental without the places that are too dear for its limit in dollars, and their names.

    Those would be ended before they train, or cost more than the limit by what EC2 bills at least. `start_seconds` are
    those of boot and set-up. Raises `BadInput` when no place is left.
    """
    max_dollars = rental_spec.max_dollars
    if max_dollars is None or max_dollars <= spent_dollars:
        return rental_spec, []
    seconds = max(MIN_BILLED_SECONDS, start_seconds / (1 - SHORT_GRACE_SHARE))

    def least_dollars(place: Place) -> float:
        at_place = replace(rental_spec, traffic=traffic_by_type[place.type])
        rate = at_place.dollars_per_hour(machine_count, place) or 0.0
        return spent_dollars + at_place.traffic.dollars_once + rate * seconds / 3600

    affordable = [place for place in rental_spec.places if least_dollars(place) <= max_dollars]
    if not affordable:
        least = min(map(least_dollars, rental_spec.places))
        raise BadInput(
            f"--max-price-total {max_dollars:g}: the machines need {seconds:.0f} s to boot, be set up and save, which "
            f"costs ${least - spent_dollars:.2f}, so nothing would be trained; the smallest limit that makes sense: "
            f"--max-price-total {_round_up(least)}"
        )
    too_dear = [place for place in rental_spec.places if place not in affordable]
    left_out = dict.fromkeys(f"{place.type} {place.market} in {place.zone}" for place in too_dear)
    return rental_spec.at(affordable), list(left_out)


def _round_up(value: float) -> str:
    """Return a number with two digits after the point, rounded up."""
    return f"{math.ceil(100 * value) / 100:.2f}"
