"""The machines of a job as EC2 describes them, found by their tags; how they end; what is left.

One DescribeInstances tells of all machines of a job, however many. A machine that EC2 does not show is not gone: what
was just rented is seen late (AWS, "Eventual consistency"). Gone is what EC2 calls terminated.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call, call_soon, pages
from infra.aws.errors import REACTIONS, CloudError, Reaction, explain, reaction

from .request import unspan

GONE = ("shutting-down", "terminated", "stopping", "stopped")  # of these none trains, and none comes back
ENDING = ("shutting-down", "terminated")  # the disk of a stopped machine still costs
LATE_SECONDS = 60.0  # until a machine that was asked for must be visible by its tags
END_SECONDS = 600.0
BUSY_SECONDS = 30.0  # that EC2 may take to see that what has ended uses nothing more
EACH = 2.0


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One machine. Times in seconds since 1970, `ended` None while it bills; `name` is its number in the job."""

    id: str
    uid: str
    name: str
    state: str
    region: str
    zone: str
    type: str
    market: str
    private: str
    public: str
    launched: float
    ended: float | None
    why: str
    token: str
    group: str
    request: str
    profile: str
    nic: str
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def bills(self) -> bool:
        """Whether it costs money now."""
        return self.state not in GONE


def read(said: dict[str, Any], region: str) -> Instance:
    """Return an instance of DescribeInstances."""
    own, place = aws_tags.read(said), said.get("Placement", {})
    nics = said.get("NetworkInterfaces") or [{}]
    state = said["State"]["Name"]
    reason = said.get("StateReason", {}).get("Code", "") or said.get("StateTransitionReason", "")
    launched = said["LaunchTime"].timestamp()
    return Instance(
        id=said["InstanceId"], uid=own.get(aws_tags.JOB, ""), state=state, region=region,
        zone=place.get("AvailabilityZone", ""), type=said["InstanceType"],
        name=unspan(own.get(aws_tags.MACHINE, ""), int(said.get("AmiLaunchIndex", 0))),
        market=said.get("InstanceLifecycle", "on-demand"), private=said.get("PrivateIpAddress", ""),
        public=said.get("PublicIpAddress", ""), launched=launched,
        ended=_ended(said, launched) if state in GONE else None, why=reason if state in GONE else "",
        token=own.get(aws_tags.LAUNCH, ""), group=place.get("GroupName", ""), request=said.get("SpotInstanceRequestId", ""),
        profile=said.get("IamInstanceProfile", {}).get("Arn", ""), tags=own,
        nic=next((one.get("NetworkInterfaceId", "") for one in nics if _first(one)), ""),
    )  # fmt: skip


def _first(nic: dict[str, Any]) -> bool:
    attached = nic.get("Attachment", {})
    return not attached.get("DeviceIndex") and not attached.get("NetworkCardIndex")


def _ended(said: dict[str, Any], launched: float) -> float:
    """When it ended, as EC2 notes it in brackets; else now, for it has just been seen to have ended."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", said.get("StateTransitionReason", ""))
    if not found:
        return max(launched, time.time())
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def describe(account: Account, wanted: aws_tags.Tags, ids: Sequence[str] = ()) -> list[Instance]:
    """Return what bears these tags, and these machines, those that ended a while ago too. Raises `CloudError`.

    Machines of `ids` that are not seen yet are left out.
    """
    found = {
        one.id: one for one in _describe(account, Filters=aws_tags.filters({aws_tags.STACK: aws_tags.OURS, **wanted}))
    }
    missing = [one for one in ids if one not in found]
    for chunk in [missing[at : at + 200] for at in range(0, len(missing), 200)]:
        found |= {one.id: one for one in _describe(account, Filters=aws_tags.filters({}, instance_id=chunk))}
    return sorted(found.values(), key=lambda one: (one.launched, int(one.name or 0), one.id))


def all_told(account: Account, wanted: aws_tags.Tags, ids: Sequence[str]) -> list[Instance]:
    """Return what bears these tags, and these machines, but for those of which EC2 says that it does not know them.

    An answer that is silent about a machine says nothing at all: it is not taken for its end. Raises `CloudError`.
    """
    found = describe(account, wanted)
    for id in set(ids) - {one.id for one in found}:
        try:
            one = _describe(account, InstanceIds=[id])
        except CloudError as error:
            if REACTIONS.get(error.code) is not Reaction.LATER:
                raise
        else:
            if not one:
                raise CloudError(f"EC2 tells nothing of {id}; it is asked again")
            found += one
    return found


def _describe(account: Account, **words: Any) -> list[Instance]:
    found = pages(
        "see the machines (ec2:DescribeInstances)", account.ec2, "describe_instances", "Reservations", **words
    )
    return [read(one, account.region) for reservation in found for one in reservation["Instances"]]


def present(found: Iterable[Instance]) -> dict[str, Instance]:
    """Return the machines that are there, by name: of several the one that was launched last."""
    return {one.name: one for one in found if one.bills and one.name}


def wrong(found: Sequence[Instance], request: dict[str, Any], zone: str) -> str:
    """Return what about these machines is not as RunInstances was asked for, "" when all is well so far."""
    ended = [one for one in found if not one.bills]
    if ended:
        return f"{ended[0].id} ended before it began: {ended[0].why or ended[0].state}"
    running = [one for one in found if one.state == "running"]
    if any(one.zone != zone for one in running):
        return f"machines came in other zones than {zone}"
    if any(one.group != request.get("Placement", {}).get("GroupName", "") for one in running):
        return "machines came outside their placement group"
    if any(not one.profile for one in running):
        return "machines came without their role"
    if len({one.private for one in running}) != len(running):
        return "machines came with the same address"
    return ""


# --- the end ------------------------------------------------------------------------------------------------------


def terminate(account: Account, ids: Sequence[str]) -> None:
    """Ask for the end of machines; no error on one that is not there. Raises `CloudError`."""
    for chunk in [list(ids[at : at + 100]) for at in range(0, len(ids), 100)]:
        try:
            account.ec2.terminate_instances(InstanceIds=chunk)
        except Exception as error:
            if reaction(error) is not Reaction.LATER:
                raise explain(error, "end machines (ec2:TerminateInstances)") from error
            if len(chunk) > 1:  # one unknown id, and EC2 ends none of them
                for one in chunk:
                    terminate(account, [one])


def end(
    account: Account,
    uid: str,
    ids: Sequence[str],
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    seconds: float = END_SECONDS,
    since: float = 0.0,
) -> list[Instance]:
    """End all machines of a job, those named and those that bear its tag, and return when EC2 says so.

    `since` is when the last machine was asked for: until a minute after that, one may still appear. Returns those that
    are not gone after so many seconds, [] when all are. Raises `CloudError`.
    """
    deadline, asked, told = time.monotonic() + seconds, set[str](), -1
    while True:
        found = all_told(account, {aws_tags.JOB: uid}, ids)
        alive = [one for one in found if one.state not in ENDING and one.id not in asked]
        if alive:
            terminate(account, [one.id for one in alive])
            asked |= {one.id for one in alive}
        left = [one for one in found if one.state != "terminated"]
        unseen = time.time() - since < LATE_SECONDS
        if not left and not unseen:
            return []
        if time.monotonic() > deadline:
            return left
        if len(left) != told and left:
            say(f"waiting until EC2 says that {len(left)} of {len(found)} machines are gone")
            told = len(left)
        asked -= {one.id for one in left if one.state not in ENDING}  # accepted, and not done: asked again
        pause(EACH)


def sweep(
    account: Account, wanted: aws_tags.Tags, pause: Callable[[float], None] = time.sleep, seconds: float = BUSY_SECONDS
) -> list[str]:
    """Remove what machines leave behind and costs, or clutters: spot requests, addresses, disks, placement groups.

    Only what bears our tag and `wanted`; what is still in use is tried again for so many seconds. Returns a line for
    each thing that is still there. Raises `CloudError`.
    """
    deadline = time.monotonic() + seconds
    while True:
        left, busy = _sweep(account, {aws_tags.STACK: aws_tags.OURS, **wanted})
        if not busy or time.monotonic() >= deadline:
            return left + busy
        pause(EACH)


def _sweep(account: Account, mine: aws_tags.Tags) -> tuple[list[str], list[str]]:
    """Once; returns a line for each thing that may not be removed, and for each that is still in use."""
    left = list[str](), list[str]()
    for one in spot_requests(account, mine):
        id = one["SpotInstanceRequestId"]
        _try(left, f"spot request {id}", account.ec2.cancel_spot_instance_requests, SpotInstanceRequestIds=[id])
    for one in addresses(account, mine):
        _try(left, f"address {one['PublicIp']}", _release, account=account, address=one)
    for volume in volumes(account, mine):
        _try(left, f"disk {volume['VolumeId']} of {volume['Size']} GB", _delete_volume, account=account, volume=volume)
    for group in groups(account, mine):
        name = group["GroupName"]
        _try(left, f"placement group {name}", account.ec2.delete_placement_group, GroupName=name)
    return left


def _try(left: tuple[list[str], list[str]], what: str, function: Callable[..., Any], **words: Any) -> None:
    try:
        function(**words)
    except Exception as error:
        react = reaction(error)
        if react is Reaction.BUSY:
            left[1].append(f"{what}: still in use")
        elif react not in (Reaction.LATER, Reaction.GONE):
            failed = explain(error, f"remove {what}")
            left[0].append(str(failed))


def _release(account: Account, address: dict[str, Any]) -> None:
    if address.get("AssociationId"):
        account.ec2.disassociate_address(AssociationId=address["AssociationId"])
    account.ec2.release_address(AllocationId=address["AllocationId"])


def _delete_volume(account: Account, volume: dict[str, Any]) -> None:
    if volume["State"] not in ("deleting", "deleted"):
        account.ec2.delete_volume(VolumeId=volume["VolumeId"])


def spot_requests(account: Account, mine: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return spot requests that could still bring a machine, as EC2 describes them."""
    what, words = "see spot requests (ec2:DescribeSpotInstanceRequests)", aws_tags.filters(mine, state=["open"])
    return pages(what, account.ec2, "describe_spot_instance_requests", "SpotInstanceRequests", Filters=words)


def addresses(account: Account, mine: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return public addresses of ours, as EC2 describes them."""
    said = call("see addresses (ec2:DescribeAddresses)", account.ec2.describe_addresses, Filters=aws_tags.filters(mine))
    return list(said["Addresses"])


def open_gate(account: Account, one: Instance, own: aws_tags.Tags) -> None:
    """Give a machine with several network cards a public address, the only one of its job. Safe to do again.

    An address that the job has already moves to this machine. Raises `CloudError`.
    """
    found = addresses(account, {aws_tags.STACK: aws_tags.OURS, aws_tags.JOB: own[aws_tags.JOB]})
    if found:
        allocation = found[0]["AllocationId"]
    else:
        words = {"Domain": "vpc", "TagSpecifications": aws_tags.specifications(["elastic-ip"], own)}
        said = call("get an address (ec2:AllocateAddress)", account.ec2.allocate_address, **words)
        allocation = said["AllocationId"]
    call_soon(
        "give a machine its address (ec2:AssociateAddress)", account.ec2.associate_address,
        AllocationId=allocation, NetworkInterfaceId=one.nic, AllowReassociation=True,
    )  # fmt: skip


def volumes(account: Account, mine: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return disks of ours that belong to no machine any more, as EC2 describes them."""
    words = aws_tags.filters(mine, status=["available", "error"])
    return pages("see disks (ec2:DescribeVolumes)", account.ec2, "describe_volumes", "Volumes", Filters=words)


def groups(account: Account, mine: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return placement groups of ours, as EC2 describes them."""
    said = call(
        "see placement groups (ec2:DescribePlacementGroups)",
        account.ec2.describe_placement_groups,
        Filters=aws_tags.filters(mine),
    )
    return list(said["PlacementGroups"])


def all_of(account: Account) -> list[Instance]:
    """Return all machines in a region that bear our tag, of all jobs. Raises `CloudError`."""
    return describe(account, {})
