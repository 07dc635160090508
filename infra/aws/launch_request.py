"""What one launch request asks of EC2: a place, and the parameters of RunInstances as plain data.

The parameters are typed for the keys that we send. They are stored in the journal and read back, so that the same
request can be sent again.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NotRequired, TypedDict

from .tags import TagSpecification

GROUP_PATTERN = re.compile(r"arn:aws[a-z-]*:resource-groups:([a-z0-9-]+):\d{12}:group/[\w./-]+", re.ASCII)


class Internet(StrEnum):
    """The way of a job's machines to the internet."""

    PUBLIC = "public"  # a public address each
    NAT = "nat"  # a NAT gateway for the time of the job
    NONE = "none"  # none; the machine image has everything


@dataclass(frozen=True, kw_only=True)
class ReservationTarget:
    """Reserved capacity in which machines are launched."""

    id: str  # "cr-...", or the ARN of a resource group of reservations
    closing_time: float | None = None  # when EC2 ends the machines, in seconds since 1970; None for never
    placement_group: str = ""  # the group in which the capacity is reserved, "" for none


def parse_reservation_id(text: str) -> str:
    """Return the ID of a reservation or the ARN of a group of them. Raises `ValueError` for any other text."""
    if not re.fullmatch(r"cr-[0-9a-z]+", text, re.ASCII) and not GROUP_PATTERN.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither a reservation (cr-0123456789abcdef0) nor a resource group of reservations "
            "(arn:aws:resource-groups:us-east-1:123456789012:group/NAME)."
        )
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
    reservation: ReservationTarget | None = None

    @property
    def closing_time(self) -> float | None:
        """When EC2 ends the machines, in seconds since 1970; None for never."""
        return self.reservation.closing_time if self.reservation else None


class InstanceProfileParameters(TypedDict):
    """The role of the machines."""

    Name: str


class MetadataParameters(TypedDict):
    """How a machine may reach its metadata service."""

    HttpEndpoint: str
    HttpTokens: str
    HttpPutResponseHopLimit: int


class NetworkInterfaceParameters(TypedDict):
    """A network interface of each machine."""

    DeviceIndex: int
    NetworkCardIndex: int
    SubnetId: str
    Groups: list[str]
    DeleteOnTermination: bool
    InterfaceType: str
    AssociatePublicIpAddress: NotRequired[bool]


class EbsParameters(TypedDict):
    """The size and type of a disk."""

    VolumeSize: int
    VolumeType: str
    Encrypted: bool
    DeleteOnTermination: bool


class DiskParameters(TypedDict):
    """A disk of each machine."""

    DeviceName: str
    Ebs: EbsParameters


class PlacementParameters(TypedDict):
    """The placement group of the machines."""

    GroupName: str


class SpotParameters(TypedDict):
    """What happens to a spot machine that EC2 needs back."""

    SpotInstanceType: str
    InstanceInterruptionBehavior: str


class MarketParameters(TypedDict):
    """The market, when it is not on demand."""

    MarketType: str
    SpotOptions: NotRequired[SpotParameters]


class ReservationTargetParameters(TypedDict):
    """The reservation, or the group of reservations, that has the machines. EC2 takes one of the two."""

    CapacityReservationId: NotRequired[str]
    CapacityReservationResourceGroupArn: NotRequired[str]


class ReservationParameters(TypedDict):
    """The reserved capacity in which the machines run."""

    CapacityReservationTarget: ReservationTargetParameters


class UntaggedRunInstances(TypedDict):
    """The parameters of RunInstances without tags and client token, which are computed from them."""

    ImageId: str
    InstanceType: str
    MinCount: int
    MaxCount: int
    KeyName: str
    IamInstanceProfile: InstanceProfileParameters
    InstanceInitiatedShutdownBehavior: str
    MetadataOptions: MetadataParameters
    NetworkInterfaces: list[NetworkInterfaceParameters]
    BlockDeviceMappings: list[DiskParameters]
    UserData: str
    Placement: NotRequired[PlacementParameters]
    InstanceMarketOptions: NotRequired[MarketParameters]
    CapacityReservationSpecification: NotRequired[ReservationParameters]


class RunInstances(UntaggedRunInstances):
    """All parameters of RunInstances that we send."""

    TagSpecifications: list[TagSpecification]
    ClientToken: str
