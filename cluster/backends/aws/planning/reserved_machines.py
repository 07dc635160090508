"""A launch into reserved machines (--reservation): at what price, and what the plan says of it."""

from cluster.errors import ClusterError
from infra.aws.client import Account
from infra.aws.launch_request import Place
from infra.aws.market import offers
from infra.aws.market.reservations import CAPACITY_BLOCK, Reservation, format_utc


def choose_place(account: Account, reservation: Reservation, machine_count: int) -> Place:
    """Return the place of reserved machines, at what they cost from now on.

    Raises `ClusterError` when too few of them are free, `CloudError`.
    """
    free_count = reservation.free_count
    if free_count < machine_count:
        next_step = f"pass --machines {free_count}" if free_count else "wait until others end"
        raise ClusterError(
            f"{reservation.id}: {free_count} of its {reservation.machine_count} machines are free, and the job needs "
            f"{machine_count}; {next_step}"
        )
    if reservation.market == CAPACITY_BLOCK:
        return reservation.place(0.0)
    type_offers = offers.list_offers(account, names=[reservation.type])
    prices = [offer.on_demand_price for offer in type_offers if offer.zone == reservation.zone]
    return reservation.place(prices[0] if prices else None)


def needs_placement_group(reservation: Reservation | None) -> bool:
    """Whether a placement group of ours is needed to have the machines close together.

    EC2 places those of a capacity block so by itself ("automatically placed close together inside Amazon EC2
    UltraClusters": AWS, API reference, CapacityBlock), and others may be reserved in a placement group already.
    """
    return reservation is None or not (reservation.placement_group or reservation.market == CAPACITY_BLOCK)


def describe(reservation: Reservation) -> str:
    """Return the line of the plan about the reservation that has the machines."""
    free = f"{reservation.free_count} of {reservation.machine_count} machines are free"
    if reservation.closing_time is None:
        return f"{reservation.id}: {free}; reserved machines cost the on-demand price, whether they are used or not"
    return (
        f"{reservation.id}: {free}; the capacity block was paid for when it was bought (EC2 does not tell how much), "
        "so its machines cost nothing more; "
        f"EC2 ends them at {format_utc(reservation.closing_time)}, 30 minutes before the block ends"
    )
