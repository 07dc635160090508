"""Reserved capacity: on-demand capacity reservations, capacity blocks, groups of them, and blocks that can be bought.

A launch into a reservation takes from the reservation's machines, not from the free ones of the zone. EC2 ends the
machines of a block 30 minutes before the block ends. Error codes and the reason of that end are AWS's where AWS
documents them; the others are marked.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.simcloud.cloud import ACCOUNT, AwsError, SimulatedAws, ec2_call, refuse_if
from support.simcloud.lifecycle import BILLED_STATES
from support.simcloud.spot_market import offered, on_demand

CAPACITY_BLOCK = "capacity-block"
CLOSING_SECONDS = 1800.0  # from the end of a block's machines to the end of the block
END_REASON = "Server.CapacityBlockExpired"  # ours: AWS documents none
NOT_ACTIVE = "InvalidCapacityReservationState"  # ours: AWS documents none
COMBINATION = "InvalidParameterCombination"
ONLY_RESERVED = "capacity-reservations-only"  # a preference
HOLDING_STATES = (*BILLED_STATES, "shutting-down", "stopping")  # EC2 cleans a machine up before its place is free
BLOCK_PRICE_FACTOR = 0.6  # of the on-demand price: ours


@dataclass
class CapacityReservation:
    """Machines of one type in one zone that are kept free. Times are in seconds since 1970."""

    id: str
    zone: str
    type: str
    count: int
    start: float
    end: float | None = None
    is_block: bool = False
    groups: Collection[str] = ()  # ARNs of resource groups
    placement_group: str = ""
    placement_group_owner: str = ACCOUNT
    state: str = ""  # "" follows from the time
    tenancy: str = "default"
    platform: str = "Linux/UNIX"
    interruptible: bool = False

    @property
    def region(self) -> str:
        return self.zone.rstrip("abcdef")

    def state_at(self, now: float) -> str:
        if self.state:
            return self.state
        if now < self.start:
            return "scheduled"
        return "expired" if self.end is not None and now >= self.end else "active"

    def free_count(self, sim: SimulatedAws) -> int:
        if self.state_at(sim.now()) != "active":
            return 0
        held = [one for one in sim.live_instances() if one.life.reservation_id == self.id]
        return self.count - sum(instance.state in HOLDING_STATES for instance in held)


def tick(sim: SimulatedAws) -> None:
    for instance in sim.live_instances():
        reservation = sim.reservations.get(instance.life.reservation_id or "")
        if reservation is None or not reservation.is_block or reservation.end is None:
            continue
        if sim.now() >= reservation.end - CLOSING_SECONDS and instance.state in BILLED_STATES:
            sim.shut_down(instance, END_REASON, "The capacity block ends", loses_capacity=True)


def check_reservation(sim: SimulatedAws, request: Any) -> None:
    """Choose the reservations of a launch: `request.reservations`, one for each machine. Raises `AwsError`.

    A launch into a group whose reservations have too few free machines takes others on demand, and nothing tells it,
    unless its preference forbids that (AWS, "Work with Capacity Reservation groups").
    """
    is_targeted = bool(request.reservation or request.reservation_group)
    is_contradictory = is_targeted and request.preference not in (None, ONLY_RESERVED)
    refuse_if(is_contradictory, COMBINATION, f"A target and the preference {request.preference} exclude each other.")
    if not is_targeted and request.market != CAPACITY_BLOCK:
        return
    refuse_if(not is_targeted, COMBINATION, "The market type capacity-block must target a Capacity Block.")
    refuse_if(request.market == "spot", COMBINATION, "Spot Instances cannot target a Capacity Reservation.")
    if request.reservation:
        members = [_find(sim, request.region, request.reservation)]
        if mismatch := _mismatch(sim, members[0], request):
            raise mismatch
    else:
        members = [one for one in _all_of(sim, request.region) if request.reservation_group in one.groups]
    matching = [member for member in members if _mismatch(sim, member, request) is None]
    places = [member.id for member in matching for _ in range(member.free_count(sim))]
    is_bound = request.reservation or request.market == CAPACITY_BLOCK or request.preference == ONLY_RESERVED
    is_too_small = len(places) < request.min_count and is_bound
    message = f"The targeted Capacity Reservation has {len(places)} instances available."
    refuse_if(is_too_small, "ReservationCapacityExceeded", message)
    request.reservations = places[: request.max_count]


def _all_of(sim: SimulatedAws, region: str) -> list[CapacityReservation]:
    return [reservation for reservation in sim.reservations.values() if reservation.region == region]


def _find(sim: SimulatedAws, region: str, id: str) -> CapacityReservation:
    is_known = id in sim.reservations and sim.reservations[id].region == region
    refuse_if(not is_known, "InvalidCapacityReservationId.NotFound", f"There is no capacity reservation '{id}'.")
    return sim.reservations[id]


def _mismatch(sim: SimulatedAws, reservation: CapacityReservation, request: Any) -> AwsError | None:
    """Return the error of a launch that a reservation does not take, None for one that it takes."""
    state = reservation.state_at(sim.now())
    if state != "active":
        return AwsError(NOT_ACTIVE, f"The capacity reservation '{reservation.id}' is {state}.")
    if request.group and not reservation.placement_group:  # what is reserved may be anywhere in its zone
        return AwsError("InsufficientInstanceCapacity", f"'{reservation.id}' was not made in '{request.group}'.")
    is_block = request.market == CAPACITY_BLOCK
    group = request.group if reservation.placement_group else ""
    reserved = (reservation.is_block, reservation.type, reservation.zone, reservation.placement_group)
    if reserved != (is_block, request.type, request.zone, group):
        return AwsError(COMBINATION, f"The request does not match the capacity reservation '{reservation.id}'.")
    return None


def join_reservation(request: Any, instance: Any) -> None:
    """Put a new instance into the next reservation of its launch, if there is one."""
    if request.market == CAPACITY_BLOCK:
        instance.lifecycle = CAPACITY_BLOCK
    if request.reservations:
        instance.life.reservation_id = instance.capacity_reservation_id = request.reservations.pop(0)
    target = {"CapacityReservationId": request.reservation}
    if request.reservation_group:
        target = {"CapacityReservationResourceGroupArn": request.reservation_group}
    if any(target.values()):
        instance.capacity_reservation_specification = {"CapacityReservationTarget": target}


def _to_date(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)


def _describe(sim: SimulatedAws, reservation: CapacityReservation) -> dict[str, Any]:
    arn = f"arn:aws:ec2:{reservation.region}:{ACCOUNT}"
    description = {
        "CapacityReservationId": reservation.id,
        "CapacityReservationArn": f"{arn}:capacity-reservation/{reservation.id}",
        "OwnerId": ACCOUNT,
        "AvailabilityZone": reservation.zone,
        "InstanceType": reservation.type,
        "InstancePlatform": reservation.platform,
        "Tenancy": reservation.tenancy,
        "TotalInstanceCount": reservation.count,
        "AvailableInstanceCount": reservation.free_count(sim),
        "State": reservation.state_at(sim.now()),
        "StartDate": _to_date(reservation.start),
        "EndDateType": "unlimited" if reservation.end is None else "limited",
        "InstanceMatchCriteria": "targeted",
        "ReservationType": CAPACITY_BLOCK if reservation.is_block else "default",
        "Interruptible": reservation.interruptible,
    }
    if reservation.end is not None:
        description["EndDate"] = _to_date(reservation.end)
    if reservation.placement_group:
        owner = f"arn:aws:ec2:{reservation.region}:{reservation.placement_group_owner}"
        description["PlacementGroupArn"] = f"{owner}:placement-group/{reservation.placement_group}"
    return description


@ec2_call
def describe_capacity_reservations(self: Any) -> ActionResult:
    sim = SimulatedAws.current
    ids = self._get_param("CapacityReservationIds", [])
    reservations = [_find(sim, self.region, id) for id in ids] or _all_of(sim, self.region)
    return ActionResult({"CapacityReservations": [_describe(sim, reservation) for reservation in reservations]})


@ec2_call
def get_groups_for_capacity_reservation(self: Any) -> ActionResult:
    reservation = _find(SimulatedAws.current, self.region, self._get_param("CapacityReservationId"))
    groups = [{"GroupArn": arn, "OwnerId": ACCOUNT} for arn in reservation.groups]
    return ActionResult({"CapacityReservationGroups": groups})


@ec2_call
def describe_capacity_block_offerings(self: Any) -> ActionResult:
    """List blocks that can be bought: one for each zone, from 11:30 UTC of one of the next days."""
    type = self._get_param("InstanceType")
    count, hours = int(self._get_param("InstanceCount")), int(self._get_param("CapacityDurationHours"))
    has_blocks = CAPACITY_BLOCK in INSTANCE_TYPES.get(type, {}).get("SupportedUsageClasses", [])
    refuse_if(not has_blocks, "InvalidParameterValue", f"Capacity Blocks are not supported for '{type}'.")
    is_wrong = hours % 24 or not 24 <= hours <= 182 * 24 or (hours > 14 * 24 and hours % (7 * 24))
    refuse_if(is_wrong, "InvalidParameterValue", "A block is of 1 to 14 days, or of whole weeks up to 182 days.")
    today = _to_date(SimulatedAws.current.now()).replace(hour=11, minute=30, second=0, microsecond=0)
    offerings = []
    for day, zone in enumerate(offered(self.region, type), 1):
        start = today + timedelta(days=day)
        fee = on_demand(type) * BLOCK_PRICE_FACTOR * count * hours * (1 + day / 100)
        offerings.append(
            {
                "CapacityBlockOfferingId": f"cb-{hashlib.sha256(f'{type} {zone}'.encode()).hexdigest()[:17]}",
                "InstanceType": type,
                "AvailabilityZone": zone,
                "InstanceCount": count,
                "StartDate": start,
                "EndDate": start + timedelta(hours=hours),
                "CapacityBlockDurationHours": hours,
                "UpfrontFee": f"{fee:.4f}",
                "CurrencyCode": "USD",
                "Tenancy": "default",
            }
        )
    return ActionResult({"CapacityBlockOfferings": offerings[::-1]})
