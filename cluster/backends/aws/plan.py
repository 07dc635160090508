"""What would be rented for a launch, worked out by looking only: types, zones in order, prices, limits.

With `offline` from the shipped table alone: a dry run asks nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.errors import BadInput, ClusterError
from cluster.state.spec import Spec
from infra.aws.client import Account, my_address
from infra.aws.instances import amis, preflight
from infra.aws.instances.request import Place, Want, run_request
from infra.aws.instances.user_data import user_data
from infra.aws.market import instance_types, offers
from infra.aws.stack import security_group, stack
from infra.aws.stack.stack import Stack
from train.forecast import Forecast, forecast
from train.recipe.schedule import Schedule

from .errors import lines
from .rental_spec import MARKETS, METADATA, Wish, order

MAX_HOURS = 2.0
OFFLINE_REGION = "us-east-1"


@dataclass(frozen=True)
class Renting:
    """What the user says yes to. `kind` is the first place's; `minutes` None where nobody can forecast it."""

    wish: Wish
    kind: instance_types.Kind
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    forecast: Forecast | None
    hours: float
    late: float

    def table(self, spec: Spec) -> dict[str, Any]:
        """Return the plan as plain data: machines, type, market, zones, prices, limits, what is made."""
        place, machines = self.wish.places[0], len(spec.names)
        rate = None if place.price is None else machines * place.price
        minutes = None if self.forecast is None else self.forecast.minutes
        same = [one for one in self.wish.places if (one.type, one.market) == (place.type, place.market)]
        return {
            "machines": machines, "type": place.type, "market": place.market, "region": place.region,
            "gpus": f"{self.kind.gpus} x {self.kind.gpu}" if self.kind.gpus else "none",
            "zones": list(dict.fromkeys(one.zone for one in same)),
            "then": list(dict.fromkeys(f"{one.type} {one.market} in {one.region}" for one in self.wish.places))[1:],
            "dollars_per_hour": rate, "minutes": minutes,
            "dollars": None if rate is None or minutes is None else rate * minutes / 60,
            "max_hours": self.hours, "late": self.late, "max_dollars": self.most(machines),
            "ssh_from": self.wish.address,
            "makes": list(self.missing),
        }  # fmt: skip

    def most(self, machines: int) -> float | None:
        """Return the dollars that the limits allow at most, wherever the machines come; None: a price is not known."""
        if self.wish.max_dollars is not None:
            return self.wish.max_dollars
        rates = [self.wish.rate(machines, one) for one in self.wish.places]
        known = [one for one in rates if one is not None]
        return max(known) * (self.hours + self.late / 3600) if len(known) == len(rates) else None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a launch that are about renting."""

    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    type: str | None = None
    market: str = "spot"
    max_dollars: float | None = None
    ami: str | None = None
    group: bool = True
    address: str | None = None
    offline: bool = False

    @cached_property
    def account(self) -> Account | None:
        """The account in the first region, None offline. Raises `CloudError`."""
        return None if self.offline else Account(self.regions[0] if self.regions else None)


def first_type(types: Sequence[str], asked: Asked) -> tuple[list[str], list[str], instance_types.Kind]:
    """Return the types to ask for in order, the lines about those that are gone, and what the first is.

    Types with another number of GPUs are left out: the schedule is made for one. Raises `ClusterError`.
    """
    with lines():
        for region in asked.regions:
            preflight.known_region(region)
        account = asked.account
        names, notes = offers.settle(account, types, asked.type, offline=asked.offline)
        found = offers.kinds(account, names, offline=asked.offline)
    if not found:
        raise ClusterError(f"none of {', '.join(names)} is known; see imgnet-cluster offers")
    first = found[names[0]]
    alike = [one for one in names if one in found and found[one].gpus == first.gpus]
    others = [one for one in names if one not in alike]
    notes += [f"{', '.join(others)}: another number of GPUs than {first.name}; not asked for"] if others else []
    return alike, notes, first


def rent(
    spec: Spec, schedule: Schedule, types: Sequence[str], notes: Sequence[str], kind: instance_types.Kind, asked: Asked
) -> Renting:
    """Work out where and at what price; asks AWS, changes nothing. Raises `ClusterError`."""
    if asked.market not in MARKETS:
        raise BadInput(f"{asked.market!r} is no market; there are {', '.join(MARKETS)}")
    with lines():
        account = asked.account
        regions = asked.regions or ((account.region if account else OFFLINE_REGION),)
        places: list[Place] = []
        missing: list[str] = []
        for region in regions:
            here = None if account is None else account.at(region)
            places += _places(here, region, types, MARKETS[asked.market], asked.zones)
            missing += [] if here is None else [f"{region}: {one}" for one in stack.missing(here)]
        if not places:
            where = ", ".join(asked.zones or regions)
            raise ClusterError(f"{', '.join(types)}: not offered in {where}; see imgnet-cluster offers")
        if account:  # an image that is not there, or drives no such cards, is better known now
            amis.resolve(account.at(places[0].region), kind.arch, asked.ami)
        address = asked.address and security_group.one_address(asked.address)
        address = address or ("this computer's address" if asked.offline else my_address())
        owner, number = ("offline", "") if account is None else (account.owner, account.identity[0])
    places = order(places, regions, types, MARKETS[asked.market])
    if asked.max_dollars is not None:
        unknown = list(dict.fromkeys(f"{one.type} {one.market}" for one in places if one.price is None))
        places = [one for one in places if one.price is not None]
        if not places:
            raise ClusterError(
                f"--max-price-total: the price of {', '.join(unknown)} is unknown, nobody can keep to it; "
                "limit the time: --max-hours"
            )
        notes = [*notes, *(f"{one}: unknown price, not asked for with --max-price-total" for one in unknown)]
    wish = Wish(
        places=tuple(places), address=address, fixed=bool(asked.address), owner=owner, account=number,
        max_dollars=asked.max_dollars,
        ami=asked.ami, group=asked.group and len(spec.names) > 1, gpus=kind.gpus,
        index=amis.torch_index(kind.arch),
    )  # fmt: skip
    guess = forecast(schedule, gpus=spec.procs, gpu=kind.gpu, gbit=kind.gbit, machines=spec.machines, vcpus=kind.vcpus)
    if asked.offline and (price := instance_types.ON_DEMAND.get(kind.name)):
        total = price * len(spec.names)
        notes = [
            *notes,
            f"nobody was asked: on demand these machines were ${total:,.2f} an hour in July 2026 (us-east-1)",
        ]
    hours, late = wish.limits(len(spec.names), places[0], spec.max_hours)
    if guess and hours < guess.minutes / 60:
        notes = [*notes, f"the limit ends it after {60 * hours:.3g} minutes; the forecast is {guess.minutes:.3g}"]
    return Renting(wish, kind, tuple(notes), tuple(missing), guess, hours, late)


def _places(
    account: Account | None, region: str, types: Sequence[str], markets: Sequence[str], zones: Sequence[str]
) -> list[Place]:
    if account is None:
        table = {one.type: one for one in offers.offers(None, names=types, offline=True)}
        return [
            Place(region=region, zone=zones[0] if zones else f"a zone of {region}", type=name, market=market,
                  price=table[name].on_demand if market == "on-demand" else None)
            for name in types for market in markets if name in table
        ]  # fmt: skip
    found = []
    for one in offers.offers(account, names=types):
        if zones and one.zone not in zones:
            continue
        for market in markets:
            price = one.spot if market == "spot" else one.on_demand
            found.append(Place(region=region, zone=one.zone, type=one.type, market=market, price=price))
    return found


def requests(spec: Spec, renting: Renting) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that a launch would make to rent the machines, with words for what does not exist yet."""
    place = renting.wish.places[0]
    own = Stack(
        region=place.region, vpc="vpc-of-the-stack", subnets={place.zone: f"subnet-of-{place.zone}".replace(" ", "-")},
        security_group="sg-of-the-stack", file_system="fs-of-the-stack", access_point="fsap-of-the-stack",
        key_name="imgnet-key", key_file="", profile="imgnet-machine", bucket=None,
    )  # fmt: skip
    image = amis.Image("ami-of-the-parameter", "ubuntu", 22, 0, "/dev/sda1", "", "")
    seconds = round(3600 * renting.hours + renting.late)
    data = user_data(
        seconds=seconds, private="(made for this asking)", public="(its public half)", file_system=own.file_system,
        access_point=own.access_point, region=place.region, user=image.user, python=image.python,
    )  # fmt: skip
    want = Want(
        uid=spec.uid or "job-N-xxxxxxxx", name=spec.name or "job-N", owner=renting.wish.owner, expires=0.0, image=image,
        stack=own, user_data=data, host_key="", group=renting.wish.group,
    )  # fmt: skip
    run = run_request(want, renting.kind, place, spec.names, 1)
    group = run.get("Placement", {}).get("GroupName")
    before = [("ec2:CreatePlacementGroup", {"GroupName": group, "Strategy": "cluster"})] if group else []
    return [*before, ("ec2:RunInstances", run)]


def with_wish(spec: Spec, renting: Renting) -> Spec:
    """Return the spec with what is to be rented, and machines that have no addresses yet."""
    return replace(
        spec, cloud=renting.wish.to_json(), hosts={"shared": None, "machines": []}, metadata=METADATA,
        forecast=renting.forecast.to_json() if renting.forecast else None,
    )  # fmt: skip


def data_root(given: Path) -> Path:
    """Return where images are on rented machines: a relative folder is one of the shared file system."""
    return given if given.is_absolute() or given.parts[:1] == ("~",) else Path("~/.imgnet/shared") / given
