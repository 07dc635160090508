"""What EC2 offers today: types, the zones that have them, prices. What cannot be looked up is unknown, never guessed.

Sources: AWS, DescribeInstanceTypes, DescribeInstanceTypeOfferings, DescribeSpotPriceHistory, GetProducts.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from infra.aws.errors import CloudError, NoCredentials, get_error_code

from .instance_types import (
    BUILTIN_TYPES,
    DEFAULT_TYPES,
    GPU_ARCHITECTURES,
    ON_DEMAND_PRICE_REGION,
    ON_DEMAND_PRICES,
    RETIREMENT_REASONS,
    InstanceType,
    find_builtin_type,
    get_quota_family,
)

if TYPE_CHECKING:
    from infra.aws.client import Account

MAX_NAMES_PER_CALL = 100  # in one DescribeInstanceTypes
PRODUCT_DESCRIPTION = "Linux/UNIX"
SPOT_PRICE_WINDOW = timedelta(hours=3)  # of spot prices; AWS also tells the one that held when this began
PRICE_LIST_FILTERS = {
    "operatingSystem": "Linux", "tenancy": "Shared", "capacitystatus": "Used", "preInstalledSw": "NA",
    "licenseModel": "No License required", "marketoption": "OnDemand",
}  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A type in a zone ("" offline), dollars an hour in both markets; None is an unknown price. `on_demand_shipped`:
    the price is the shipped table's, of 2026.
    """

    type: str
    zone: str
    instance_type: InstanceType
    spot_price: float | None
    on_demand_price: float | None
    is_builtin_price: bool


def list_instance_types(
    account: "Account | None", names: Sequence[str], *, offline: bool = False
) -> dict[str, InstanceType]:
    """Return the types among `names` that EC2 describes here, in their order, x86_64 only. Raises `CloudError`.

    Without an account, or `offline`, what the shipped table has.
    """
    if account is None or offline:
        return {name: BUILTIN_TYPES[name] for name in names if name in BUILTIN_TYPES}
    try:
        described = _describe_types(account, names)
    except CloudError as error:  # one unknown name spoils the call; a filter on offerings takes any
        if get_error_code(error) not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        described = _describe_types(account, list(list_zones_by_type(account, names)))
    found = {one["InstanceType"]: _parse_instance_type(one) for one in described if _is_supported(one)}
    return {name: found[name] for name in names if name in found}


def list_zones_by_type(account: "Account", names: Sequence[str]) -> dict[str, list[str]]:
    """Return the zones of the region that have each of the types; what has none is absent. Raises `CloudError`."""
    from infra.aws.client import paginate

    if not names:
        return {}
    found = paginate(
        "look up where machine types are offered", account.ec2, "describe_instance_type_offerings",
        "InstanceTypeOfferings", LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(names)}],
    )  # fmt: skip
    where: dict[str, list[str]] = {}
    for one in found:
        where.setdefault(one["InstanceType"], []).append(one["Location"])
    return {name: sorted(where[name]) for name in names if name in where}


def look_up_prices(
    account: "Account", names: Sequence[str], zones_by_type: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str, str], float]:
    """Return dollars an hour by (zone, type, "spot" or "on-demand"), as AWS says them; what it does not say is absent.

    A price that cannot be looked up stops nobody. Raises `NoCredentials`.
    """
    return _spot_prices(account, names) | {
        (zone, name, "on-demand"): price
        for name, price in _on_demand_prices(account, names).items()
        for zone in zones_by_type.get(name, ())
    }


def list_offers(
    account: "Account | None", gpu: str | None = None, names: Sequence[str] | None = None, *, offline: bool = False
) -> list[Offer]:
    """Return what is offered of `names` (default: all that the table has) with such GPUs ("A100"; None: any), by name
    and zone. Without an account, or `offline`: the shipped table, each type once. Raises `CloudError`.
    """
    names = list(BUILTIN_TYPES) if names is None else list(dict.fromkeys(names))
    names = [one for one in names if (table := find_builtin_type(one)) is None or _matches_gpu(table, gpu)]
    region = account.region if account else ON_DEMAND_PRICE_REGION
    if account is None or offline:
        return [
            _build_offer(region, kind, "", {})
            for kind in list_instance_types(None, names).values()
            if _matches_gpu(kind, gpu)
        ]
    where = list_zones_by_type(account, names)
    found = {one: kind for one, kind in list_instance_types(account, list(where)).items() if _matches_gpu(kind, gpu)}
    known = look_up_prices(account, list(found), where)
    return [_build_offer(region, kind, zone, known) for one, kind in found.items() for zone in where[one]]


def choose_types(
    account: "Account | None",
    preferred_types: Sequence[str],
    requested_type: str | None = None,
    *,
    offline: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the types of an order of preference that are offered in this region, and lines that say what is gone and
    what is taken instead; a type `asked` for by name is taken alone. Nothing wanted means `DEFAULT_TYPES`. Raises
    `CloudError` when nothing is left, with what to type.
    """
    asking = None if offline else account
    preferred_types = list(dict.fromkeys(preferred_types)) or list(DEFAULT_TYPES)
    names = list(dict.fromkeys([*([requested_type] if requested_type else []), *preferred_types]))
    found = list_instance_types(asking, list(list_zones_by_type(asking, names)) if asking else names)
    left = [one for one in preferred_types if one in found]
    if requested_type and requested_type in found:
        return [requested_type], []
    if requested_type:
        instead = f"take another: --type {left[0]}" if left else "see what there is: imgnet-cluster offers"
        raise CloudError(f"{_unavailable_reason(requested_type, asking)}; {instead}")
    if not left:
        gone = ", ".join(_unavailable_reason(one, asking) for one in preferred_types)
        raise CloudError(f"{gone}; see what there is: imgnet-cluster offers, and take one: --type")
    return left, [
        f"{_unavailable_reason(one, asking)}: {left[0]} is taken instead"
        for one in preferred_types[: preferred_types.index(left[0])]
    ]


def _unavailable_reason(name: str, account: "Account | None") -> str:
    if name in RETIREMENT_REASONS:
        return f"{name} is gone ({RETIREMENT_REASONS[name].replace(name, 'it')})"
    return f"EC2 offers no {name} with x86_64 in {account.region}" if account else f"{name} is not in the shipped table"


def _matches_gpu(instance_type: InstanceType, gpu: str | None) -> bool:
    return gpu is None or instance_type.gpu.lower() == gpu.lower()


def _build_offer(
    region: str, instance_type: InstanceType, zone: str, known_prices: Mapping[tuple[str, str, str], float]
) -> Offer:
    asked = known_prices.get((zone, instance_type.name, "on-demand"))
    table = ON_DEMAND_PRICES.get(instance_type.name) if asked is None and region == ON_DEMAND_PRICE_REGION else None
    spot = known_prices.get((zone, instance_type.name, "spot"))
    return Offer(instance_type.name, zone, instance_type, spot, table if asked is None else asked, table is not None)


# --- what EC2 describes -------------------------------------------------------------------------------------------


def _describe_types(account: "Account", names: Sequence[str]) -> list[dict[str, Any]]:
    from infra.aws.client import paginate

    found: list[dict[str, Any]] = []
    for start in range(0, len(names), MAX_NAMES_PER_CALL):  # never without names: that would describe all 1,400 types
        part = list(names[start : start + MAX_NAMES_PER_CALL])
        found += paginate(
            "look up machine types", account.ec2, "describe_instance_types", "InstanceTypes", InstanceTypes=part
        )
    return found


def _is_supported(description: Mapping[str, Any]) -> bool:
    cards = description.get("GpuInfo", {}).get("Gpus", [])
    return "x86_64" in description.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]) and all(
        one.get("Manufacturer", "NVIDIA") == "NVIDIA" for one in cards
    )


def _parse_instance_type(description: Mapping[str, Any]) -> InstanceType:
    name, network = description["InstanceType"], description.get("NetworkInfo", {})
    card = (description.get("GpuInfo", {}).get("Gpus") or [{}])[0]
    gpu = card.get("Name", "CPU")
    return InstanceType(
        name=name,
        vcpus=description["VCpuInfo"]["DefaultVCpus"],
        gpus=card.get("Count") or card.get("LogicalGpuCount") or 0,
        gpu=gpu,
        gpu_gb=round(card.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024),
        efa_interfaces=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0,
        network_cards=network.get("MaximumNetworkCards", 1),
        network_gbps=_sustained_gbps(network),
        gpu_arch=GPU_ARCHITECTURES.get(gpu, ""),
        nvme_gb=description.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        memory_gb=round(description["MemoryInfo"]["SizeInMiB"] / 1024),
        quota_family=get_quota_family(name),
    )


def _sustained_gbps(network: Mapping[str, Any]) -> float:
    """Return what the network holds all the time: "4x 100 Gigabit" is 400, "Up to 10 Gigabit" the cards' base."""
    said = str(network.get("NetworkPerformance", ""))
    exact = re.fullmatch(r"(?:(\d+)x )?(\d+(?:\.\d+)?) Gigabit", said)
    if exact:
        return float(exact[1] or 1) * float(exact[2])
    return float(sum(one.get("BaselineBandwidthInGbps", 0.0) for one in network.get("NetworkCards", [])))


# --- prices -------------------------------------------------------------------------------------------------------


def _spot_prices(account: "Account", names: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Return the newest spot price of each zone."""
    from infra.aws.client import paginate

    if not names:
        return {}
    try:
        said = paginate(
            "look up spot prices", account.ec2, "describe_spot_price_history", "SpotPriceHistory",
            InstanceTypes=list(names), ProductDescriptions=[PRODUCT_DESCRIPTION], StartTime=datetime.now(UTC) - SPOT_PRICE_WINDOW,
        )  # fmt: skip
        said.sort(key=lambda one: one["Timestamp"])
        return {(one["AvailabilityZone"], one["InstanceType"], "spot"): float(one["SpotPrice"]) for one in said}
    except NoCredentials:
        raise
    except (CloudError, OSError, KeyError, TypeError, ValueError):
        return {}


def _on_demand_prices(account: "Account", names: Sequence[str]) -> dict[str, float]:
    """Return the price list's dollars an hour. It answers one type a call, so they are asked side by side; where the
    first gets no answer, the others are not asked.
    """
    from botocore.config import Config

    from infra.aws.client import PRICING_API_REGION

    if not names:
        return {}
    quick = Config(retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=3, read_timeout=10)
    try:
        client = account.client("pricing", quick, PRICING_API_REGION)
        first = _list_price(client, names[0], account.region)
        with ThreadPoolExecutor(8) as pool:
            others = list(pool.map(lambda name: _list_price(client, name, account.region), names[1:]))
    except (CloudError, OSError):
        return {}
    return {name: price for name, price in zip(names, [first, *others], strict=True) if price is not None}


def _list_price(client: Any, name: str, region: str) -> float | None:
    from infra.aws.client import call

    asked = PRICE_LIST_FILTERS | {"instanceType": name, "regionCode": region}
    said = call(
        "look up prices", client.get_products, ServiceCode="AmazonEC2", MaxResults=100,
        Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()],
    )  # fmt: skip
    try:
        found = {price for one in said["PriceList"] for price in _hourly_prices(json.loads(one))}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return found.pop() if len(found) == 1 else None  # two different prices: nobody knows which


def _hourly_prices(product: Mapping[str, Any]) -> Iterable[float]:
    """The prices above 0 of a product of the list, in dollars an hour."""
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if price > 0 and dimension.get("unit", "Hrs") == "Hrs":
                yield price
