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

from infra.aws.errors import CloudError, NoCredentials, code_of

from .instance_types import ARCHITECTURES, DEFAULT_TYPES, ON_DEMAND, PRICED_IN, RETIRED, SHIPPED, Kind, family, shipped

if TYPE_CHECKING:
    from infra.aws.client import Account

MOST_NAMES = 100  # in one DescribeInstanceTypes
PRODUCT = "Linux/UNIX"
HISTORY = timedelta(hours=3)  # of spot prices; AWS also tells the one that held when this began
PRICE_LIST = {
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
    kind: Kind
    spot: float | None
    on_demand: float | None
    on_demand_shipped: bool


def kinds(account: "Account | None", names: Sequence[str], *, offline: bool = False) -> dict[str, Kind]:
    """Return the types among `names` that EC2 describes here, in their order, x86_64 only. Raises `CloudError`.

    Without an account, or `offline`, what the shipped table has.
    """
    if account is None or offline:
        return {name: SHIPPED[name] for name in names if name in SHIPPED}
    try:
        described = _describe(account, names)
    except CloudError as error:  # one unknown name spoils the call; a filter on offerings takes any
        if code_of(error) not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        described = _describe(account, list(zones(account, names)))
    found = {one["InstanceType"]: _kind(one) for one in described if _fits(one)}
    return {name: found[name] for name in names if name in found}


def zones(account: "Account", names: Sequence[str]) -> dict[str, list[str]]:
    """Return the zones of the region that have each of the types; what has none is absent. Raises `CloudError`."""
    from infra.aws.client import pages

    if not names:
        return {}
    found = pages(
        "look up where machine types are offered", account.ec2, "describe_instance_type_offerings",
        "InstanceTypeOfferings", LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(names)}],
    )  # fmt: skip
    where: dict[str, list[str]] = {}
    for one in found:
        where.setdefault(one["InstanceType"], []).append(one["Location"])
    return {name: sorted(where[name]) for name in names if name in where}


def prices(
    account: "Account", names: Sequence[str], zones: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str, str], float]:
    """Return dollars an hour by (zone, type, "spot" or "on-demand"), as AWS says them; what it does not say is absent.

    A price that cannot be looked up stops nobody. Raises `NoCredentials`.
    """
    return _spot(account, names) | {
        (zone, name, "on-demand"): price
        for name, price in _on_demand(account, names).items()
        for zone in zones.get(name, ())
    }


def offers(
    account: "Account | None", gpu: str | None = None, names: Sequence[str] | None = None, *, offline: bool = False
) -> list[Offer]:
    """Return what is offered of `names` (default: all that the table has) with such GPUs ("A100"; None: any), by name
    and zone. Without an account, or `offline`: the shipped table, each type once. Raises `CloudError`.
    """
    names = list(SHIPPED) if names is None else list(dict.fromkeys(names))
    names = [one for one in names if (table := shipped(one)) is None or _is(table, gpu)]
    region = account.region if account else PRICED_IN
    if account is None or offline:
        return [_offer(region, kind, "", {}) for kind in kinds(None, names).values() if _is(kind, gpu)]
    where = zones(account, names)
    found = {one: kind for one, kind in kinds(account, list(where)).items() if _is(kind, gpu)}
    known = prices(account, list(found), where)
    return [_offer(region, kind, zone, known) for one, kind in found.items() for zone in where[one]]


def settle(
    account: "Account | None", wanted: Sequence[str], asked: str | None = None, *, offline: bool = False
) -> tuple[list[str], list[str]]:
    """Return the types of an order of preference that are offered in this region, and lines that say what is gone and
    what is taken instead; a type `asked` for by name is taken alone. Nothing wanted means `DEFAULT_TYPES`. Raises
    `CloudError` when nothing is left, with what to type.
    """
    asking = None if offline else account
    wanted = list(dict.fromkeys(wanted)) or list(DEFAULT_TYPES)
    names = list(dict.fromkeys([*([asked] if asked else []), *wanted]))
    found = kinds(asking, list(zones(asking, names)) if asking else names)
    left = [one for one in wanted if one in found]
    if asked and asked in found:
        return [asked], []
    if asked:
        instead = f"take another: --type {left[0]}" if left else "see what there is: imgnet-cluster offers"
        raise CloudError(f"{_gone(asked, asking)}; {instead}")
    if not left:
        gone = ", ".join(_gone(one, asking) for one in wanted)
        raise CloudError(f"{gone}; see what there is: imgnet-cluster offers, and take one: --type")
    return left, [f"{_gone(one, asking)}: {left[0]} is taken instead" for one in wanted[: wanted.index(left[0])]]


def _gone(name: str, account: "Account | None") -> str:
    if name in RETIRED:
        return f"{name} is gone ({RETIRED[name].replace(name, 'it')})"
    return f"EC2 offers no {name} with x86_64 in {account.region}" if account else f"{name} is not in the shipped table"


def _is(kind: Kind, gpu: str | None) -> bool:
    return gpu is None or kind.gpu.lower() == gpu.lower()


def _offer(region: str, kind: Kind, zone: str, known: Mapping[tuple[str, str, str], float]) -> Offer:
    asked = known.get((zone, kind.name, "on-demand"))
    table = ON_DEMAND.get(kind.name) if asked is None and region == PRICED_IN else None
    spot = known.get((zone, kind.name, "spot"))
    return Offer(kind.name, zone, kind, spot, table if asked is None else asked, table is not None)


# --- what EC2 describes -------------------------------------------------------------------------------------------


def _describe(account: "Account", names: Sequence[str]) -> list[dict[str, Any]]:
    from infra.aws.client import pages

    found: list[dict[str, Any]] = []
    for start in range(0, len(names), MOST_NAMES):  # never without names: that would describe all 1,400 types
        part = list(names[start : start + MOST_NAMES])
        found += pages(
            "look up machine types", account.ec2, "describe_instance_types", "InstanceTypes", InstanceTypes=part
        )
    return found


def _fits(said: Mapping[str, Any]) -> bool:
    cards = said.get("GpuInfo", {}).get("Gpus", [])
    return "x86_64" in said.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]) and all(
        one.get("Manufacturer", "NVIDIA") == "NVIDIA" for one in cards
    )


def _kind(said: Mapping[str, Any]) -> Kind:
    name, network = said["InstanceType"], said.get("NetworkInfo", {})
    card = (said.get("GpuInfo", {}).get("Gpus") or [{}])[0]
    gpu = card.get("Name", "CPU")
    return Kind(
        name=name,
        vcpus=said["VCpuInfo"]["DefaultVCpus"],
        gpus=card.get("Count") or card.get("LogicalGpuCount") or 0,
        gpu=gpu,
        gpu_gb=round(card.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024),
        efa=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0,
        cards=network.get("MaximumNetworkCards", 1),
        gbit=_gbit(network),
        arch=ARCHITECTURES.get(gpu, ""),
        nvme_gb=said.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        memory_gb=round(said["MemoryInfo"]["SizeInMiB"] / 1024),
        family=family(name),
    )


def _gbit(network: Mapping[str, Any]) -> float:
    """Return what the network holds all the time: "4x 100 Gigabit" is 400, "Up to 10 Gigabit" the cards' base."""
    said = str(network.get("NetworkPerformance", ""))
    exact = re.fullmatch(r"(?:(\d+)x )?(\d+(?:\.\d+)?) Gigabit", said)
    if exact:
        return float(exact[1] or 1) * float(exact[2])
    return float(sum(one.get("BaselineBandwidthInGbps", 0.0) for one in network.get("NetworkCards", [])))


# --- prices -------------------------------------------------------------------------------------------------------


def _spot(account: "Account", names: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Return the newest spot price of each zone."""
    from infra.aws.client import pages

    if not names:
        return {}
    try:
        said = pages(
            "look up spot prices", account.ec2, "describe_spot_price_history", "SpotPriceHistory",
            InstanceTypes=list(names), ProductDescriptions=[PRODUCT], StartTime=datetime.now(UTC) - HISTORY,
        )  # fmt: skip
        said.sort(key=lambda one: one["Timestamp"])
        return {(one["AvailabilityZone"], one["InstanceType"], "spot"): float(one["SpotPrice"]) for one in said}
    except NoCredentials:
        raise
    except (CloudError, OSError, KeyError, TypeError, ValueError):
        return {}


def _on_demand(account: "Account", names: Sequence[str]) -> dict[str, float]:
    """Return the price list's dollars an hour. It answers one type a call, so they are asked side by side; where the
    first gets no answer, the others are not asked.
    """
    from botocore.config import Config

    from infra.aws.client import PRICING_REGION

    if not names:
        return {}
    quick = Config(retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=3, read_timeout=10)
    try:
        client = account.client("pricing", quick, PRICING_REGION)
        first = _listed(client, names[0], account.region)
        with ThreadPoolExecutor(8) as pool:
            others = list(pool.map(lambda name: _listed(client, name, account.region), names[1:]))
    except (CloudError, OSError):
        return {}
    return {name: price for name, price in zip(names, [first, *others], strict=True) if price is not None}


def _listed(client: Any, name: str, region: str) -> float | None:
    from infra.aws.client import call

    asked = PRICE_LIST | {"instanceType": name, "regionCode": region}
    said = call(
        "look up prices", client.get_products, ServiceCode="AmazonEC2", MaxResults=100,
        Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()],
    )  # fmt: skip
    try:
        found = {price for one in said["PriceList"] for price in _hourly(json.loads(one))}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return found.pop() if len(found) == 1 else None  # two different prices: nobody knows which


def _hourly(product: Mapping[str, Any]) -> Iterable[float]:
    """The prices above 0 of a product of the list, in dollars an hour."""
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if price > 0 and dimension.get("unit", "Hrs") == "Hrs":
                yield price
