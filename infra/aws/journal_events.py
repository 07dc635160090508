"""The events in a journal: a dataclass for each kind. The file calls an event by the name of its class."""

from collections.abc import Mapping
from dataclasses import dataclass

from train.tools.records import DamagedRecord, decode, encode

from .launch_request import Internet, Place
from .tags import BOOT_KEY, Resource, read_tags


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """One line of a journal."""

    time: float = 0.0  # seconds since 1970; 0 until the event is written


# --- launch requests -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchedMachine:
    """A machine that EC2 launched for a request."""

    id: str
    name: str
    launched: float


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(JournalEvent):
    """A request for machines is about to be sent. It is complete, so that it can be sent again unchanged."""

    number: int
    place: Place
    names: tuple[str, ...]
    parameters: Resource  # of RunInstances
    new_group: str  # the placement group to create for the request, "" for none
    internet: Internet
    ssh_user: str
    ssh_port: int

    @property
    def token(self) -> str:
        """The client token, with which EC2 recognizes a repeated request."""
        return str(self.parameters["ClientToken"])

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the machines."""
        return read_tags(self.parameters["TagSpecifications"][0])

    @property
    def placement_group(self) -> str:
        """The placement group of the machines, "" for none."""
        return str(self.parameters.get("Placement", {}).get("GroupName", ""))

    @property
    def host_key(self) -> str:
        """The public half of the host key with which the machines boot."""
        return self.tags.get(BOOT_KEY, "")


@dataclass(frozen=True, kw_only=True)
class RequestGranted(JournalEvent):
    """All machines of a request are running."""

    number: int
    machines: tuple[LaunchedMachine, ...]


@dataclass(frozen=True, kw_only=True)
class RequestRefused(JournalEvent):
    """A request has no machines. Those that EC2 launched all the same were terminated, and are billed."""

    number: int
    code: str = ""
    message: str
    has_no_capacity: bool = False
    machines: tuple[LaunchedMachine, ...]


# --- instances -------------------------------------------------------------------------------------------------------


FORGOTTEN = "EC2 no longer shows it"  # the reason of an end that was not seen


@dataclass(frozen=True, kw_only=True)
class InstanceEnded(JournalEvent):
    """EC2 says that an instance has ended, or no longer shows it."""

    id: str
    name: str
    ended: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class SpotCostKnown(JournalEvent):
    """What an ended spot instance has cost exactly."""

    id: str
    dollars: float


@dataclass(frozen=True, kw_only=True)
class InstancesReleased(JournalEvent):
    """The job is about to terminate some of its instances, and may rent others.

    `is_exchange`: they are broken. A job exchanges only so many.
    """

    ids: tuple[str, ...]
    reason: str
    is_exchange: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpiryChanged(JournalEvent):
    """Instances have another end of their time (seconds since 1970), and are about to get it as a tag."""

    ids: tuple[str, ...]
    expires: float


@dataclass(frozen=True, kw_only=True)
class AddressRequested(JournalEvent):
    """An instance is about to get a public address (Elastic IP), the only one of its job."""

    id: str


@dataclass(frozen=True, kw_only=True)
class PublicAddressRequested(JournalEvent):
    """A running instance is about to get a public address of its own, because it has several network cards."""

    id: str


@dataclass(frozen=True, kw_only=True)
class PublicAddressRefused(JournalEvent):
    """EC2 refused an instance its public address. From here on the job rents behind a NAT gateway."""

    id: str
    message: str


@dataclass(frozen=True, kw_only=True)
class NatGatewayRequested(JournalEvent):
    """The job is about to get a NAT gateway in a region."""

    region: str


@dataclass(frozen=True, kw_only=True)
class HostKeyReplaced(JournalEvent):
    """An instance has generated a host key of its own."""

    id: str
    key: str


# --- launches of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobAdopted(JournalEvent):
    """This computer has adopted the job. All events before this one were rebuilt from what EC2 says of the machines.

    `claim` is the ID by which this computer is registered as the job's supervisor. `dollars` is what the job had cost
    apart from the machines in this journal.
    """

    claim: str
    dollars: float


@dataclass(frozen=True, kw_only=True)
class LaunchStarted(JournalEvent):
    """A start or a resume of the job."""

    launch_id: str


@dataclass(frozen=True, kw_only=True)
class LaunchMoved(JournalEvent):
    """A launch continues on other instances, under a new launch ID."""

    launch_id: str


@dataclass(frozen=True, kw_only=True)
class TerminationStarted(JournalEvent):
    """All instances of the job are about to be terminated."""

    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TerminationFinished(JournalEvent):
    """Nothing of the job is left in a region."""


# --- the stack -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StackChange(JournalEvent):
    """A resource of a region's stack is about to be created, changed or deleted."""

    intent: str  # "make bucket"
    region: str
    names: dict[str, str]  # parameters of the call that name resources


EVENT_TYPES = {event_type.__name__: event_type for event_type in JournalEvent.__subclasses__()}


def encode_event(event: JournalEvent) -> dict[str, object]:
    """Return an event as plain data for JSON, with its time and kind first."""
    return {"time": event.time, "what": type(event).__name__, **encode(event)}


def decode_event(data: Mapping[str, object], source: str) -> JournalEvent:
    """Return the event that plain data describes. `source` says in a message where the data is from.

    Raises `DamagedRecord` for an unknown kind, a missing field or a wrong type.
    """
    event_type = EVENT_TYPES.get(str(data.get("what")))
    if event_type is None:
        raise DamagedRecord(f"{source}: no kind of event is called {data.get('what')!r}")
    return decode(event_type, data, source)
