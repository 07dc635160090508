"""What would be rented for a launch, worked out by looking only: types, zones in order, prices, limits.

With `offline` from the shipped table alone: a dry run asks nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.errors import BadInput, ClusterError
from cluster.state.spec import JobSpec
from infra.aws.client import Account, get_public_address
from infra.aws.instances import amis, preflight
from infra.aws.instances.request import InstanceRequest, Place, build_run_instances
from infra.aws.instances.user_data import build_user_data
from infra.aws.market import instance_types, offers
from infra.aws.stack import security_group, stack
from infra.aws.stack.stack import Stack
from train.forecast import Forecast, forecast
from train.recipe.schedule import Schedule

from .errors import aws_errors_as_cluster_errors
from .rental_spec import MARKETS, METADATA_URL, RentalSpec, sort_places

DEFAULT_MAX_HOURS = 2.0
OFFLINE_REGION = "us-east-1"


@dataclass(frozen=True)
class RentalPlan:
    """What the user says yes to. `kind` is the first place's; `minutes` None where nobody can forecast it."""

    rental_spec: RentalSpec
    instance_type: instance_types.InstanceType
    notes: tuple[str, ...]
    missing_stack_parts: tuple[str, ...]
    forecast: Forecast | None
    max_hours: float
    poweroff_grace: float

    def summary(self, spec: JobSpec) -> dict[str, Any]:
        """Return the plan as plain data: machines, type, market, zones, prices, limits, what is made."""
        place, machines = self.rental_spec.places[0], len(spec.machine_names)
        rate = None if place.price is None else machines * place.price
        minutes = None if self.forecast is None else self.forecast.total_minutes
        same = [one for one in self.rental_spec.places if (one.type, one.market) == (place.type, place.market)]
        return {
            "machines": machines, "type": place.type, "market": place.market, "region": place.region,
            "gpus": f"{self.instance_type.gpus} x {self.instance_type.gpu}" if self.instance_type.gpus else "none",
            "zones": list(dict.fromkeys(one.zone for one in same)),
            "then": list(dict.fromkeys(f"{one.type} {one.market} in {one.region}" for one in self.rental_spec.places))[1:],
            "dollars_per_hour": rate, "minutes": minutes,
            "dollars": None if rate is None or minutes is None else rate * minutes / 60,
            "max_hours": self.max_hours, "late": self.poweroff_grace, "max_dollars": self.max_dollars(machines),
            "ssh_from": self.rental_spec.ssh_address,
            "makes": list(self.missing_stack_parts),
        }  # fmt: skip

    def max_dollars(self, machine_count: int) -> float | None:
        """Return the dollars that the limits allow at most, wherever the machines come; None: a price is not known."""
        if self.rental_spec.max_dollars is not None:
            return self.rental_spec.max_dollars
        rates = [self.rental_spec.dollars_per_hour(machine_count, one) for one in self.rental_spec.places]
        known = [one for one in rates if one is not None]
        return max(known) * (self.max_hours + self.poweroff_grace / 3600) if len(known) == len(rates) else None


@dataclass(frozen=True, kw_only=True)
class RentalOptions:
    """The options of a launch that are about renting."""

    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    type: str | None = None
    market: str = "spot"
    max_dollars: float | None = None
    ami: str | None = None
    use_placement_group: bool = True
    ssh_address: str | None = None
    offline: bool = False

    @cached_property
    def account(self) -> Account | None:
        """The account in the first region, None offline. Raises `CloudError`."""
        return None if self.offline else Account(self.regions[0] if self.regions else None)


def choose_instance_types(
    preferred_types: Sequence[str], options: RentalOptions
) -> tuple[list[str], list[str], instance_types.InstanceType]:
    """Return the types to ask for in order, the lines about those that are gone, and what the first is.

    Types with another number of GPUs are left out: the schedule is made for one. Raises `ClusterError`.
    """
    with aws_errors_as_cluster_errors():
        for region in options.regions:
            preflight.check_region(region)
        account = options.account
        names, notes = offers.choose_types(account, preferred_types, options.type, offline=options.offline)
        found = offers.list_instance_types(account, names, offline=options.offline)
    if not found:
        raise ClusterError(f"none of {', '.join(names)} is known; see imgnet-cluster offers")
    first = found[names[0]]
    alike = [one for one in names if one in found and found[one].gpus == first.gpus]
    others = [one for one in names if one not in alike]
    notes += [f"{', '.join(others)}: another number of GPUs than {first.name}; not asked for"] if others else []
    return alike, notes, first


def plan_rental(
    spec: JobSpec,
    schedule: Schedule,
    types: Sequence[str],
    notes: Sequence[str],
    instance_type: instance_types.InstanceType,
    options: RentalOptions,
) -> RentalPlan:
    """Work out where and at what price; asks AWS, changes nothing. Raises `ClusterError`."""
    if options.market not in MARKETS:
        raise BadInput(f"{options.market!r} is no market; there are {', '.join(MARKETS)}")
    with aws_errors_as_cluster_errors():
        account = options.account
        regions = options.regions or ((account.region if account else OFFLINE_REGION),)
        places: list[Place] = []
        missing: list[str] = []
        for region in regions:
            here = None if account is None else account.in_region(region)
            places += _candidate_places(here, region, types, MARKETS[options.market], options.zones)
            missing += [] if here is None else [f"{region}: {one}" for one in stack.missing_parts(here)]
        if not places:
            where = ", ".join(options.zones or regions)
            raise ClusterError(f"{', '.join(types)}: not offered in {where}; see imgnet-cluster offers")
        if account:  # an image that is not there, or drives no such cards, is better known now
            amis.resolve_image(account.in_region(places[0].region), instance_type.gpu_arch, options.ami)
        address = options.ssh_address and security_group.parse_single_address(options.ssh_address)
        address = address or ("this computer's address" if options.offline else get_public_address())
        owner, number = ("offline", "") if account is None else (account.owner, account.identity[0])
    places = sort_places(places, regions, types, MARKETS[options.market])
    if options.max_dollars is not None:
        unknown = list(dict.fromkeys(f"{one.type} {one.market}" for one in places if one.price is None))
        places = [one for one in places if one.price is not None]
        if not places:
            raise ClusterError(
                f"--max-price-total: the price of {', '.join(unknown)} is unknown, nobody can keep to it; "
                "limit the time: --max-hours"
            )
        notes = [*notes, *(f"{one}: unknown price, not asked for with --max-price-total" for one in unknown)]
    wish = RentalSpec(
        places=tuple(places), ssh_address=address, is_address_fixed=bool(options.ssh_address), owner=owner, account_id=number,
        max_dollars=options.max_dollars,
        ami=options.ami, use_placement_group=options.use_placement_group and len(spec.machine_names) > 1, gpus_per_machine=instance_type.gpus,
        torch_index_url=amis.get_torch_index_url(instance_type.gpu_arch),
    )  # fmt: skip
    guess = forecast(
        schedule,
        gpus=spec.procs,
        gpu=instance_type.gpu,
        gbit=instance_type.network_gbps,
        machines=spec.machines,
        vcpus=instance_type.vcpus,
    )
    if options.offline and (price := instance_types.ON_DEMAND_PRICES.get(instance_type.name)):
        total = price * len(spec.machine_names)
        notes = [
            *notes,
            f"nobody was asked: on demand these machines were ${total:,.2f} an hour in July 2026 (us-east-1)",
        ]
    hours, late = wish.compute_limits(len(spec.machine_names), places[0], spec.max_hours)
    if guess and hours < guess.total_minutes / 60:
        notes = [*notes, f"the limit ends it after {60 * hours:.3g} minutes; the forecast is {guess.total_minutes:.3g}"]
    return RentalPlan(wish, instance_type, tuple(notes), tuple(missing), guess, hours, late)


def _candidate_places(
    account: Account | None, region: str, types: Sequence[str], markets: Sequence[str], zones: Sequence[str]
) -> list[Place]:
    if account is None:
        table = {one.type: one for one in offers.list_offers(None, names=types, offline=True)}
        return [
            Place(region=region, zone=zones[0] if zones else f"a zone of {region}", type=name, market=market,
                  price=table[name].on_demand_price if market == "on-demand" else None)
            for name in types for market in markets if name in table
        ]  # fmt: skip
    found = []
    for one in offers.list_offers(account, names=types):
        if zones and one.zone not in zones:
            continue
        for market in markets:
            price = one.spot_price if market == "spot" else one.on_demand_price
            found.append(Place(region=region, zone=one.zone, type=one.type, market=market, price=price))
    return found


def preview_requests(spec: JobSpec, rental_plan: RentalPlan) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that a launch would make to rent the machines, with words for what does not exist yet."""
    place = rental_plan.rental_spec.places[0]
    own = Stack(
        region=place.region, vpc="vpc-of-the-stack", subnets={place.zone: f"subnet-of-{place.zone}".replace(" ", "-")},
        security_group="sg-of-the-stack", file_system="fs-of-the-stack", access_point="fsap-of-the-stack",
        key_name="imgnet-key", key_file="", instance_profile="imgnet-machine", bucket=None,
    )  # fmt: skip
    image = amis.Image("ami-of-the-parameter", "ubuntu", 22, 0, "/dev/sda1", "", "")
    seconds = round(3600 * rental_plan.max_hours + rental_plan.poweroff_grace)
    data = build_user_data(
        poweroff_seconds=seconds, private_key="(made for this asking)", public_key="(its public half)", file_system=own.file_system,
        access_point=own.access_point, region=place.region, ssh_user=image.ssh_user, python=image.python,
    )  # fmt: skip
    want = InstanceRequest(
        job_uid=spec.uid or "job-N-xxxxxxxx", job_name=spec.name or "job-N", owner=rental_plan.rental_spec.owner, expires=0.0, image=image,
        stack=own, user_data=data, host_key="", use_placement_group=rental_plan.rental_spec.use_placement_group,
    )  # fmt: skip
    run = build_run_instances(want, rental_plan.instance_type, place, spec.machine_names, 1)
    group = run.get("Placement", {}).get("GroupName")
    before = [("ec2:CreatePlacementGroup", {"GroupName": group, "Strategy": "cluster"})] if group else []
    return [*before, ("ec2:RunInstances", run)]


def with_rental(spec: JobSpec, rental_plan: RentalPlan) -> JobSpec:
    """Return the spec with what is to be rented, and machines that have no addresses yet."""
    return replace(
        spec, cloud=rental_plan.rental_spec.to_json(), hosts={"shared": None, "machines": []}, metadata_address=METADATA_URL,
        forecast=rental_plan.forecast.to_json() if rental_plan.forecast else None,
    )  # fmt: skip


def data_root(path: Path) -> Path:
    """Return where images are on rented machines: a relative folder is one of the shared file system."""
    return path if path.is_absolute() or path.parts[:1] == ("~",) else Path("~/.imgnet/shared") / path
