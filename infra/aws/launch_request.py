"""Where a launch request asks for machines: a place, reserved capacity there, and the way to the internet."""

import re
from dataclasses import dataclass
from enum import StrEnum

GROUP_PATTERN = re.compile(r"arn:aws[a-z-]*:resource-groups:([a-z0-9-]+):\d{12}:group/[\w./-]+", re.ASCII)


class Internet(StrEnum):
    """The way of a job's machines to the internet."""

    PUBLIC = "public"  # a public address each
    NAT = "nat"  # a NAT gateway for the time of the job
    PRIVATE = "private"  # that of the user's network; the machines have private addresses only
    NONE = "none"  # none; the machine image has everything


def parse_reservation_id(text: str) -> str:
    """Return the ID of a reservation or the ARN of a group of them. Raises `ValueError` for any other text."""
    if not re.fullmatch(r"cr-[0-9a-z]+", text, re.ASCII) and not GROUP_PATTERN.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither a reservation (cr-0123456789abcdef0) nor a resource group of reservations "
            "(arn:aws:resource-groups:us-east-1:123456789012:group/NAME)."
        )
    return text


def parse_id(text: str, prefix: str) -> str:
    """Return the ID of a network ("vpc") or a subnet ("subnet"). Raises `ValueError` for any other text."""
    if not re.fullmatch(rf"{prefix}-[0-9a-f]+", text, re.ASCII):
        raise ValueError(f"{text!r} is no ID such as {prefix}-0123456789abcdef0.")
    return text


def get_group_region(reservation_id: str) -> str:
    """Return the region in the ARN of a group of reservations, "" for the ID of a reservation."""
    match = GROUP_PATTERN.fullmatch(reservation_id)
    return match[1] if match else ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to rent machines: a zone, an instance type, a market, and the reservation that has them, if any."""

    region: str
    zone: str
    type: str
    market: str  # "spot", "on-demand" or "capacity-block"
    price: float | None = None  # dollars an hour, None when unknown; 0 in a capacity block, which is paid beforehand
    reservation: str = ""  # "cr-...", the ARN of a resource group of reservations, or "" for none
    closing_time: float | None = None  # when EC2 ends the machines, in seconds since 1970; None for never
    placement_group: str = ""  # the group in which the reserved machines are, "" for none
