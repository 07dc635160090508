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

from infra.aws.client import Account, pages
from infra.aws.journal import Journal

from .offers import PRODUCT

LEAST_SECONDS = 60
DISK_GB_HOUR = 0.08 / 730  # gp3, us-east-1
ADDRESS_HOUR = 0.005  # a public IPv4


@dataclass(frozen=True, kw_only=True)
class Row:
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
    disk: float
    address: float
    why: str

    @property
    def all(self) -> float:
        """The dollars that are known: machine, disk and address."""
        return (self.dollars or 0.0) + self.disk + self.address


def rows(journal: Journal, now: float) -> list[Row]:
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
        _row(asking, one, gone.get(one["id"]), exact.get(one["id"]), now)
        for asking, one in came.values()
        if one["launched"] <= now
    ]


def _row(
    asking: dict[str, Any], one: dict[str, Any], gone: dict[str, Any] | None, exact: float | None, now: float
) -> Row:
    place, request = asking["place"], asking["request"]
    if gone and gone["ended"] > now:
        gone, exact = None, None
    seconds = billed(one["launched"], gone["ended"] if gone else now)
    gb = sum(disk["Ebs"]["VolumeSize"] for disk in request["BlockDeviceMappings"])
    public = any(nic.get("AssociatePublicIpAddress") for nic in request["NetworkInterfaces"])
    price = place["price"]
    return Row(
        id=one["id"], name=one["name"], type=place["type"], market=place["market"], zone=place["zone"],
        launched=one["launched"], ended=gone["ended"] if gone else None, price=price, seconds=seconds,
        dollars=exact if exact is not None else None if price is None else price * seconds / 3600,
        disk=gb * DISK_GB_HOUR * seconds / 3600, address=public * ADDRESS_HOUR * seconds / 3600,
        why=gone["why"] if gone else "",
    )  # fmt: skip


def billed(launched: float, ended: float) -> float:
    """Return the seconds that a machine is billed for."""
    return float(max(LEAST_SECONDS, math.ceil(ended - launched)))


def gate(journal: Journal, now: float) -> float:
    """Return the dollars of the one public address of a job whose machines have none by themselves: each time from
    when it was first asked for until all of the job was gone.
    """
    begun, seconds = None, 0.0
    for line in journal.lines("address", "ended"):
        if line["what"] == "address":
            begun = begun or line["time"]
        elif begun:
            seconds, begun = seconds + max(0.0, min(now, line["time"]) - begun), None
    return ADDRESS_HOUR * (seconds + max(0.0, now - begun if begun else 0.0)) / 3600


class Meter:
    """The dollars of a job until now, for whoever keeps a limit."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def dollars(self, now: float) -> float:
        """Return what is known of them."""
        return sum(one.all for one in rows(self.journal, now)) + gate(self.journal, now)

    def unknown(self, now: float) -> list[str]:
        """Return the machines whose price nobody knew."""
        return [one.id for one in rows(self.journal, now) if one.dollars is None]


def settle(account: Account, journal: Journal, now: float) -> None:
    """Note what spot machines really cost: their price changes while they run. Raises `CloudError`."""
    noted = {line["id"] for line in journal.lines("price")}
    done = [one for one in rows(journal, now) if one.market == "spot" and one.ended and one.id not in noted]
    for kind, zone in sorted({(one.type, one.zone) for one in done}):
        mine = [one for one in done if (one.type, one.zone) == (kind, zone)]
        first, last = min(one.launched for one in mine), max(one.ended or now for one in mine)
        history = changes(account, kind, zone, first, last)
        for one in mine:
            dollars = over(history, one.launched, one.launched + one.seconds)
            if dollars is not None:
                journal.write("price", id=one.id, dollars=dollars)


def changes(account: Account, kind: str, zone: str, first: float, last: float) -> list[tuple[float, float]]:
    """Return (time, dollars an hour) of a spot price, in order, the one in force at `first` too."""
    found = pages(
        "see spot prices (ec2:DescribeSpotPriceHistory)", account.ec2, "describe_spot_price_history",
        "SpotPriceHistory", InstanceTypes=[kind], AvailabilityZone=zone, ProductDescriptions=[PRODUCT],
        StartTime=datetime.fromtimestamp(first, UTC), EndTime=datetime.fromtimestamp(last, UTC),
    )  # fmt: skip
    return sorted((one["Timestamp"].timestamp(), float(one["SpotPrice"])) for one in found)


def over(history: Iterable[tuple[float, float]], begin: float, end: float) -> float | None:
    """Return the dollars from `begin` to `end` at a price that changes; None when it is not known at `begin`."""
    points = list(history)
    before = [price for time, price in points if time <= begin]
    if not before:
        return None
    steps = [(begin, before[-1]), *[(time, price) for time, price in points if begin < time < end], (end, 0.0)]
    return sum((after[0] - step[0]) * step[1] / 3600 for step, after in pairwise(steps))
