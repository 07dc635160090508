"""What a job has cost, from its journal: each machine from its launch until EC2 called it ended, at its price then.

By the second, a minute at least (AWS, "Amazon EC2 billing"); disks and public addresses with it. A price that nobody
knew stays unknown, and is said. The shared file system belongs to the stack, not to a job.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from infra.aws.client import Account, paginate
from infra.aws.journal import Journal

from .offers import PRODUCT_DESCRIPTION

MIN_BILLED_SECONDS = 60
DISK_DOLLARS_PER_GB_HOUR = 0.08 / 730  # gp3, us-east-1
ADDRESS_DOLLARS_PER_HOUR = 0.005  # a public IPv4


@dataclass(frozen=True, kw_only=True)
class MachineCost:
    """One machine of a job. `dollars` is None when its price is not known; `ended` None while it bills."""

    id: str
    name: str
    type: str
    market: str
    zone: str
    launched: float
    ended: float | None
    price: float | None
    seconds: float
    dollars: float | None
    disk_dollars: float
    address_dollars: float
    why: str

    @property
    def total_dollars(self) -> float:
        """The dollars that are known: machine, disk and address."""
        return (self.dollars or 0.0) + self.disk_dollars + self.address_dollars


def machine_costs(journal: Journal, now: float) -> list[MachineCost]:
    """Return a row for each machine that came until `now`, in that order; also for those that were ended at once."""
    askings: dict[int, dict[str, Any]] = {}
    gone: dict[str, dict[str, Any]] = {}
    exact: dict[str, float] = {}
    released: dict[str, str] = {}  # why we gave a machine back
    came: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id: two may have heard the same answer
    for line in journal.lines():
        if line["what"] == "ask":
            askings[line["number"]] = line
        elif line["what"] in ("granted", "refused") and line["number"] in askings:
            came |= {one["id"]: (askings[line["number"]], one) for one in line.get("machines", [])}
        elif line["what"] == "gone":
            gone[line["id"]] = {**line, "why": released.get(line["id"], line["why"])}
        elif line["what"] == "release":
            released |= dict.fromkeys(line["ids"], line["why"])
        elif line["what"] == "price":
            exact[line["id"]] = line["dollars"]
    return [
        _machine_cost(asking, one, gone.get(one["id"]), exact.get(one["id"]), now)
        for asking, one in came.values()
        if one["launched"] <= now
    ]


def _machine_cost(
    request_line: dict[str, Any],
    machine: dict[str, Any],
    gone_line: dict[str, Any] | None,
    exact_dollars: float | None,
    now: float,
) -> MachineCost:
    place, request = request_line["place"], request_line["request"]
    if gone_line and gone_line["ended"] > now:
        gone_line, exact_dollars = None, None
    seconds = billed_seconds(machine["launched"], gone_line["ended"] if gone_line else now)
    gb = sum(disk["Ebs"]["VolumeSize"] for disk in request["BlockDeviceMappings"])
    public = any(nic.get("AssociatePublicIpAddress") for nic in request["NetworkInterfaces"])
    price = place["price"]
    return MachineCost(
        id=machine["id"], name=machine["name"], type=place["type"], market=place["market"], zone=place["zone"],
        launched=machine["launched"], ended=gone_line["ended"] if gone_line else None, price=price, seconds=seconds,
        dollars=exact_dollars if exact_dollars is not None else None if price is None else price * seconds / 3600,
        disk_dollars=gb * DISK_DOLLARS_PER_GB_HOUR * seconds / 3600, address_dollars=public * ADDRESS_DOLLARS_PER_HOUR * seconds / 3600,
        why=gone_line["why"] if gone_line else "",
    )  # fmt: skip


def billed_seconds(launched: float, ended: float) -> float:
    """Return the seconds that a machine is billed for."""
    return float(max(MIN_BILLED_SECONDS, math.ceil(ended - launched)))


def jump_host_address_dollars(journal: Journal, now: float) -> float:
    """Return the dollars of the one public address of a job whose machines have none by themselves: each time from
    when it was first asked for until all of the job was gone.
    """
    begun, seconds = None, 0.0
    for line in journal.lines("address", "ended"):
        if line["what"] == "address":
            begun = begun or line["time"]
        elif begun:
            seconds, begun = seconds + max(0.0, min(now, line["time"]) - begun), None
    return ADDRESS_DOLLARS_PER_HOUR * (seconds + max(0.0, now - begun if begun else 0.0)) / 3600


class CostMeter:
    """The dollars of a job until now, for whoever keeps a limit."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def total_dollars(self, now: float) -> float:
        """Return what is known of them."""
        return sum(one.total_dollars for one in machine_costs(self.journal, now)) + jump_host_address_dollars(
            self.journal, now
        )

    def unpriced_machines(self, now: float) -> list[str]:
        """Return the machines whose price nobody knew."""
        return [one.id for one in machine_costs(self.journal, now) if one.dollars is None]


def record_spot_costs(account: Account, journal: Journal, now: float) -> None:
    """Note what spot machines really cost: their price changes while they run. Raises `CloudError`."""
    noted = {line["id"] for line in journal.lines("price")}
    done = [one for one in machine_costs(journal, now) if one.market == "spot" and one.ended and one.id not in noted]
    for kind, zone in sorted({(one.type, one.zone) for one in done}):
        mine = [one for one in done if (one.type, one.zone) == (kind, zone)]
        first, last = min(one.launched for one in mine), max(one.ended or now for one in mine)
        history = spot_price_history(account, kind, zone, first, last)
        for one in mine:
            dollars = integrate_price(history, one.launched, one.launched + one.seconds)
            if dollars is not None:
                journal.write("price", id=one.id, dollars=dollars)


def spot_price_history(
    account: Account, type_name: str, zone: str, start: float, end: float
) -> list[tuple[float, float]]:
    """Return (time, dollars an hour) of a spot price, in order, the one in force at `first` too."""
    found = paginate(
        "see spot prices (ec2:DescribeSpotPriceHistory)", account.ec2, "describe_spot_price_history",
        "SpotPriceHistory", InstanceTypes=[type_name], AvailabilityZone=zone, ProductDescriptions=[PRODUCT_DESCRIPTION],
        StartTime=datetime.fromtimestamp(start, UTC), EndTime=datetime.fromtimestamp(end, UTC),
    )  # fmt: skip
    return sorted((one["Timestamp"].timestamp(), float(one["SpotPrice"])) for one in found)


def integrate_price(history: Iterable[tuple[float, float]], begin: float, end: float) -> float | None:
    """Return the dollars from `begin` to `end` at a price that changes; None when it is not known at `begin`."""
    points = list(history)
    before = [price for time, price in points if time <= begin]
    if not before:
        return None
    steps = [(begin, before[-1]), *[(time, price) for time, price in points if begin < time < end], (end, 0.0)]
    return sum((after[0] - step[0]) * step[1] / 3600 for step, after in pairwise(steps))
