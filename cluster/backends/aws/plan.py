"""Plans the rental of a launch: instance types, places in order, prices and limits. Creates nothing.

With the `offline` option, all facts come from tables that ship with the program and AWS is not asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cluster.backends.planner import ElsewherePlanner, MachinePlan, MachineRequest, SourceAccess
from cluster.backends.rentals import RentalPlan, RentalSummary
from cluster.backends.rented.errors import cloud_errors_as_cluster_errors
from cluster.errors import ClusterError
from cluster.state.spec import JobSpec
from infra.aws.client import Account, get_public_address
from infra.aws.instances import amis, preflight
from infra.aws.instances.request import InstanceRequest, build_run_instances
from infra.aws.instances.user_data import build_user_data
from infra.aws.launch_request import Place
from infra.aws.market import instance_types, offers
from infra.aws.stack import security_group, stack
from infra.aws.stack.stack import Stack
from train.forecast import Forecast, forecast
from train.recipe.schedule import Schedule
from train.tools.records import encode

from .options import AwsOptions
from .rental_spec import MARKETS, METADATA_URL, RentalSpec, sort_places
from .s3_source import machine_role_problems

DEFAULT_MAX_HOURS = 2.0
OFFLINE_REGION = "us-east-1"


@dataclass(frozen=True)
class AwsRentalPlan(RentalPlan):
    """What a launch would rent. The user confirms it."""

    rental_spec: RentalSpec
    instance_type: instance_types.InstanceType  # of the first place
    notes: tuple[str, ...]
    missing_stack_parts: tuple[str, ...]  # AWS resources that the launch would create, with their region
    forecast: Forecast | None  # None: no constants are known for this model on this GPU
    max_hours: float
    poweroff_grace: float  # seconds from the time limit until the machines power off

    def summary(self, spec: JobSpec) -> RentalSummary:
        """Return what the user is shown: machines, type, market, zones, prices, limits, resources to create."""
        places = self.rental_spec.places
        first = places[0]
        machine_count = len(spec.machine_names)
        rate = None if first.price is None else machine_count * first.price
        minutes = None if self.forecast is None else self.forecast.total_minutes
        first_choice = [place for place in places if (place.type, place.market) == (first.type, first.market)]
        choices = dict.fromkeys(f"{place.type} {place.market} in {place.region}" for place in places)
        return RentalSummary(
            machines=machine_count,
            type=first.type,
            market=first.market,
            region=first.region,
            gpus=f"{self.instance_type.gpus} x {self.instance_type.gpu}" if self.instance_type.gpus else "none",
            zones=tuple(dict.fromkeys(place.zone for place in first_choice)),
            other_choices=tuple(choices)[1:],
            dollars_per_hour=rate,
            minutes=minutes,
            dollars=None if rate is None or minutes is None else rate * minutes / 60,
            max_hours=self.max_hours,
            poweroff_grace=self.poweroff_grace,
            max_dollars=self.max_dollars(machine_count),
            is_dollar_limit_set=self.rental_spec.max_dollars is not None,
            ssh_address=self.rental_spec.ssh_address,
            missing_stack_parts=self.missing_stack_parts,
        )

    def preview_requests(self, spec: JobSpec) -> list[tuple[str, Mapping[str, object]]]:
        """Return the AWS calls that a launch would make to rent the machines, as (action, arguments)."""
        return preview_requests(spec, self)

    def max_dollars(self, machine_count: int) -> float | None:
        """Return the highest possible cost in dollars, at the dearest place until power-off. None: unknown price."""
        if self.rental_spec.max_dollars is not None:
            return self.rental_spec.max_dollars
        rates = [self.rental_spec.dollars_per_hour(machine_count, place) for place in self.rental_spec.places]
        known_rates = [rate for rate in rates if rate is not None]
        if len(known_rates) < len(rates):
            return None
        return max(known_rates) * (self.max_hours + self.poweroff_grace / 3600)


@dataclass(frozen=True)
class RentalRequest:
    """What the user wants to rent. `offline`: all facts come from tables that ship with the program."""

    options: AwsOptions
    offline: bool = False

    @cached_property
    def account(self) -> Account | None:
        """The account in the first region, None offline. Raises `CloudError`."""
        return None if self.offline else Account(self.options.regions[0] if self.options.regions else None)


def choose_instance_types(
    preferred_types: Sequence[str], request: RentalRequest
) -> tuple[list[str], list[str], instance_types.InstanceType]:
    """Choose the instance types to request, in order of preference.

    All have as many GPUs as the first, because the schedule is made for one number of GPUs. Returns their names, notes
    on the types that are left out, and the first type. Raises `ClusterError`.
    """
    with cloud_errors_as_cluster_errors():
        for region in request.options.regions:
            preflight.check_region(region)
        account = request.account
        names, notes = offers.choose_types(account, preferred_types, request.options.type, offline=request.offline)
        known_types = offers.list_instance_types(account, names, offline=request.offline)
    if not known_types:
        raise ClusterError(f"none of {', '.join(names)} is known; to list all types: imgnet-cluster offers")
    first = known_types[names[0]]
    chosen_names = [name for name in names if name in known_types and known_types[name].gpus == first.gpus]
    other_names = [name for name in names if name not in chosen_names]
    if other_names:
        notes += [f"{', '.join(other_names)}: not requested, their number of GPUs differs from that of {first.name}"]
    return chosen_names, notes, first


def plan_rental(
    spec: JobSpec,
    schedule: Schedule,
    types: Sequence[str],
    notes: Sequence[str],
    instance_type: instance_types.InstanceType,
    request: RentalRequest,
) -> AwsRentalPlan:
    """Plan where to rent and at what price. Asks AWS unless offline, changes nothing. Raises `ClusterError`."""
    options = request.options
    machine_count = len(spec.machine_names)
    markets = MARKETS[options.market]
    with cloud_errors_as_cluster_errors():
        account = request.account
        regions = options.regions or ((account.region if account else OFFLINE_REGION),)
        places: list[Place] = []
        missing_parts: list[str] = []
        for region in regions:
            regional_account = None if account is None else account.in_region(region)
            places += _candidate_places(regional_account, region, types, markets, options.zones)
            if regional_account is not None:
                missing_parts += [f"{region}: {part}" for part in stack.missing_parts(regional_account)]
        if not places:
            searched = ", ".join(options.zones or regions)
            raise ClusterError(f"{', '.join(types)}: not offered in {searched}; to list what is: imgnet-cluster offers")
        if account:  # report now when the image does not exist or does not support the GPUs, not during the launch
            amis.resolve_image(account.in_region(places[0].region), instance_type.gpu_arch, options.ami)
        if options.ssh_address:
            ssh_address = security_group.parse_single_address(options.ssh_address)
        else:
            ssh_address = "this computer's address" if request.offline else get_public_address()
        owner, account_id = ("offline", "") if account is None else (account.owner, account.identity[0])
    places = sort_places(places, regions, types, markets)
    if options.max_dollars is not None:
        unpriced = list(dict.fromkeys(f"{place.type} {place.market}" for place in places if place.price is None))
        places = [place for place in places if place.price is not None]
        if not places:
            raise ClusterError(
                f"--max-price-total: the price of {', '.join(unpriced)} is unknown, so it cannot be limited; "
                "limit the time instead: --max-hours"
            )
        notes = [*notes, *(f"{choice}: unknown price, not requested with --max-price-total" for choice in unpriced)]
    rental_spec = RentalSpec(
        places=tuple(places),
        ssh_address=ssh_address,
        is_address_fixed=bool(options.ssh_address),
        owner=owner,
        account_id=account_id,
        max_dollars=options.max_dollars,
        ami=options.ami,
        use_placement_group=options.use_placement_group and machine_count > 1,
        gpus_per_machine=instance_type.gpus,
        torch_index_url=amis.get_torch_index_url(instance_type.gpu_arch),
    )
    run_forecast = forecast(
        schedule,
        gpus=spec.procs,
        gpu=instance_type.gpu,
        gbit=instance_type.network_gbps,
        machines=spec.machines,
        vcpus=instance_type.vcpus,
    )
    if request.offline and (price := instance_types.ON_DEMAND_PRICES.get(instance_type.name)):
        hourly_dollars = price * machine_count
        notes = [
            *notes,
            "AWS was not asked for prices: on demand, these machines cost "
            f"${hourly_dollars:,.2f} an hour in July 2026 (us-east-1)",
        ]
    if warning := network_card_warning(types, machine_count):
        notes = [*notes, warning]
    max_hours, grace_seconds = rental_spec.compute_limits(machine_count, places[0], spec.max_hours)
    if run_forecast and max_hours < run_forecast.total_minutes / 60:
        notes = [
            *notes,
            f"the limit ends the job after {60 * max_hours:.3g} minutes, "
            f"but the forecast is {run_forecast.total_minutes:.3g} minutes",
        ]
    return AwsRentalPlan(
        rental_spec, instance_type, tuple(notes), tuple(missing_parts), run_forecast, max_hours, grace_seconds
    )


def network_card_warning(types: Sequence[str], machine_count: int) -> str:
    """Return a warning when several machines of one of these types would have no way to the internet, else "".

    EC2 gives machines with several network cards no public address (docs/known-problems.md).
    """
    known_types = [found for name in types if (found := instance_types.find_builtin_type(name))]
    names = [known.name for known in known_types if min(known.efa_interfaces, known.network_cards) > 1]
    if machine_count < 2 or not names:
        return ""
    return (
        f"{', '.join(names)}: several of these machines are expected not to finish booting, because they have several "
        "network cards and then no public address; take 1 machine, or a type with one card (see docs/known-problems.md)"
    )


def _candidate_places(
    account: Account | None, region: str, types: Sequence[str], markets: Sequence[str], zones: Sequence[str]
) -> list[Place]:
    """Return all places of a region that offer one of the types. Offline, one place per type and market."""
    if account is None:
        builtin_offers = {offer.type: offer for offer in offers.list_offers(None, names=types, offline=True)}
        return [
            Place(
                region=region,
                zone=zones[0] if zones else f"a zone of {region}",
                type=name,
                market=market,
                price=builtin_offers[name].on_demand_price if market == "on-demand" else None,
            )
            for name in types
            for market in markets
            if name in builtin_offers
        ]
    places = []
    for offer in offers.list_offers(account, names=types):
        if zones and offer.zone not in zones:
            continue
        for market in markets:
            price = offer.spot_price if market == "spot" else offer.on_demand_price
            places.append(Place(region=region, zone=offer.zone, type=offer.type, market=market, price=price))
    return places


def preview_requests(spec: JobSpec, rental_plan: AwsRentalPlan) -> list[tuple[str, Mapping[str, object]]]:
    """Return the AWS calls that a launch would make to rent the machines, as (action, arguments).

    Readable placeholders stand for IDs of resources that do not exist yet.
    """
    rental_spec = rental_plan.rental_spec
    place = rental_spec.places[0]
    placeholder_stack = Stack(
        region=place.region,
        vpc="vpc-of-the-stack",
        subnets={place.zone: f"subnet-of-{place.zone}".replace(" ", "-")},
        security_group="sg-of-the-stack",
        file_system="fs-of-the-stack",
        access_point="fsap-of-the-stack",
        key_name="imgnet-key",
        key_file="",
        instance_profile="imgnet-machine",
        bucket=None,
    )
    image = amis.Image("ami-of-the-parameter", "ubuntu", 22, 0, "/dev/sda1", "", "")
    user_data = build_user_data(
        poweroff_seconds=round(3600 * rental_plan.max_hours + rental_plan.poweroff_grace),
        private_key="(generated for this request)",
        public_key="(its public half)",
        file_system=placeholder_stack.file_system,
        access_point=placeholder_stack.access_point,
        region=place.region,
        ssh_user=image.ssh_user,
        python=image.python,
    )
    instance_request = InstanceRequest(
        job_uid=spec.uid or "job-N-xxxxxxxx",
        job_name=spec.name or "job-N",
        owner=rental_spec.owner,
        expires=0.0,
        image=image,
        stack=placeholder_stack,
        user_data=user_data,
        host_key="",
        use_placement_group=rental_spec.use_placement_group,
    )
    run_instances = build_run_instances(instance_request, rental_plan.instance_type, place, spec.machine_names, 1)
    requests: list[tuple[str, Mapping[str, object]]] = [("ec2:RunInstances", run_instances)]
    if "Placement" in run_instances:
        group = run_instances["Placement"]["GroupName"]
        requests.insert(0, ("ec2:CreatePlacementGroup", {"GroupName": group, "Strategy": "cluster"}))
    return requests


class AwsPlanner(ElsewherePlanner):
    """Plans a job on rented instances."""

    default_max_hours = DEFAULT_MAX_HOURS

    def __init__(self, request: MachineRequest) -> None:
        """Choose the instance types. Raises `ClusterError`."""
        super().__init__(request)
        assert isinstance(request.options, AwsOptions)
        self.rental = RentalRequest(request.options, request.is_offline)
        self.type_names, self.type_notes, self.instance_type = choose_instance_types(request.recipe.types, self.rental)

    def default_procs(self, machines: int) -> int:
        """Return a process for each GPU."""
        return max(1, self.instance_type.gpus)

    def data_root(self, path: Path, is_synthetic: bool) -> Path:
        """Return where images are on the machines. A relative path is in the shared file system."""
        return path if path.is_absolute() or path.parts[:1] == ("~",) else Path("~/.imgnet/shared") / path

    def source_access(self, is_in_object_store: bool) -> SourceAccess:
        """What is in S3 can be read from here too, unless AWS is not to be asked."""
        return SourceAccess.REQUIRED if is_in_object_store and not self.request.is_offline else SourceAccess.NONE

    def complete(self, spec: JobSpec, schedule: Schedule) -> MachinePlan:
        """Plan the rental. The machines' addresses are filled in once they are rented. Raises `ClusterError`."""
        notes = list[str]()
        if self.rental.account and spec.data_source.startswith("s3://"):
            notes += machine_role_problems(spec.data_source, self.rental.account)
        rental_plan = plan_rental(spec, schedule, self.type_names, self.type_notes, self.instance_type, self.rental)
        rented_spec = replace(
            spec,
            cloud=rental_plan.rental_spec.to_json(),
            hosts={"shared": None, "machines": []},
            metadata_address=METADATA_URL,
            forecast=encode(rental_plan.forecast.to_record()) if rental_plan.forecast else None,
        )
        return MachinePlan(spec=rented_spec, notes=(*notes, *rental_plan.notes), rental_plan=rental_plan)
