"""What the plan of a launch says about machines rented from AWS besides their price: image, network, shared folder."""

from collections.abc import Callable, Mapping, Sequence

from cluster.backends.aws.terms.rental_spec import RentalSpec, internet_dollars
from infra.aws import prices
from infra.aws.instances import amis
from infra.aws.launch_request import Internet, Place
from infra.aws.market.instance_types import ON_DEMAND_PRICES, InstanceType
from train.forecast import Forecast
from train.metrics.text import three_digits

NOT_COUNTED = "what stays in the shared folder: about $0.30 per GB and month"


def describe_places(
    rental_spec: RentalSpec,
    machine_count: int,
    forecasts: Mapping[str, Forecast],
    spot_scores: Mapping[str, int],
    hours_at: Callable[[Place], float],
) -> list[tuple[str, str]]:
    """Return where the machines are rented, with labels: the zones of the first type and market, then other choices.

    Those have a line for each type, market and region: the price in the cheapest zone, the time, and the time limit
    where it is another one. `hours_at` returns the limit at a place.
    """
    first = rental_spec.places[0]
    zones = dict.fromkeys(
        place.zone + ("" if place.price is None else f" ${place.price:,.4g}")
        for place in rental_spec.places
        if (place.type, place.market) == (first.type, first.market)
    )
    lines: dict[str, str] = {}
    for place in rental_spec.places:
        choice = place.type
        choice += "" if place.market == first.market else f" {place.market}"
        choice += "" if place.region == first.region else f" in {place.region}"
        if choice in lines:
            continue
        rate = rental_spec.machine_dollars_per_hour(machine_count, place)
        parts = ["unknown price" if rate is None else f"${rate:,.2f} an hour"]
        if rate is None and (on_demand := ON_DEMAND_PRICES.get(place.type)):
            parts[0] = f"on demand ${machine_count * on_demand:,.2f} an hour"
        if run_forecast := forecasts.get(place.type):
            parts.append(f"about {three_digits(run_forecast.minutes)} minutes")
            parts += [f"${rate * run_forecast.minutes / 60:,.2f}"] if rate is not None else []
        if round(60 * hours_at(place)) != round(60 * hours_at(first)):
            parts.append(f"limit {three_digits(60 * hours_at(place))} minutes")
        lines[choice] = f"{choice}: {', '.join(parts)}"
    other_choices = [*lines.values()][1:]
    is_scored = first.market == "spot" and any(place.zone in spot_scores for place in rental_spec.places)
    order = "by EC2's spot score, then price" if is_scored else "by price"
    unit = "" if first.price is None else " an hour each"
    return [
        ("not counted", NOT_COUNTED),
        ("zones in order", f"{', '.join(zones)}{unit}; {order}"),
        *(("then", choice) for choice in other_choices),
    ]


def describe_machines(
    rental_spec: RentalSpec, instance_type: InstanceType, image: amis.Image | None, machine_count: int, placement: str
) -> list[tuple[str, str]]:
    """Return what the machines get besides their type and place, with labels."""
    image_line = describe_image(image, rental_spec.ami)
    if image and not image.python:
        rate = rental_spec.dollars_per_hour(machine_count, rental_spec.places[0])
        image_line += f"; {torch_install_note(rental_spec.ami, rate)}"
    user_tags = ", ".join(f"{key}={value}" for key, value in rental_spec.user_tags.items())
    return [
        ("image", image_line),
        ("internet", describe_internet(rental_spec, instance_type, machine_count)),
        ("network", describe_network(instance_type)),
        ("placement", placement),
        ("shared folder", "~/.imgnet/shared on the stack's EFS: checkpoints and logs"),
        *([("tags", user_tags)] if user_tags else []),
        ("ssh", f"from {rental_spec.ssh_address} only"),
    ]


def describe_missing(parts_by_region: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return what a launch would create of the stacks of its regions, with labels."""
    return [
        ("creates", (f"in {region}: " if len(parts_by_region) > 1 else "") + ", ".join(parts))
        for region, parts in parts_by_region.items()
        if parts
    ]


def describe_image(image: amis.Image | None, ami: str | None) -> str:
    """Return which machine image is launched, and its PyTorch. `image` is None when AWS was not asked."""
    if image is None:
        tested_version = amis.read_torch_version(amis.AMI_PARAMETERS[0])
        return f"{ami or f'the newest of AWS, with PyTorch {tested_version} if it can'}; not looked up"
    label = f"{image.id} ({image.name})" if image.name else image.id
    return f"{label}, with PyTorch {image.torch}" if image.torch else label


def describe_network(instance_type: InstanceType) -> str:
    """Return the network interfaces that each machine gets, and their bandwidth."""
    cards, efa_cards = instance_type.interface_cards, instance_type.efa_cards
    bandwidth = f"{instance_type.network_gbps:g} Gbit/s"
    if not efa_cards:
        return f"one card without EFA, {bandwidth}"
    if len(cards) == 1:
        return f"one card with EFA, {bandwidth}"
    first_card = "IP and EFA" if 0 in efa_cards else "IP"
    return f"{bandwidth} on {len(cards)} cards: {first_card} on card 0, EFA on the others"


def describe_placement(machine_count: int, no_group_reason: str) -> str:
    """Return where the machines of a job are relative to each other."""
    if machine_count == 1:
        return "one machine, in one of the zones"
    group = f"no placement group ({no_group_reason})" if no_group_reason else "a new placement group"
    return f"all in one zone or none, {group}"


def torch_install_note(ami: str | None, dollars_per_hour: float | None) -> str:
    """Return a note on the time and price of installing PyTorch. `dollars_per_hour` is for all machines."""
    minutes = amis.TORCH_INSTALL_MINUTES
    cost = "" if dollars_per_hour is None else f" and ${dollars_per_hour * minutes / 60:,.2f}"
    condition = f", unless the python3 of {ami} has it" if ami else ""
    return f"each machine will install torch, about {minutes:.0f} minutes{cost}{condition}"


def describe_internet(rental_spec: RentalSpec, instance_type: InstanceType, machine_count: int) -> str:
    """Return the line of the plan about the machines' way to the internet and its price."""
    internet = rental_spec.internet
    price = f"${internet_dollars(internet, machine_count):.3g} an hour"
    nat_traffic = f"${prices.NAT_PER_GB:g} per GB (S3 is free)"
    match internet:
        case Internet.NONE:
            return f"none, the machine image has to have everything; one machine has an address for ssh, {price}"
        case Internet.PRIVATE:
            return f"that of your subnet; your NAT gateway costs {nat_traffic}, beside its hours"
        case Internet.NAT:
            return f"a NAT gateway for the time of the job, {price} and {nat_traffic}"
        case Internet.PUBLIC:
            line = f"a public address each, {price}"
            if len(instance_type.interface_cards) == 1 or rental_spec.network_ids:
                return line
            nat_price = f"${internet_dollars(Internet.NAT, machine_count):.3g} an hour"
            return f"{line}; if EC2 refuses, a NAT gateway, {nat_price} and {nat_traffic}"


def describe_spares(rental_spec: RentalSpec) -> str:
    """Return how many machines are spares that are rented in another way than the others, "" for none."""
    spares = max(rental_spec.on_demand_spares, rental_spec.late_spares)
    if not spares:
        return ""
    line = f"{spares} of them"
    if rental_spec.on_demand_spares:
        price = rental_spec.spare_place(rental_spec.places[0]).price
        cost = "unknown price" if price is None else f"${spares * price:,.2f} an hour of it"
        line += f" on demand, {cost}"
    return line + (", rented once EC2 warns of an interruption" if rental_spec.late_spares else "")
