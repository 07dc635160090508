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
from infra.aws.client import Account, call, call_with_retry, paginate
from infra.aws.errors import KIND_BY_CODE, CloudError, ErrorKind, classify_error, explain_error

from .request import machine_name_in_range

NOT_BILLED_STATES = ("shutting-down", "terminated", "stopping", "stopped")  # of these none trains, and none comes back
TERMINATING_STATES = ("shutting-down", "terminated")  # the disk of a stopped machine still costs
INSTANCE_VISIBILITY_SECONDS = 60.0  # until a machine that was asked for must be visible by its tags
TERMINATE_TIMEOUT_SECONDS = 600.0
LEFTOVER_IN_USE_SECONDS = 30.0  # that EC2 may take to see that what has ended uses nothing more
INSTANCE_POLL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One machine. Times in seconds since 1970, `ended` None while it bills; `name` is its number in the job."""

    id: str
    job_uid: str
    name: str
    state: str
    region: str
    zone: str
    type: str
    market: str
    private_ip: str
    public_ip: str
    launch_time: float
    end_time: float | None
    end_reason: str
    launch_token: str
    placement_group: str
    spot_request_id: str
    instance_profile: str
    primary_interface_id: str
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def is_billed(self) -> bool:
        """Whether it costs money now."""
        return self.state not in NOT_BILLED_STATES


def parse_instance(description: dict[str, Any], region: str) -> Instance:
    """Return an instance of DescribeInstances."""
    own, place = aws_tags.read_tags(description), description.get("Placement", {})
    nics = description.get("NetworkInterfaces") or [{}]
    state = description["State"]["Name"]
    reason = description.get("StateReason", {}).get("Code", "") or description.get("StateTransitionReason", "")
    launched = description["LaunchTime"].timestamp()
    return Instance(
        id=description["InstanceId"], job_uid=own.get(aws_tags.JOB, ""), state=state, region=region,
        zone=place.get("AvailabilityZone", ""), type=description["InstanceType"],
        name=machine_name_in_range(own.get(aws_tags.MACHINE, ""), int(description.get("AmiLaunchIndex", 0))),
        market=description.get("InstanceLifecycle", "on-demand"), private_ip=description.get("PrivateIpAddress", ""),
        public_ip=description.get("PublicIpAddress", ""), launch_time=launched,
        end_time=_parse_end_time(description, launched) if state in NOT_BILLED_STATES else None, end_reason=reason if state in NOT_BILLED_STATES else "",
        launch_token=own.get(aws_tags.LAUNCH, ""), placement_group=place.get("GroupName", ""), spot_request_id=description.get("SpotInstanceRequestId", ""),
        instance_profile=description.get("IamInstanceProfile", {}).get("Arn", ""), tags=own,
        primary_interface_id=next((one.get("NetworkInterfaceId", "") for one in nics if _is_primary(one)), ""),
    )  # fmt: skip


def _is_primary(nic: dict[str, Any]) -> bool:
    attached = nic.get("Attachment", {})
    return not attached.get("DeviceIndex") and not attached.get("NetworkCardIndex")


def _parse_end_time(description: dict[str, Any], launch_time: float) -> float:
    """When it ended, as EC2 notes it in brackets; else now, for it has just been seen to have ended."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", description.get("StateTransitionReason", ""))
    if not found:
        return max(launch_time, time.time())
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def describe(account: Account, required_tags: aws_tags.Tags, ids: Sequence[str] = ()) -> list[Instance]:
    """Return what bears these tags, and these machines, those that ended a while ago too. Raises `CloudError`.

    Machines of `ids` that are not seen yet are left out.
    """
    found = {
        one.id: one
        for one in _describe(
            account, Filters=aws_tags.make_filters({aws_tags.STACK: aws_tags.STACK_VALUE, **required_tags})
        )
    }
    missing = [one for one in ids if one not in found]
    for chunk in [missing[at : at + 200] for at in range(0, len(missing), 200)]:
        found |= {one.id: one for one in _describe(account, Filters=aws_tags.make_filters({}, instance_id=chunk))}
    return sorted(found.values(), key=lambda one: (one.launch_time, int(one.name or 0), one.id))


def describe_all(account: Account, required_tags: aws_tags.Tags, ids: Sequence[str]) -> list[Instance]:
    """Return what bears these tags, and these machines, but for those of which EC2 says that it does not know them.

    An answer that is silent about a machine says nothing at all: it is not taken for its end. Raises `CloudError`.
    """
    found = describe(account, required_tags)
    for id in set(ids) - {one.id for one in found}:
        try:
            one = _describe(account, InstanceIds=[id])
        except CloudError as error:
            if KIND_BY_CODE.get(error.code) is not ErrorKind.NOT_VISIBLE_YET:
                raise
        else:
            if not one:
                raise CloudError(f"EC2 tells nothing of {id}; it is asked again")
            found += one
    return found


def _describe(account: Account, **params: Any) -> list[Instance]:
    found = paginate(
        "see the machines (ec2:DescribeInstances)", account.ec2, "describe_instances", "Reservations", **params
    )
    return [parse_instance(one, account.region) for reservation in found for one in reservation["Instances"]]


def live_by_name(found_instances: Iterable[Instance]) -> dict[str, Instance]:
    """Return the machines that are there, by name: of several the one that was launched last."""
    return {one.name: one for one in found_instances if one.is_billed and one.name}


def validation_error(found_instances: Sequence[Instance], request: dict[str, Any], zone: str) -> str:
    """Return what about these machines is not as RunInstances was asked for, "" when all is well so far."""
    ended = [one for one in found_instances if not one.is_billed]
    if ended:
        return f"{ended[0].id} ended before it began: {ended[0].end_reason or ended[0].state}"
    running = [one for one in found_instances if one.state == "running"]
    if any(one.zone != zone for one in running):
        return f"machines came in other zones than {zone}"
    if any(one.placement_group != request.get("Placement", {}).get("GroupName", "") for one in running):
        return "machines came outside their placement group"
    if any(not one.instance_profile for one in running):
        return "machines came without their role"
    if len({one.private_ip for one in running}) != len(running):
        return "machines came with the same address"
    return ""


# --- the end ------------------------------------------------------------------------------------------------------


def terminate(account: Account, ids: Sequence[str]) -> None:
    """Ask for the end of machines; no error on one that is not there. Raises `CloudError`."""
    for chunk in [list(ids[at : at + 100]) for at in range(0, len(ids), 100)]:
        try:
            account.ec2.terminate_instances(InstanceIds=chunk)
        except Exception as error:
            if classify_error(error) is not ErrorKind.NOT_VISIBLE_YET:
                raise explain_error(error, "end machines (ec2:TerminateInstances)") from error
            if len(chunk) > 1:  # one unknown id, and EC2 ends none of them
                for one in chunk:
                    terminate(account, [one])


def terminate_and_wait(
    account: Account,
    job_uid: str,
    ids: Sequence[str],
    log: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    timeout_seconds: float = TERMINATE_TIMEOUT_SECONDS,
    last_request_time: float = 0.0,
) -> list[Instance]:
    """End all machines of a job, those named and those that bear its tag, and return when EC2 says so.

    `since` is when the last machine was asked for: until a minute after that, one may still appear. Returns those that
    are not gone after so many seconds, [] when all are. Raises `CloudError`.
    """
    deadline, asked, told = time.monotonic() + timeout_seconds, set[str](), -1
    while True:
        found = describe_all(account, {aws_tags.JOB: job_uid}, ids)
        alive = [one for one in found if one.state not in TERMINATING_STATES and one.id not in asked]
        if alive:
            terminate(account, [one.id for one in alive])
            asked |= {one.id for one in alive}
        left = [one for one in found if one.state != "terminated"]
        unseen = time.time() - last_request_time < INSTANCE_VISIBILITY_SECONDS
        if not left and not unseen:
            return []
        if time.monotonic() > deadline:
            return left
        if len(left) != told and left:
            log(f"waiting until EC2 says that {len(left)} of {len(found)} machines are gone")
            told = len(left)
        asked -= {one.id for one in left if one.state not in TERMINATING_STATES}  # accepted, and not done: asked again
        pause(INSTANCE_POLL_SECONDS)


def remove_leftovers(
    account: Account,
    required_tags: aws_tags.Tags,
    pause: Callable[[float], None] = time.sleep,
    timeout_seconds: float = LEFTOVER_IN_USE_SECONDS,
) -> list[str]:
    """Remove what machines leave behind and costs, or clutters: spot requests, addresses, disks, placement groups.

    Only what bears our tag and `wanted`; what is still in use is tried again for so many seconds. Returns a line for
    each thing that is still there. Raises `CloudError`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left, busy = _remove_leftovers_once(account, {aws_tags.STACK: aws_tags.STACK_VALUE, **required_tags})
        if not busy or time.monotonic() >= deadline:
            return left + busy
        pause(INSTANCE_POLL_SECONDS)


def _remove_leftovers_once(account: Account, own_tags: aws_tags.Tags) -> tuple[list[str], list[str]]:
    """Once; returns a line for each thing that may not be removed, and for each that is still in use."""
    left = list[str](), list[str]()
    for one in spot_requests(account, own_tags):
        id = one["SpotInstanceRequestId"]
        _try_remove(left, f"spot request {id}", account.ec2.cancel_spot_instance_requests, SpotInstanceRequestIds=[id])
    for one in elastic_ips(account, own_tags):
        _try_remove(left, f"address {one['PublicIp']}", _release_elastic_ip, account=account, address=one)
    for volume in detached_volumes(account, own_tags):
        _try_remove(
            left, f"disk {volume['VolumeId']} of {volume['Size']} GB", _delete_volume, account=account, volume=volume
        )
    for group in placement_groups(account, own_tags):
        name = group["GroupName"]
        _try_remove(left, f"placement group {name}", account.ec2.delete_placement_group, GroupName=name)
    return left


def _try_remove(
    remaining: tuple[list[str], list[str]], label: str, function: Callable[..., Any], **params: Any
) -> None:
    try:
        function(**params)
    except Exception as error:
        react = classify_error(error)
        if react is ErrorKind.IN_USE:
            remaining[1].append(f"{label}: still in use")
        elif react not in (ErrorKind.NOT_VISIBLE_YET, ErrorKind.NOT_FOUND):
            failed = explain_error(error, f"remove {label}")
            remaining[0].append(str(failed))


def _release_elastic_ip(account: Account, address: dict[str, Any]) -> None:
    if address.get("AssociationId"):
        account.ec2.disassociate_address(AssociationId=address["AssociationId"])
    account.ec2.release_address(AllocationId=address["AllocationId"])


def _delete_volume(account: Account, volume: dict[str, Any]) -> None:
    if volume["State"] not in ("deleting", "deleted"):
        account.ec2.delete_volume(VolumeId=volume["VolumeId"])


def spot_requests(account: Account, own_tags: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return spot requests that could still bring a machine, as EC2 describes them."""
    what, words = (
        "see spot requests (ec2:DescribeSpotInstanceRequests)",
        aws_tags.make_filters(own_tags, state=["open"]),
    )
    return paginate(what, account.ec2, "describe_spot_instance_requests", "SpotInstanceRequests", Filters=words)


def elastic_ips(account: Account, own_tags: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return public addresses of ours, as EC2 describes them."""
    said = call(
        "see addresses (ec2:DescribeAddresses)", account.ec2.describe_addresses, Filters=aws_tags.make_filters(own_tags)
    )
    return list(said["Addresses"])


def attach_elastic_ip(account: Account, instance: Instance, own_tags: aws_tags.Tags) -> None:
    """Give a machine with several network cards a public address, the only one of its job. Safe to do again.

    An address that the job has already moves to this machine. Raises `CloudError`.
    """
    found = elastic_ips(account, {aws_tags.STACK: aws_tags.STACK_VALUE, aws_tags.JOB: own_tags[aws_tags.JOB]})
    if found:
        allocation = found[0]["AllocationId"]
    else:
        words = {"Domain": "vpc", "TagSpecifications": aws_tags.tag_specifications(["elastic-ip"], own_tags)}
        said = call("get an address (ec2:AllocateAddress)", account.ec2.allocate_address, **words)
        allocation = said["AllocationId"]
    call_with_retry(
        "give a machine its address (ec2:AssociateAddress)", account.ec2.associate_address,
        AllocationId=allocation, NetworkInterfaceId=instance.primary_interface_id, AllowReassociation=True,
    )  # fmt: skip


def detached_volumes(account: Account, own_tags: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return disks of ours that belong to no machine any more, as EC2 describes them."""
    words = aws_tags.make_filters(own_tags, status=["available", "error"])
    return paginate("see disks (ec2:DescribeVolumes)", account.ec2, "describe_volumes", "Volumes", Filters=words)


def placement_groups(account: Account, own_tags: aws_tags.Tags) -> list[dict[str, Any]]:
    """Return placement groups of ours, as EC2 describes them."""
    said = call(
        "see placement groups (ec2:DescribePlacementGroups)",
        account.ec2.describe_placement_groups,
        Filters=aws_tags.make_filters(own_tags),
    )
    return list(said["PlacementGroups"])


def describe_region(account: Account) -> list[Instance]:
    """Return all machines in a region that bear our tag, of all jobs. Raises `CloudError`."""
    return describe(account, {})
