"""EC2 instances of a job: found by tag, terminated, and what they leave behind removed.

One DescribeInstances call returns all machines of a job. A machine that EC2 does not show is not gone: a new one
becomes visible late (AWS, "Eventual consistency"). Only a machine that EC2 calls terminated is gone, or one that EC2
does not know an hour after its launch.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call, call_with_retry, list_tagged, paginate
from infra.aws.error_codes import KIND_BY_CODE, ErrorKind, classify_error, explain_error
from infra.aws.stack import network
from infra.aws.stack.resources import NOT_FOUND_KINDS, StackContext, ignore_errors
from infra.aws.tags import Resource
from infra.errors import CloudError
from train.tools import host

from . import internet

logger = logging.getLogger(__name__)

NOT_BILLED_STATES = ("shutting-down", "terminated", "stopping", "stopped")  # such a machine trains no more
TERMINATING_STATES = ("shutting-down", "terminated")  # a stopped machine is not among them: its disk is billed
INSTANCE_VISIBILITY_SECONDS = 60.0  # within which a requested machine must become visible by its tags
TERMINATE_TIMEOUT_SECONDS = 600.0
LEFTOVER_IN_USE_SECONDS = 30.0  # within which EC2 must see that a terminated machine uses nothing any more
NAT_DELETE_SECONDS = 300.0  # within which a NAT gateway must be deleted; before it, its address cannot be released
INSTANCE_POLL_SECONDS = 2.0
LEFTOVER_OPERATIONS: dict[str, dict[str, Sequence[str]]] = {  # with the filters of each
    "describe_spot_instance_requests": {"state": ["open"]},  # could still launch a machine
    "describe_nat_gateways": {"state": internet.LIVE_STATES},
    "describe_addresses": {},
    "describe_volumes": {"status": ["available", "error"]},  # of no machine
    "describe_placement_groups": {},
    "describe_subnets": {},
    "describe_route_tables": {},
}
TERMINATE_BATCH = 100  # instance IDs in one TerminateInstances call


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One machine, as EC2 describes it. Times are in seconds since 1970. Unknown strings are "".

    Spot requests may give all their machines the `launch_index` 0.
    """

    id: str
    name: str  # the machine's number in its job
    job_uid: str
    state: str
    region: str
    zone: str
    type: str
    market: str
    image: str
    private_ip: str
    public_ip: str
    launch_time: float
    end_time: float | None  # None while the machine is billed
    end_reason: str  # as EC2 writes it, "" while the machine lives
    launch_index: int  # its number in the request that brought it
    launch_token: str
    placement_group: str
    primary_interface_id: str
    expires: str  # when it powers itself off at the latest
    boots_slowly: bool  # a whole computer, whose firmware takes minutes
    reservation: str = ""  # the one that its request named, or the ARN of a group of them
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def is_billed(self) -> bool:
        """Whether the machine costs money now."""
        return self.state not in NOT_BILLED_STATES


def parse_instance(description: Resource, region: str) -> Instance:
    """Return the instance of a DescribeInstances entry."""
    own_tags = aws_tags.read_tags(description)
    placement = description.get("Placement", {})
    target = description.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    interfaces = description.get("NetworkInterfaces") or [{}]
    state = description["State"]["Name"]
    has_ended = state in NOT_BILLED_STATES
    reason = description.get("StateReason", {}).get("Code", "") or description.get("StateTransitionReason", "")
    launch_time = description["LaunchTime"].timestamp()
    return Instance(
        id=description["InstanceId"],
        job_uid=own_tags.get(aws_tags.JOB, ""),
        name=name if (name := own_tags.get(aws_tags.MACHINE, "")).isdecimal() else "",
        launch_index=int(description.get("AmiLaunchIndex", 0)),
        state=state,
        region=region,
        zone=placement.get("AvailabilityZone", ""),
        type=description["InstanceType"],
        image=description.get("ImageId", ""),
        market=description.get("InstanceLifecycle", "on-demand"),
        private_ip=description.get("PrivateIpAddress", ""),
        public_ip=description.get("PublicIpAddress", ""),
        boots_slowly=".metal" in description["InstanceType"],
        reservation=target.get("CapacityReservationResourceGroupArn") or target.get("CapacityReservationId", ""),
        launch_time=launch_time,
        end_time=_parse_end_time(description, launch_time) if has_ended else None,
        end_reason=reason if has_ended else "",
        launch_token=own_tags.get(aws_tags.LAUNCH, ""),
        placement_group=placement.get("GroupName", ""),
        primary_interface_id=next((nic.get("NetworkInterfaceId", "") for nic in interfaces if _is_primary(nic)), ""),
        expires=own_tags.get(aws_tags.EXPIRES, ""),
        tags=own_tags,
    )


def _is_primary(nic: Resource) -> bool:
    attachment = nic.get("Attachment", {})
    return not attachment.get("DeviceIndex") and not attachment.get("NetworkCardIndex")


def _parse_end_time(description: Resource, launch_time: float) -> float:
    """Return when a machine ended: the time that EC2 writes in brackets, else now."""
    reason = description.get("StateTransitionReason", "")
    match = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", reason)
    if not match:
        return max(launch_time, host.unix_time())
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def describe(account: Account, required_tags: aws_tags.Tags) -> list[Instance]:
    """Return the stack's machines that have these tags, including those that ended recently. Raises `CloudError`."""
    filters = aws_tags.make_filters({aws_tags.STACK: aws_tags.STACK_VALUE, **required_tags})
    return sorted(
        _describe(account, Filters=filters),
        key=lambda instance: (instance.launch_time, int(instance.name or 0), instance.id),
    )


def describe_all(account: Account, required_tags: aws_tags.Tags, ids: Sequence[str]) -> list[Instance]:
    """Return the machines that have these tags and those with these IDs, except IDs that EC2 says it does not know.

    Raises `CloudError`, also when a response leaves out an ID without an error: that does not prove its end.
    """
    instances = describe(account, required_tags)
    for instance_id in set(ids) - {instance.id for instance in instances}:
        try:
            described = _describe(account, InstanceIds=[instance_id])
        except CloudError as error:
            if KIND_BY_CODE.get(error.code) is not ErrorKind.NOT_VISIBLE_YET:
                raise
        else:
            if not described:
                raise CloudError(f"EC2's response leaves out {instance_id}; it will be asked again")
            instances += described
    return instances


def _describe(account: Account, **params: object) -> list[Instance]:
    reservations = paginate(
        "list machines (ec2:DescribeInstances)", account.ec2, "describe_instances", "Reservations", **params
    )
    return [
        parse_instance(description, account.region)
        for reservation in reservations
        for description in reservation["Instances"]
    ]


def live_by_name(found_instances: Iterable[Instance]) -> dict[str, Instance]:
    """Return the billed machines by name. Of several with one name, the last of the iterable (latest launch) counts."""
    return {instance.name: instance for instance in found_instances if instance.is_billed and instance.name}


def assign_names(found_instances: Iterable[Instance], names: Sequence[str]) -> list[Instance]:
    """Return the machines of a request with their names, in the order of launch index and ID, which never changes."""
    ordered_instances = sorted(found_instances, key=lambda instance: (instance.launch_index, instance.id))
    return [replace(instance, name=name) for instance, name in zip(ordered_instances, names, strict=False)]


def set_tags(account: Account, ids: Sequence[str], new_tags: aws_tags.Tags) -> None:
    """Set tags of machines. Raises `CloudError`."""
    call_with_retry(
        "tag machines (ec2:CreateTags)",
        account.ec2.create_tags,
        Resources=list(ids),
        Tags=aws_tags.to_aws_tags(new_tags),
    )


def admit_key(account: Account, instance: Instance, user: str, public_key: str) -> None:
    """Let a key log in to a machine for 60 seconds (AWS, API reference, SendSSHPublicKey). Raises `CloudError`.

    The machine's sshd asks its metadata service for such keys; AWS's Ubuntu images have the program that does it (AWS,
    "Install EC2 Instance Connect on your EC2 instances").
    """
    call(
        "log in to a machine (ec2-instance-connect:SendSSHPublicKey)",
        account.instance_connect.send_ssh_public_key,
        InstanceId=instance.id,
        InstanceOSUser=user,
        SSHPublicKey=public_key,
        AvailabilityZone=instance.zone,
    )


def read_console(account: Account, instance_id: str) -> str:
    """Return what a machine has printed on its console, at most 64 KB. Raises `CloudError`."""
    action = "read the console of a machine (ec2:GetConsoleOutput)"
    response = call(action, account.ec2.get_console_output, InstanceId=instance_id, Latest=True)
    return str(response.get("Output", ""))


# --- termination ----------------------------------------------------------------------------------------------------


def terminate(account: Account, ids: Sequence[str]) -> None:
    """Ask EC2 to terminate machines. An unknown ID is no error. Raises `CloudError`."""
    for start in range(0, len(ids), TERMINATE_BATCH):
        batch = list(ids[start : start + TERMINATE_BATCH])
        try:
            account.ec2.terminate_instances(InstanceIds=batch)
        except Exception as error:
            if classify_error(error) is not ErrorKind.NOT_VISIBLE_YET:
                raise explain_error(error, "terminate machines (ec2:TerminateInstances)") from error
            if len(batch) > 1:  # EC2 terminates none of a batch with an unknown ID
                for instance_id in batch:
                    terminate(account, [instance_id])


def terminate_and_wait(
    account: Account,
    job_uid: str,
    ids: Sequence[str],
    pause: Callable[[float], None] = time.sleep,
    timeout_seconds: float = TERMINATE_TIMEOUT_SECONDS,
    has_pending_request: bool = False,
    log_level: int = logging.INFO,
) -> list[Instance]:
    """Terminate the machines with these IDs and those with the job's tag, and wait until EC2 calls them terminated.

    With a pending request, the wait lasts at least a minute: EC2 may take so long to show its machines. Returns the
    machines that are not terminated after `timeout_seconds`. Raises `CloudError`.
    """
    deadline = time.monotonic() + timeout_seconds
    visible_time = host.unix_time() + INSTANCE_VISIBILITY_SECONDS if has_pending_request else 0.0
    requested_ids = set[str]()
    logged_count = -1
    while True:
        instances = describe_all(account, {aws_tags.JOB: job_uid}, ids)
        new_ids = {each.id for each in instances if each.state not in TERMINATING_STATES} - requested_ids
        terminate(account, sorted(new_ids))
        requested_ids |= new_ids
        remaining = [instance for instance in instances if instance.state != "terminated"]
        if not remaining and host.unix_time() >= visible_time:
            return []
        if time.monotonic() > deadline:
            return remaining
        if len(remaining) != logged_count and remaining:
            logger.log(log_level, f"waiting until {len(remaining)} of {len(instances)} machines are terminated")
            logged_count = len(remaining)
        # EC2 accepted these requests without carrying them out: send them again.
        requested_ids -= {instance.id for instance in remaining if instance.state not in TERMINATING_STATES}
        pause(INSTANCE_POLL_SECONDS)


def list_leftovers(account: Account, own_tags: aws_tags.Tags) -> dict[str, list[Resource]]:
    """Return by describing operation what terminated machines leave and has these tags. Raises `CloudError`."""
    return {
        operation: list_tagged(account, operation, own_tags, **filters)
        for operation, filters in LEFTOVER_OPERATIONS.items()
    }


def remove_leftovers(
    account: Account,
    job_uid: str,
    pause: Callable[[float], None] = time.sleep,
    timeout_seconds: float = LEFTOVER_IN_USE_SECONDS,
) -> list[str]:
    """Remove what a job's terminated machines leave. Resources in use are tried again until `timeout_seconds` are over.

    Returns a line for each resource that stays. Raises `CloudError`.
    """
    own_tags = {aws_tags.STACK: aws_tags.STACK_VALUE, aws_tags.JOB: job_uid}
    if timeout_seconds and list_tagged(account, "describe_nat_gateways", own_tags, state=internet.LIVE_STATES):
        timeout_seconds = max(timeout_seconds, NAT_DELETE_SECONDS)
    deadline = time.monotonic() + timeout_seconds
    while True:
        failed, in_use = _remove_leftovers_once(account, own_tags)
        if not in_use or time.monotonic() >= deadline:
            return failed + in_use
        pause(INSTANCE_POLL_SECONDS)


def _remove_leftovers_once(account: Account, own_tags: aws_tags.Tags) -> tuple[list[str], list[str]]:
    """Try once. Return a line for each resource that could not be removed, and for each that is still in use."""
    ec2, failed, in_use = account.ec2, list[str](), list[str]()
    found = list_leftovers(account, own_tags)

    def remove(label: str, function: Callable[..., object], **params: object) -> None:
        try:
            function(**params)
        except Exception as error:
            kind = classify_error(error)
            if kind is ErrorKind.IN_USE:
                in_use.append(f"{label}: still in use")
            elif kind not in NOT_FOUND_KINDS:
                failed.append(str(explain_error(error, f"remove {label}")))

    def release(address: Resource) -> None:
        if association := address.get("AssociationId"):  # unless the end of its machine has removed it meanwhile
            disassociate = ec2.disassociate_address
            ignore_errors(NOT_FOUND_KINDS, call, "disassociate an address", disassociate, AssociationId=association)
        ec2.release_address(AllocationId=address["AllocationId"])

    def delete_table(table: Resource) -> None:
        network.remove_from_s3_endpoint(StackContext(account), table["VpcId"], table["RouteTableId"])
        ec2.delete_route_table(RouteTableId=table["RouteTableId"])

    for request in found["describe_spot_instance_requests"]:
        request_id = request["SpotInstanceRequestId"]
        remove(f"spot request {request_id}", ec2.cancel_spot_instance_requests, SpotInstanceRequestIds=[request_id])
    gateways = found["describe_nat_gateways"]
    for gateway in gateways:
        label = f"NAT gateway {gateway['NatGatewayId']}"
        if gateway["State"] != "deleting":
            remove(label, ec2.delete_nat_gateway, NatGatewayId=gateway["NatGatewayId"])
        in_use.append(f"{label}: being deleted")
    for address in found["describe_addresses"]:
        if gateways and internet.NAT_TAG in aws_tags.read_tags(address):
            in_use.append(f"address {address['PublicIp']}: still in use")
        else:
            remove(f"address {address['PublicIp']}", release, address=address)
    for operation, label, id_key, function in (
        ("describe_volumes", "disk", "VolumeId", ec2.delete_volume),
        ("describe_placement_groups", "placement group", "GroupName", ec2.delete_placement_group),
        ("describe_subnets", "subnet", "SubnetId", ec2.delete_subnet),
    ):
        for resource in found[operation]:
            remove(f"{label} {resource[id_key]}", function, **{id_key: resource[id_key]})
    for table in found["describe_route_tables"]:
        remove(f"route table {table['RouteTableId']}", delete_table, table=table)
    return failed, in_use


def attach_elastic_ip(account: Account, instance: Instance, own_tags: aws_tags.Tags) -> None:
    """Give a machine with several network cards a public address, the only one of its job. Idempotent.

    An address that the job has already moves to this machine. Raises `CloudError`.
    """
    job_tags = {aws_tags.STACK: aws_tags.STACK_VALUE, aws_tags.JOB: own_tags[aws_tags.JOB]}
    addresses = [
        address
        for address in list_tagged(account, "describe_addresses", job_tags)
        if internet.NAT_TAG not in aws_tags.read_tags(address)
    ]
    if addresses:
        allocation_id = addresses[0]["AllocationId"]
    else:
        response = call(
            "allocate an address (ec2:AllocateAddress)",
            account.ec2.allocate_address,
            Domain="vpc",
            TagSpecifications=aws_tags.tag_specifications(["elastic-ip"], own_tags),
        )
        allocation_id = response["AllocationId"]
    call_with_retry(
        "attach an address to a machine (ec2:AssociateAddress)",
        account.ec2.associate_address,
        AllocationId=allocation_id,
        NetworkInterfaceId=instance.primary_interface_id,
        AllowReassociation=True,
    )
