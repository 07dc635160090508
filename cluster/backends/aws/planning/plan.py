"""Plans the rental of a launch: instance types, places in order, prices and limits. Creates nothing.

With the `offline` option, all facts come from tables that ship with the program and AWS is not asked.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.aws.terms.rental_spec import (
    MARKETS,
    METADATA_URL,
    Inspection,
    RentalSpec,
    check_hours,
    drop_dear_places,
    drop_unpriced_places,
    sort_places,
)
from cluster.backends.planner import ElsewherePlanner, MachineRequest, Plan, SourceAccess
from cluster.backends.rentals import RentalPlan
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput, ClusterError
from cluster.state.spec import JobSpec
from infra.aws.client import Account, get_public_address
from infra.aws.instances import amis
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.instances.user_data import build_user_data
from infra.aws.launch_request import Internet, Place
from infra.aws.market import offers
from infra.aws.market.instance_types import ON_DEMAND_PRICES, InstanceType
from infra.aws.stack import security_group, stack
from infra.aws.stack.network import StackNetwork
from infra.aws.stack.stack import Stack, StackInspection
from infra.aws.tags import job_tags, parse_user_tags
from infra.costs import TrafficForecast
from train.forecast import Forecast, forecast
from train.metrics.text import three_digits
from train.recipe.schedule import Schedule, scaled_image_count
from train.tools.host import unix_time

from . import plan_page
from .expected_traffic import expect_traffic
from .images import COMMAND_HINT, UPLOAD_HINT, data_folder, find_far_region, find_images
from .rental_request import (
    RentalRequest,
    choose_instance_types,
    choose_reserved_place,
    describe_reservation,
    options_of_resume,
)

DEFAULT_MAX_HOURS = 2.0
OFFLINE_REGION = "us-east-1"


def plan_rental(
    spec: JobSpec,
    schedule: Schedule | None,
    types_by_name: Mapping[str, InstanceType],
    notes: Sequence[str],
    request: RentalRequest,
) -> Plan:
    """Plan where to rent and at what price. Asks AWS unless offline, changes nothing. Raises `ClusterError`."""
    options, reservation, resumed = request.options, request.reservation, request.resumed
    check_spares(options, spec.recovery.spares)
    first_type = next(iter(types_by_name.values()))
    machine_count = len(spec.machine_names)
    image = inspection = None
    account = request.account
    places, on_demand_places, inspections, spot_scores = _find_places(request, types_by_name, machine_count)
    network = _find_given_network(inspections)
    if account and options.internet is Internet.PRIVATE and not network:
        raise BadInput("--internet private needs a network of yours: --subnet")
    if account:  # report now when the image does not exist or does not support the GPUs, not during the launch
        region = places[0].region
        image = amis.resolve_image(account.in_region(region), first_type.gpu_arch, options.ami)
        inspection = Inspection(
            time=unix_time(),
            region=region,
            stack=inspections[region].stack,
            types=dict(types_by_name),
            gpu_arch=first_type.gpu_arch,
            image=image,
        )
    if options.ssh_address:
        ssh_address = security_group.parse_single_address(options.ssh_address)
    else:
        ssh_address = "this computer's address" if request.offline else get_public_address()
    owner, account_id = ("offline", "") if account is None else (account.owner, account.identity[0])
    knows_price = account is not None or any(place.price is not None for place in places)
    max_dollars = options.max_dollars if knows_price else None
    no_group_reasons = [] if options.use_placement_group else ["--no-group"]
    no_group_reasons += ["EC2 places those of the reservation"] if reservation else []  # or anywhere in the zone
    ungrouped = [each.name for each in types_by_name.values() if not each.takes_placement_group]
    no_group_reasons += [f"EC2 puts no {name} into one" for name in ungrouped]
    rental_spec = RentalSpec(
        places=tuple(places),
        on_demand_spares=spec.recovery.spares if options.on_demand_spares else 0,
        spare_places=tuple(on_demand_places) if options.on_demand_spares else (),
        late_spares=spec.recovery.spares if options.late_spares else 0,
        ssh_address=ssh_address,
        is_address_fixed=bool(options.ssh_address),
        owner=owner,
        user_tags=parse_user_tags(options.tags),
        account_id=account_id,
        max_dollars=max_dollars,
        ami=options.ami,
        internet=options.internet,
        network_ids=network.given_ids if network else (),
        asked=(*options.zones, *options.network_ids, *filter(None, [options.reservation])),
        use_placement_group=machine_count > 1 and not no_group_reasons,
        gpus_per_machine=first_type.gpus,
        torch_index_url=amis.get_torch_index_url(first_type.gpu_arch),
        torch_requirement=amis.get_torch_requirement(first_type.gpu_arch),
        inspection=inspection,
    )
    notes = [*notes]
    notes += [
        f"{zone}: EFS does not serve it, so no machines are rented there" for zone in _zones_without_efs(inspections)
    ]
    if max_dollars is not None:
        rental_spec, unpriced = drop_unpriced_places(rental_spec, machine_count)
        notes += [f"{choice}: unknown price, not requested with --max-price-total" for choice in unpriced]
    elif options.max_dollars is not None:
        notes.append("spot prices are unknown without AWS, so no place was left out for --max-price-total")
    forecasts = _forecasts(spec, schedule, types_by_name, request)
    steps_done, spent_dollars = (resumed.steps_done, resumed.spent_dollars) if resumed else (0, 0.0)
    rest_forecasts = {name: whole.of_steps(steps_done) for name, whole in forecasts.items()}
    installs_torch = image is None or not image.python
    far_region = find_far_region(spec.data_source, account, {place.region for place in places})
    obstacle = f"{spec.data_source}: the bucket is in {far_region}, and --internet none leads to no other region"
    obstacles = (obstacle,) * bool(far_region and options.internet is Internet.NONE)

    def traffic_on(name: str) -> tuple[TrafficForecast, tuple[str, ...]]:
        whole = forecasts.get(name)
        way = (far_region, not network or network.has_s3_endpoint)
        return expect_traffic(spec, schedule, options.internet, whole, installs_torch, steps_done, *way)

    constants = request.constants_for(rental_spec.places[0].type)
    start_seconds = constants.boot_seconds + constants.setup_seconds
    check_hours(spec.max_hours, start_seconds)
    traffic_by_type = {name: traffic_on(name)[0] for name in types_by_name}
    rental_spec, too_dear = drop_dear_places(rental_spec, machine_count, traffic_by_type, spent_dollars, start_seconds)
    notes += [f"{choice}: too dear for --max-price-total, not requested" for choice in too_dear]
    first_place = rental_spec.places[0]
    instance_type = types_by_name[first_place.type]
    rest_forecast = rest_forecasts.get(first_place.type)
    if rest_forecast:  # measurements and presets cannot be compared
        rest_forecasts = {name: rest for name, rest in rest_forecasts.items() if rest.source == rest_forecast.source}
    traffic, traffic_lines = traffic_on(first_place.type)
    rental_spec = replace(rental_spec, traffic=traffic)
    if reservation:
        notes.append(describe_reservation(reservation))
    place_types = dict.fromkeys(place.type for place in rental_spec.places)
    slow_types = [name for name in place_types if types_by_name[name].gpus and not types_by_name[name].efa_cards]
    if schedule and schedule.recipe.comm.hook == "auto" and slow_types and spec.machines > 1 and not spec.train.exact:
        notes.append(
            f"without EFA ({', '.join(slow_types)}), gradients are summed in bfloat16, which halves what is sent; "
            "comm='none' in the recipe keeps float32"
        )
    if options.ami and amis.is_legacy_arch(instance_type.gpu_arch):
        notes.append(
            f"{instance_type.gpu_arch}: {options.ami} must have NVIDIA's proprietary driver, R580 or older; "
            f"each machine takes {amis.LEGACY_TORCH} from {amis.LEGACY_TORCH_INDEX_URL}"
        )

    def hours_at(place: Place) -> float:
        return rental_spec.compute_limits(machine_count, place, spec.max_hours, spent_dollars)[0]

    max_hours, grace_seconds = rental_spec.compute_limits(machine_count, first_place, spec.max_hours, spent_dollars)
    minutes = rest_forecast.minutes if rest_forecast else None
    notes += _limit_notes(spec, rental_spec, rest_forecasts, spent_dollars)
    rate = rental_spec.machine_dollars_per_hour(machine_count, first_place)
    on_demand = ON_DEMAND_PRICES.get(first_place.type)
    bound_spec = rental_spec
    if request.offline:  # no spot price is known, but such a machine never costs more than on demand
        bound_places = tuple(replace(place, price=ON_DEMAND_PRICES.get(place.type)) for place in rental_spec.places)
        bound_spec = replace(rental_spec, places=bound_places, max_dollars=options.max_dollars)
    power_off_hours = max_hours + grace_seconds / 3600
    placement = plan_page.describe_placement(machine_count, next(iter(no_group_reasons), ""))
    highest_dollars = bound_spec.highest_dollars(machine_count, power_off_hours, spent_dollars)
    rental_plan = RentalPlan(
        machines=machine_count,
        type=first_place.type,
        market=first_place.market,
        gpus=f"{instance_type.gpus} x {instance_type.gpu}" if instance_type.gpus else "none",
        spares=plan_page.describe_spares(rental_spec),
        dollars_per_hour=rate,
        on_demand_dollars_per_hour=machine_count * on_demand if rate is None and on_demand else None,
        minutes=minutes,
        forecast_source=rest_forecast.source if rest_forecast else "",
        dollars=None if rate is None or minutes is None else rate * minutes / 60,
        other_dollars=(rental_spec.other_dollars_per_hour(machine_count), rental_spec.traffic.dollars_once),
        max_hours=max_hours,
        poweroff_grace=grace_seconds,
        max_dollars=highest_dollars,
        ceiling_dollars=rental_spec.ceiling_dollars(machine_count, spec.max_hours, spent_dollars, on_demand_places),
        is_dollar_limit_set=bound_spec.max_dollars is not None
        and round(bound_spec.max_dollars - spent_dollars - (highest_dollars or 0.0), 2) == 0,
        spent_dollars=resumed.spent_dollars if resumed else None,
        traffic=traffic_lines,
        facts=(
            *plan_page.describe_places(rental_spec, machine_count, rest_forecasts, spot_scores, hours_at),
            *plan_page.describe_machines(rental_spec, instance_type, image, machine_count, placement),
            *([("VPC", network.describe())] if network else []),
            *plan_page.describe_missing({region: found.missing_parts for region, found in inspections.items()}),
        ),
        requests=preview_requests(spec, rental_spec, instance_type, power_off_hours),
    )
    rented_spec = replace(
        spec,
        cloud=rental_spec.to_json(),
        hosts=Hosts(None, ()),  # filled in once they are rented
        metadata_address=METADATA_URL,
        forecast=rest_forecast,
    )
    return Plan(spec=rented_spec, schedule=schedule, notes=tuple(notes), rental_plan=rental_plan, obstacles=obstacles)


def _find_places(
    request: RentalRequest, types: Mapping[str, InstanceType], machine_count: int
) -> tuple[list[Place], list[Place], dict[str, StackInspection], Mapping[str, int]]:
    """Return the places to try, in order, and those that sell on demand.

    Also the stacks of their regions, and the scores that the order of spot places follows.
    """
    options, account, reservation = request.options, request.account, request.reservation
    markets = (reservation.market,) if reservation else MARKETS[options.market]
    regions = options.regions or ((account.region if account else OFFLINE_REGION),)
    if reservation:
        regions = (reservation.region,)
    all_markets = list(dict.fromkeys([*markets, "on-demand"]))
    accounts = {region: account.in_region(region) if account else None for region in dict.fromkeys(regions)}

    def find_places(region: str) -> list[Place]:
        if reservation and account:
            return [choose_reserved_place(account, reservation, machine_count)]
        return _candidate_places(accounts[region], region, [*types.values()], all_markets, options.zones)

    with ThreadPoolExecutor() as pool:
        found = [pool.submit(find_places, region) for region in accounts]
        inspected = {
            region: pool.submit(stack.inspect, regional, options.network_ids, options.internet)
            for region, regional in accounts.items()
            if regional
        }
        scored = None
        if account and "spot" in markets:
            scored = pool.submit(offers.look_up_spot_scores, account, [*types], regions, machine_count)
    all_places = [place for answer in found for place in answer.result()]
    on_demand_places = [place for place in all_places if place.market == "on-demand"]
    inspections = {region: answer.result() for region, answer in inspected.items()}
    spot_scores = scored.result() if scored else {}
    unserved = _zones_without_efs(inspections)
    places = [place for place in all_places if place.market in markets and place.zone not in unserved]
    network = _find_given_network(inspections)
    if network and len(inspections) > 1:
        region = next(region for region, found in inspections.items() if found.network.is_given)
        raise BadInput(
            f"the stack of {region} is in a network of yours, which is in one region; give one: --region {region}"
        )
    if network:
        subnets = {zone: id for zone, id in network.subnets.items() if not options.subnets or id in options.subnets}
        places = [place for place in places if not inspections[place.region].network.is_given or place.zone in subnets]
    if not places:
        searched = ", ".join((subnets or options.subnets) if network else options.zones or regions)
        searched += f" of {network.vpc}" if network else ""
        searched += f" where EFS serves, which leaves out {', '.join(unserved)}" if unserved else ""
        raise ClusterError(f"{', '.join(types)}: not offered in {searched}; to list what is: imgnet-cluster offers")
    return sort_places(places, regions, [*types], markets, spot_scores), on_demand_places, inspections, spot_scores


def _zones_without_efs(inspections: Mapping[str, StackInspection]) -> list[str]:
    return [zone for found in inspections.values() for zone in found.network.zones_without_efs]


def _find_given_network(inspections: Mapping[str, StackInspection]) -> StackNetwork | None:
    """Return the network of the user's that has the stack, None for another one."""
    return next((found.network for found in inspections.values() if found.network.is_given), None)


def _limit_notes(
    spec: JobSpec, rental_spec: RentalSpec, forecasts: Mapping[str, Forecast], spent_dollars: float
) -> list[str]:
    """Return a note for each type and market with which the limit ends the job before its forecast does."""
    notes: dict[str, str] = {}
    for place in rental_spec.places:
        choice = "" if place == rental_spec.places[0] else f"{place.type} {place.market}: "
        hours, _ = rental_spec.compute_limits(len(spec.machine_names), place, spec.max_hours, spent_dollars)
        if place.type in forecasts and hours < forecasts[place.type].minutes / 60:
            notes.setdefault(
                f"{place.type} {place.market}",
                f"{choice}the limit ends the job after {three_digits(60 * hours)} minutes, "
                f"but the forecast is {three_digits(forecasts[place.type].minutes)} minutes",
            )
    return [*notes.values()]


def _forecasts(
    spec: JobSpec, schedule: Schedule | None, types_by_name: Mapping[str, InstanceType], request: RentalRequest
) -> dict[str, Forecast]:
    """Return the forecast of the run on each machine type on which the speed of the model is known."""
    forecasts = {}
    for name, instance_type in types_by_name.items():
        if schedule and (
            run_forecast := forecast(
                schedule,
                gpus=spec.procs,
                gpu=instance_type.gpu,
                gbit=instance_type.network_gbps,
                machines=spec.machines,
                vcpus=instance_type.vcpus,
                constants=request.constants_for(name),
                val_images=scaled_image_count(schedule.recipe.data.val, spec.train.scale),
            )
        ):
            forecasts[name] = run_forecast
    return forecasts


def preview_requests(
    spec: JobSpec, rental_spec: RentalSpec, instance_type: InstanceType, power_off_hours: float
) -> tuple[tuple[str, Mapping[str, object]], ...]:
    """Return the AWS calls that a launch would make to rent the machines, as (action, arguments).

    Readable placeholders stand for IDs of resources that do not exist yet.
    """
    place = rental_spec.places[0]
    placeholder_stack = Stack(
        region=place.region,
        vpc="vpc-of-the-stack",
        subnets={place.zone: f"subnet-of-{place.zone}".replace(" ", "-")},
        security_group="sg-of-the-stack",
        file_system="fs-of-the-stack",
        access_point="fsap-of-the-stack",
        key_name="imgnet-key",
        bucket=None,
    )
    image = amis.Image("ami-of-the-parameter", "ubuntu", 22, (("/dev/sda1", 0),), "", "")
    keys = "(generated for this request)", "(its public half)"
    seconds, cards = round(3600 * power_off_hours), len(instance_type.interface_cards)
    user_data = build_user_data(placeholder_stack, image, cards, rental_spec.internet, keys, poweroff_seconds=seconds)
    instance_request = InstanceRequest(
        own_tags=job_tags("job-N-xxxxxxxx", "job-N", rental_spec.owner, 0.0, rental_spec.user_tags),
        image=image,
        stack=placeholder_stack,
        user_data=user_data,
        internet=rental_spec.internet,
        use_placement_group=rental_spec.use_placement_group,
    )
    names, spare_names = rental_spec.split_spares(spec.machine_names)
    request = build_launch_request(instance_request, instance_type, place, names, 1)
    requests: list[tuple[str, Mapping[str, object]]] = [("ec2:RunInstances", request.parameters)]
    if spare_names and not rental_spec.late_spares:
        spare_place = rental_spec.spare_place(place)
        spare_request = build_launch_request(
            instance_request, instance_type, spare_place, spare_names, 2, request.placement_group
        )
        requests.append(("ec2:RunInstances", spare_request.parameters))
    if request.new_group:
        requests.insert(0, ("ec2:CreatePlacementGroup", {"GroupName": request.new_group, "Strategy": "cluster"}))
    return tuple(requests)


def check_spares(options: AwsOptions, spares: int) -> None:
    """Raise `BadInput` for options of spares that the job does not have, or that are bought as they would be anyway."""
    flags = {"--on-demand-spares": options.on_demand_spares, "--late-spares": options.late_spares}
    for flag in [flag for flag, is_given in flags.items() if is_given]:
        if not spares:
            raise BadInput(f"{flag}: the job has no spares; say how many: --spares 1")
        if options.market == "on-demand":
            raise BadInput(f"{flag} needs spot machines, and --on-demand rents none; leave one of the two out")
        if options.reservation:
            raise BadInput(f"{flag} needs spot machines, and --reservation has none; leave one of the two out")


def _candidate_places(
    account: Account | None, region: str, types: Sequence[InstanceType], markets: Sequence[str], zones: Sequence[str]
) -> list[Place]:
    """Return all places of a region that offer one of the types. Offline, one place per type and market."""
    type_offers = offers.list_offers(account, types)
    if not account:
        zone = zones[0] if zones else f"a zone of {region}"
        type_offers = [replace(offer, zone=zone) for offer in type_offers]
    return [
        Place(region=region, zone=offer.zone, type=offer.type, market=market, price=offer.price(market))
        for offer in type_offers
        if not zones or offer.zone in zones
        for market in markets
        if market in offer.instance_type.markets
    ]


class AwsPlanner(ElsewherePlanner):
    """Plans a job on rented instances."""

    default_max_hours: float | None = DEFAULT_MAX_HOURS

    def __init__(self, request: MachineRequest) -> None:
        """Choose the instance types. Raises `ClusterError`."""
        super().__init__(request)
        assert isinstance(request.options, AwsOptions)
        options = options_of_resume(request.options, request.resumed)
        self.rental = RentalRequest(options, request.is_offline, request.resumed)
        self.types, self.type_notes = choose_instance_types(request.workload.types, self.rental)
        if self.rental.reservation and self.rental.reservation.closing_time is not None:
            self.default_max_hours = None  # until EC2 ends the machines, which are paid for

    def default_procs(self, machines: int) -> int:
        """Return a process for each GPU."""
        return max(1, next(iter(self.types.values())).gpus)

    def data_root(self, path: Path, is_synthetic: bool) -> Path:
        """Return where images are on the machines."""
        return data_folder(path)

    def source_access(self, is_in_object_store: bool) -> SourceAccess:
        """What is in S3 can be read from here too, unless AWS is not to be asked."""
        return SourceAccess.REQUIRED if is_in_object_store and not self.request.is_offline else SourceAccess.NONE

    def complete(self, spec: JobSpec, schedule: Schedule | None) -> Plan:
        """Plan the rental, and look where the machines find the images. Raises `ClusterError`."""
        source = "" if spec.generate_data else spec.data_source or spec.train.data
        hint = COMMAND_HINT if spec.own_command else UPLOAD_HINT
        notes, obstacles = find_images(source, hint, self.rental.options, self.rental.account)
        plan = plan_rental(spec, schedule, self.types, self.type_notes, self.rental)
        return replace(plan, notes=(*notes, *plan.notes), obstacles=(*obstacles, *plan.obstacles))
