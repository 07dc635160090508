"""What EC2 offers now: instance types, the zones that have them, and prices. An unknown price is never guessed.

Sources: AWS, DescribeInstanceTypes, DescribeInstanceTypeOfferings, DescribeSpotPriceHistory, GetProducts,
GetSpotPlacementScores.
"""

import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from infra.aws.client import PRICING_API_REGION, QUICK_CONFIG, Account, Client, call, paginate
from infra.aws.tags import Resource
from infra.errors import CloudError, NoCredentials

from .instance_types import (
    BUILTIN_TYPES,
    DEFAULT_TYPES,
    ON_DEMAND_PRICE_REGION,
    ON_DEMAND_PRICES,
    RETIREMENT_REASONS,
    InstanceType,
)

MAX_NAMES_PER_CALL = 100  # type names in one DescribeInstanceTypes call
SPOT_PRICE_WINDOW = timedelta(hours=3)  # AWS also returns the price in force when the window begins
PRICE_LIST_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
    "licenseModel": "No License required",
    "marketoption": "OnDemand",
}


@dataclass(frozen=True)
class Offer:
    """An instance type in a zone, with its prices in dollars an hour (None: unknown)."""

    type: str
    zone: str  # "" offline
    instance_type: InstanceType
    spot_price: float | None
    on_demand_price: float | None
    is_builtin_price: bool  # whether the on-demand price is the built-in table's, of 2026

    def price(self, market: str) -> float | None:
        """Return the price in a market."""
        return self.spot_price if market == "spot" else self.on_demand_price


def list_instance_types(account: Account | None, names: Sequence[str]) -> dict[str, InstanceType]:
    """Return those of the named types that EC2 has in this region, in the same order. x86_64 with NVIDIA GPUs only.

    Without an account return those of the built-in table. Raises `CloudError`.
    """
    if account is None:
        return {name: BUILTIN_TYPES[name] for name in names if name in BUILTIN_TYPES}
    try:
        descriptions = _describe_types(account, names)
    except CloudError as error:
        # One unknown name fails the whole call. The filter of DescribeInstanceTypeOfferings accepts any name.
        if error.code not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        descriptions = _describe_types(account, list(list_zones_by_type(account, names)))
    types = {
        description["InstanceType"]: _parse_instance_type(description)
        for description in descriptions
        if _is_supported(description)
    }
    return {name: types[name] for name in names if name in types}


def list_zones_by_type(account: Account, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the region's zones that have each type, sorted. A type that no zone has is absent. Raises `CloudError`."""
    if not names:
        return {}
    offerings = paginate(
        "look up where instance types are offered",
        account.ec2,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(names)}],
    )
    zones: dict[str, list[str]] = {}
    for offering in offerings:
        zones.setdefault(offering["InstanceType"], []).append(offering["Location"])
    return {name: sorted(zones[name]) for name in names if name in zones}


def list_offers(account: Account | None, types: Iterable[InstanceType]) -> list[Offer]:
    """Return the offers of types in this region, by type and zone. Raises `CloudError`.

    Without an account there is one for each type, with the price of the built-in table. A price that cannot be looked
    up is unknown, except for missing credentials.
    """
    types = list(types)
    if account is None:
        return [_build_offer(instance_type, ON_DEMAND_PRICE_REGION, "", None, None) for instance_type in types]
    zones_by_type = list_zones_by_type(account, [instance_type.name for instance_type in types])
    names = list(zones_by_type)  # EC2 may refuse a question about a type that the region does not have
    with ThreadPoolExecutor() as pool:
        spot_answer = pool.submit(_spot_prices, account, names)
        on_demand_answer = pool.submit(_on_demand_prices, account, names)
    spot_prices, on_demand_prices = spot_answer.result(), on_demand_answer.result()
    return [
        _build_offer(each, account.region, zone, spot_prices.get((each.name, zone)), on_demand_prices.get(each.name))
        for each in types
        for zone in zones_by_type.get(each.name, [])
    ]


def choose_types(
    account: Account | None, preferred_types: Sequence[str], requested_types: Sequence[str] = ()
) -> tuple[dict[str, InstanceType], list[str]]:
    """Return the types to launch that this region offers, most preferred first, and notes on types that it lacks.

    Only `requested_types` are taken if there are any; without `preferred_types`, `DEFAULT_TYPES`. Raises `CloudError`,
    with what to type next, when the region offers none of them.
    """
    preferred_types = list(dict.fromkeys(preferred_types)) or list(DEFAULT_TYPES)
    wanted_types = list(dict.fromkeys(requested_types)) or preferred_types
    names = list(dict.fromkeys([*wanted_types, *preferred_types]))
    if account:
        names = list(list_zones_by_type(account, names))
    offered_types = list_instance_types(account, names)
    available_types = [name for name in wanted_types if name in offered_types]
    reasons = {name: _unavailable_reason(name, account) for name in wanted_types if name not in offered_types}
    if not available_types:
        alternatives = [name for name in preferred_types if name in offered_types]
        next_step = "list the types on offer: imgnet-cluster offers"
        if alternatives:
            next_step = f"take another: --type {alternatives[0]}"
        elif not requested_types:
            next_step += ", and take one: --type"
        raise CloudError(f"{', '.join(reasons.values())}; {next_step}")
    first_type = available_types[0]
    is_before = {name: wanted_types.index(name) < wanted_types.index(first_type) for name in reasons}
    notes = [
        f"{reason}: {f'{first_type} instead' if is_before[name] else 'not requested'}"
        for name, reason in reasons.items()
        if is_before[name] or requested_types
    ]
    return {name: offered_types[name] for name in available_types}, notes


def _unavailable_reason(name: str, account: Account | None) -> str:
    """Return why a type cannot be launched. Without an account the type is only missing from the built-in table."""
    if name in RETIREMENT_REASONS:
        return f"{name} is gone ({RETIREMENT_REASONS[name].replace(name, 'it')})"
    if account:
        return f"EC2 offers no {name} with x86_64 in {account.region}"
    return f"{name} is not in the built-in table"


def matches_gpu(instance_type: InstanceType, gpu: str | None) -> bool:
    """Whether a type has such GPUs ("A100"); None stands for any."""
    return gpu is None or instance_type.gpu.lower() == gpu.lower()


def _build_offer(
    instance_type: InstanceType, region: str, zone: str, spot_price: float | None, on_demand_price: float | None
) -> Offer:
    """Return the offer of a type in a zone. The built-in on-demand price fills in for its own region only."""
    builtin_price = None
    if on_demand_price is None and region == ON_DEMAND_PRICE_REGION:
        on_demand_price = builtin_price = ON_DEMAND_PRICES.get(instance_type.name)
    return Offer(
        type=instance_type.name,
        zone=zone,
        instance_type=instance_type,
        spot_price=spot_price,
        on_demand_price=on_demand_price,
        is_builtin_price=builtin_price is not None,
    )


# --- what EC2 describes -------------------------------------------------------------------------------------------


def _describe_types(account: Account, names: Sequence[str]) -> list[Resource]:
    """Return EC2's descriptions of the named types. Without names there is no call: it would describe all 1,400."""
    descriptions: list[Resource] = []
    for start in range(0, len(names), MAX_NAMES_PER_CALL):
        descriptions += paginate(
            "look up instance types",
            account.ec2,
            "describe_instance_types",
            "InstanceTypes",
            InstanceTypes=list(names[start : start + MAX_NAMES_PER_CALL]),
        )
    return descriptions


def _is_supported(description: Resource) -> bool:
    """Whether the supported machine images run on a type: x86_64, and its GPUs, if any, are NVIDIA's."""
    gpus = description.get("GpuInfo", {}).get("Gpus", [])
    architectures = description.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])
    return "x86_64" in architectures and all(gpu.get("Manufacturer", "NVIDIA") == "NVIDIA" for gpu in gpus)


def _parse_instance_type(description: Resource) -> InstanceType:
    network = description.get("NetworkInfo", {})
    groups = description.get("PlacementGroupInfo", {})
    gpu_info = (description.get("GpuInfo", {}).get("Gpus") or [{}])[0]
    return InstanceType(
        name=description["InstanceType"],
        vcpus=description["VCpuInfo"]["DefaultVCpus"],
        gpus=gpu_info.get("Count") or gpu_info.get("LogicalGpuCount") or 0,
        gpu=gpu_info.get("Name", "CPU"),
        gpu_gb=round(gpu_info.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024),
        efa_cards=_efa_cards(network),
        network_gbps=_sustained_gbps(network),
        markets=tuple(sorted(description.get("SupportedUsageClasses", ("on-demand", "spot")))),
        takes_placement_group="cluster" in groups.get("SupportedStrategies", ["cluster"]),
    )


def _efa_cards(network: Resource) -> tuple[int, ...]:
    """Return the network cards that take EFA: the first one beside its IP address ("efa"), the others without one."""
    cards = {card["NetworkCardIndex"]: card.get("InterfaceTypes", []) for card in network.get("NetworkCards", [])}
    return tuple(index for index, types in sorted(cards.items()) if ("efa-only" if index else "efa") in types)


def _sustained_gbps(network: Resource) -> float:
    """Return the sustained network bandwidth in Gbit/s.

    "4x 100 Gigabit" means 400. "Up to 10 Gigabit" is a burst: then the baseline of all network cards counts.
    """
    performance = str(network.get("NetworkPerformance", ""))
    exact = re.fullmatch(r"(?:(\d+)x )?(\d+(?:\.\d+)?) Gigabit", performance)
    if exact:
        return float(exact[1] or 1) * float(exact[2])
    return float(sum(card.get("BaselineBandwidthInGbps", 0.0) for card in network.get("NetworkCards", [])))


# --- prices -------------------------------------------------------------------------------------------------------


def _spot_prices(account: Account, names: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the newest spot price by type and zone, {} when they cannot be looked up. Raises `NoCredentials`."""
    if not names:
        return {}
    try:
        entries = list_spot_prices(account, names, StartTime=datetime.now(UTC) - SPOT_PRICE_WINDOW)
        entries.sort(key=lambda entry: entry["Timestamp"])
        return {(entry["InstanceType"], entry["AvailabilityZone"]): float(entry["SpotPrice"]) for entry in entries}
    except NoCredentials:
        raise
    except (CloudError, OSError, KeyError, TypeError, ValueError):
        return {}


def list_spot_prices(account: Account, names: Sequence[str], **params: object) -> list[Resource]:
    """Return EC2's entries on the spot prices of types, with the parameters of the call. Raises `CloudError`."""
    action = "look up spot prices (ec2:DescribeSpotPriceHistory)"
    params |= {"InstanceTypes": list(names), "ProductDescriptions": ["Linux/UNIX"]}
    return paginate(action, account.ec2, "describe_spot_price_history", "SpotPriceHistory", **params)


def look_up_spot_scores(
    account: Account, types: Sequence[str], regions: Sequence[str], machine_count: int
) -> dict[str, int]:
    """Return how likely each zone has so many spot machines of one of the types: 1 to 10, by EC2's estimate.

    EC2 scores the types together. Returns nothing when they cannot be looked up, as without the permission. Raises
    `NoCredentials`.
    """
    try:
        rows = paginate(
            "look up spot placement scores (ec2:GetSpotPlacementScores)",
            account.ec2,
            "get_spot_placement_scores",
            "SpotPlacementScores",
            InstanceTypes=list(types),
            TargetCapacity=machine_count,
            TargetCapacityUnitType="units",
            SingleAvailabilityZone=True,
            RegionNames=list(regions),
        )
        scores = {row["AvailabilityZoneId"]: int(row["Score"]) for row in rows}
        zones = [
            zone
            for region in dict.fromkeys(row["Region"] for row in rows)
            for zone in paginate(
                "zones", account.in_region(region).ec2, "describe_availability_zones", "AvailabilityZones"
            )
        ]
        return {zone["ZoneName"]: scores[zone["ZoneId"]] for zone in zones if zone["ZoneId"] in scores}
    except NoCredentials:
        raise
    except (CloudError, OSError, KeyError, ValueError):
        return {}


def _on_demand_prices(account: Account, names: Sequence[str]) -> dict[str, float]:
    """Return the price list's dollars an hour of each type, nothing when the list cannot be reached.

    The list answers for one type a call, so the calls run in parallel. The first one runs alone: when it fails, the
    others are not sent.
    """
    if not names:
        return {}
    try:
        client = account.client("pricing", QUICK_CONFIG, PRICING_API_REGION)
        first_price = _list_price(client, names[0], account.region)
        with ThreadPoolExecutor(8) as pool:
            other_prices = list(pool.map(lambda name: _list_price(client, name, account.region), names[1:]))
    except (CloudError, OSError):
        return {}
    prices = [first_price, *other_prices]
    return {name: price for name, price in zip(names, prices, strict=True) if price is not None}


def _list_price(client: Client, name: str, region: str) -> float | None:
    """Return the price list's dollars an hour of a type, None for none or several of them. Raises `CloudError`."""
    filters = PRICE_LIST_FILTERS | {"instanceType": name, "regionCode": region}
    response = call(
        "look up prices",
        client.get_products,
        ServiceCode="AmazonEC2",
        MaxResults=100,
        Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()],
    )
    try:
        prices = {price for product in response["PriceList"] for price in _hourly_prices(json.loads(product))}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return prices.pop() if len(prices) == 1 else None


def _hourly_prices(product: Resource) -> Iterable[float]:
    """Yield the on-demand prices above 0 of a price list product, in dollars an hour."""
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if price > 0 and dimension.get("unit", "Hrs") == "Hrs":
                yield price
