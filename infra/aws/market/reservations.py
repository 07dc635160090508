"""Capacity that EC2 keeps free for an account: on-demand capacity reservations, capacity blocks, and groups of either.

The machines of an on-demand capacity reservation cost their on-demand price, and the part of it that nobody uses costs
the same. A capacity block is paid when it is bought: its machines cost nothing more, and EC2 does not tell later what
was paid. EC2 begins to end the machines of a block 30 minutes before the block ends.

Sources: AWS, EC2 user guide: "Monitor Capacity Blocks using EventBridge" (40 minutes before a block ends, its machines
"will begin to terminate in 10 minutes"), "Find and purchase Capacity Blocks" (durations), "Capacity Blocks pricing and
billing", "Launch instances into Capacity Reservations in a group"; API reference, CapacityReservation (states).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from infra.aws.client import Account, paginate
from infra.aws.launch_request import Place, get_group_region
from infra.aws.tags import Resource, format_time
from infra.errors import CloudError, NoMachines
from infra.offers import CapacityBlockRow

from .instance_types import InstanceType

CAPACITY_BLOCK = "capacity-block"  # a market
CLOSING_SECONDS = 1800.0  # from the first machine of a block that EC2 ends to the end of the block
# States in which a reservation has no machines yet. In all others but "active" it never has any again.
COMING_STATES = ("assessing", "delayed", "payment-pending", "pending", "scheduled")
PLATFORM = "Linux/UNIX"  # of all our machine images
NOT_FOUND_CODES = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
HOURS_OF_A_DAY = 24
MAX_SINGLE_DAYS = 14  # longer blocks are sold by the week
MAX_DAYS = 182


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Reserved machines of one type in one zone. Times are in seconds since 1970."""

    id: str  # of a reservation, or the ARN of a group of them
    region: str
    zone: str
    type: str
    market: str  # "on-demand" or "capacity-block"
    state: str
    start_time: float | None
    end_time: float | None  # None: at no set time
    machine_count: int
    free_count: int
    placement_group: str  # in which the machines are reserved, "" for none
    refusal: str  # why this program cannot use such a reservation, "" if it can

    @property
    def closing_time(self) -> float | None:
        """When EC2 ends the machines, None for never: machines on demand outlive their reservation."""
        if self.market != CAPACITY_BLOCK or self.end_time is None:
            return None
        return self.end_time - CLOSING_SECONDS

    def place(self, price: float | None) -> Place:
        """Return the place of the reserved machines, at a price in dollars an hour."""
        return Place(
            region=self.region,
            zone=self.zone,
            type=self.type,
            market=self.market,
            price=price,
            reservation=self.id,
            closing_time=self.closing_time,
            placement_group=self.placement_group,
        )

    def problem(self, now: float, types: Sequence[str] = (), zones: Sequence[str] = (), market: str = "") -> str:
        """Return why no machine can be launched here now, "" when one can.

        The machines may have to be of some types, in some zones, of a market.
        """
        if self.refusal:
            return self.refusal
        if types and self.type not in types:
            others = " or ".join(types)
            return f"it has machines of type {self.type}, not {others}; leave out --type, or pass --type {self.type}"
        if zones and self.zone not in zones:
            return f"it is in {self.zone}; leave out --zone, or pass --zone {self.zone}"
        if market and market != self.market:
            return f"its market is {self.market}, not {market}"
        if self.state in COMING_STATES:
            start = f", it starts at {format_utc(self.start_time)}" if self.start_time and self.start_time > now else ""
            return f"it is not active yet ({self.state}){start}; launch then"
        if self.state != "active":
            has_ended = self.end_time and self.end_time <= now
            problem = f"it ended at {format_utc(self.end_time or 0)}" if has_ended else f"it is {self.state}"
        elif self.closing_time is not None and self.closing_time <= now:
            end = format_utc(self.closing_time)
            problem = f"EC2 ended its machines at {end}, 30 minutes before the end of the block"
        else:
            return ""
        return f"{problem}; list what can be bought: imgnet-cluster offers --capacity-blocks"


def format_utc(time: float) -> str:
    """Return a time in seconds since 1970 as text for a person: 2026-11-21 20:00 UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


# --- reservations ---------------------------------------------------------------------------------------------------


def find_reservation(
    account: Account,
    regions: Sequence[str],
    reservation_id: str,
    now: float,
    types: Sequence[str] = (),
    zones: Sequence[str] = (),
    market: str = "",
) -> Reservation:
    """Return a reservation, or the reservations of a group that one request can use, where machines can be launched.

    The first of the regions that has it counts. Of a group with several types, zones or markets it is those with the
    most free machines. `types`, `zones` and `market` limit the search. Raises `NoMachines` with the reason when no
    machine can be launched, `CloudError`.
    """
    for region in regions:
        reservations = _look_up_reservations(account.in_region(region), reservation_id)
        if reservations:
            break
    else:
        raise NoMachines(f"{reservation_id}: {_explain_absence(regions, reservation_id)}")
    problems = {reservation: reservation.problem(now, types, zones, market) for reservation in reservations}
    pools: dict[tuple[str, str, str, str], list[Reservation]] = {}
    for reservation, problem in problems.items():
        if not problem:
            pool = (reservation.type, reservation.zone, reservation.market, reservation.placement_group)
            pools.setdefault(pool, []).append(reservation)
    if not pools:
        is_group = bool(get_group_region(reservation_id))
        texts = [f"{reservation.id}: {text}" if is_group else text for reservation, text in problems.items()]
        raise NoMachines(f"{reservation_id}: {'; '.join(texts)}")
    merged_pools = [_merge(reservation_id, members) for members in pools.values()]
    return max(merged_pools, key=lambda pool: pool.free_count)


def _explain_absence(regions: Sequence[str], reservation_id: str) -> str:
    """Return the line for a reservation or group that these regions do not show."""
    searched = ", ".join(regions)
    group_region = get_group_region(reservation_id)
    if group_region:
        if group_region not in regions:
            return f"it is in {group_region}, not in {searched}; pass --region {group_region}"
        return f"{searched} shows no reservations of this group; list groups: aws resource-groups list-groups"
    return (
        f"this account has no such reservation in {searched}; list yours: aws ec2 describe-capacity-reservations, and "
        "pass --region if it is in another region"
    )


def _look_up_reservations(account: Account, reservation_id: str) -> list[Reservation]:
    """Return the reservation of an ID, or those of a group; none when the region has none. Raises `CloudError`."""
    is_group = bool(get_group_region(reservation_id))
    selection = {} if is_group else {"CapacityReservationIds": [reservation_id]}
    action = "look up a reservation (ec2:DescribeCapacityReservations)"
    operation, key = "describe_capacity_reservations", "CapacityReservations"
    try:
        descriptions = paginate(action, account.ec2, operation, key, **selection)
    except CloudError as error:
        if error.code not in NOT_FOUND_CODES:
            raise
        return []
    reservations = [_parse_reservation(description, account) for description in descriptions]
    if not is_group:
        return reservations
    return [reservation for reservation in reservations if reservation_id in _list_groups(account, reservation.id)]


def _list_groups(account: Account, reservation_id: str) -> list[str]:
    """Return the ARNs of the groups to which a reservation belongs. Raises `CloudError`."""
    action = "look up the groups of a reservation (ec2:GetGroupsForCapacityReservation)"
    operation, key = "get_groups_for_capacity_reservation", "CapacityReservationGroups"
    groups = paginate(action, account.ec2, operation, key, CapacityReservationId=reservation_id)
    return [group["GroupArn"] for group in groups]


def _parse_reservation(description: Resource, account: Account) -> Reservation:
    is_block = description.get("ReservationType") == CAPACITY_BLOCK
    tenancy = description.get("Tenancy", "default")
    platform = description.get("InstancePlatform", PLATFORM)
    group_arn = description.get("PlacementGroupArn", "")
    refusal = ""
    if description.get("Interruptible"):
        refusal = "EC2 may interrupt its machines (an interruptible reservation), which is not supported"
    elif tenancy != "default":
        refusal = f"its tenancy is {tenancy}; only default tenancy is supported"
    elif platform != PLATFORM:
        refusal = f"its platform is {platform}; the machine images are {PLATFORM}"
    elif group_arn and group_arn.split(":")[4] != account.identity[0]:
        refusal = "its placement group belongs to another account, which is not supported"
    return Reservation(
        id=description["CapacityReservationId"],
        region=account.region,
        zone=description["AvailabilityZone"],
        type=description["InstanceType"],
        market=CAPACITY_BLOCK if is_block else "on-demand",
        state=description["State"],
        start_time=start.timestamp() if (start := description.get("StartDate")) else None,
        end_time=end.timestamp() if (end := description.get("EndDate")) else None,
        machine_count=description["TotalInstanceCount"],
        free_count=description["AvailableInstanceCount"],
        placement_group=group_arn.rpartition("/")[2],
        refusal=refusal,
    )


def _merge(reservation_id: str, members: Sequence[Reservation]) -> Reservation:
    """Return reservations of the same type and zone as one. It ends with the first of them."""
    return replace(
        members[0],
        id=reservation_id,
        end_time=min((member.end_time for member in members if member.end_time is not None), default=None),
        machine_count=sum(member.machine_count for member in members),
        free_count=sum(member.free_count for member in members),
    )


# --- blocks that can be bought --------------------------------------------------------------------------------------


def get_block_hours(hours: float) -> int:
    """Return the shortest duration of at least `hours` in which EC2 sells blocks. Raises `CloudError`."""
    days = math.ceil(hours / HOURS_OF_A_DAY)
    if days > MAX_SINGLE_DAYS:
        days = 7 * math.ceil(days / 7)
    if days > MAX_DAYS:
        raise CloudError(f"EC2 sells no capacity blocks of more than {MAX_DAYS} days: --hours {MAX_DAYS * 24}")
    return HOURS_OF_A_DAY * max(1, days)


def list_block_offerings(
    account: Account, types: Iterable[InstanceType], machine_count: int, hours: float
) -> list[CapacityBlockRow]:
    """Return the capacity blocks on offer in a region, those that last `hours` first, then by fee. Buys nothing.

    Raises `CloudError`.
    """
    block_hours = get_block_hours(hours)
    offerings = [
        _parse_offering(description, instance_type, account.region)
        for instance_type in types
        for description in paginate(
            "look up capacity blocks (ec2:DescribeCapacityBlockOfferings)",
            account.ec2,
            "describe_capacity_block_offerings",
            "CapacityBlockOfferings",
            InstanceType=instance_type.name,
            InstanceCount=machine_count,
            CapacityDurationHours=block_hours,
        )
    ]
    usable_offerings = [offering for offering in offerings if offering.hours > 0]
    return sorted(usable_offerings, key=lambda offering: (offering.hours < hours, offering.fee, offering.start))


def _parse_offering(description: Resource, instance_type: InstanceType, region: str) -> CapacityBlockRow:
    offering_id = description["CapacityBlockOfferingId"]
    start, end = description["StartDate"].timestamp(), description["EndDate"].timestamp()
    return CapacityBlockRow(
        type=instance_type.name,
        zone=description["AvailabilityZone"],
        gpus=instance_type.gpus,
        gpu=instance_type.gpu,
        machines=description["InstanceCount"],
        start=format_time(start),
        end=format_time(end),
        hours=(end - CLOSING_SECONDS - start) / 3600,
        fee=float(description["UpfrontFee"]),
        currency=description.get("CurrencyCode", "USD"),
        offering=offering_id,
        buy=f"aws ec2 purchase-capacity-block --region {region} --capacity-block-offering-id {offering_id} "
        f"--instance-platform {PLATFORM}",
    )
