"""What one launch request asks of EC2: a place, and the parameters of RunInstances as plain data.

The parameters are typed for the keys that we send. They are stored in the journal and read back, so that the same
request can be sent again.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NotRequired, TypedDict

from .tags import TagSpecification


class Internet(StrEnum):
    """The way of a job's machines to the internet."""

    PUBLIC = "public"  # a public address each
    NAT = "nat"  # a NAT gateway for the time of the job
    NONE = "none"  # none; the machine image has everything


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to rent machines: a zone, an instance type and a market."""

    region: str
    zone: str
    type: str
    market: str  # "spot" or "on-demand"
    price: float | None = None  # dollars an hour, None when unknown


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
    SpotOptions: SpotParameters


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


class RunInstances(UntaggedRunInstances):
    """All parameters of RunInstances that we send."""

    TagSpecifications: list[TagSpecification]
    ClientToken: str
