"""The way of a job's machines to the internet: a public address each, or a NAT gateway for the time of the job.

Behind a NAT gateway the machines are in a subnet of the job, whose route table sends everything to the gateway. Only
the answers to the user's ssh connections leave by the internet gateway, so that the jump host can have an address.
S3 traffic uses the stack's endpoint, because the gateway costs by the GB. All parts carry the job's tag; the gateway
and its address are billed until `instances.remove_leftovers` has removed them.

Sources: AWS, ModifyNetworkInterfaceAttribute ("will only apply to the primary network interface"), "NAT gateways",
"Route table concepts" (the most specific route decides).
"""

import hashlib
import logging
import time
from collections.abc import Callable

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call_with_retry, list_tagged
from infra.aws.stack import network
from infra.aws.stack.resources import StackContext
from infra.aws.stack.stack import Stack
from infra.aws.tags import Resource
from infra.errors import CloudError

logger = logging.getLogger(__name__)

NAT_TAG = "imgnet:nat"  # of the gateway's address, which must not become the jump host's
NAT_START_SECONDS = 600.0
NAT_POLL_SECONDS = 2.0
LIVE_STATES = ("pending", "available", "failed", "deleting")


def give_public_address(account: Account, interface_id: str) -> None:
    """Give a running machine an ordinary public address on its primary interface. Idempotent. Raises `CloudError`.

    RunInstances cannot, when the machine has several interfaces.
    """
    call_with_retry(
        "give a machine a public address (ec2:ModifyNetworkInterfaceAttribute)",
        account.ec2.modify_network_interface_attribute,
        NetworkInterfaceId=interface_id,
        AssociatePublicIpAddress=True,
    )


# --- NAT gateway ------------------------------------------------------------------------------------------------------


def ensure_subnet(
    context: StackContext,
    stack: Stack,
    zone: str,
    own_tags: aws_tags.Tags,
    ssh_address: str,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Return the job's subnet in a zone, which leads through the job's NAT gateway; create what is missing.

    Each creation is recorded in the context's journal before. Safe to call again after a crash. `ssh_address` is the
    range that may connect over ssh. Raises `CloudError`, and what `pause` raises.
    """
    account = context.account
    job_tags = {name: own_tags[name] for name in (aws_tags.STACK, aws_tags.JOB)}
    gateway = _ensure_gateway(context, stack, zone, job_tags, own_tags, pause)
    table = _ensure_table(context, stack, gateway, job_tags, own_tags)
    network.route_to_internet(context, stack.vpc, table, ssh_address)
    subnets = [
        subnet for subnet in list_tagged(account, "describe_subnets", job_tags) if subnet["AvailabilityZone"] == zone
    ]
    if subnets:
        subnet_id = str(subnets[0]["SubnetId"])
    else:
        specifications = aws_tags.tag_specifications(["subnet"], own_tags)
        subnet_id = network.create_job_subnet(context, stack.vpc, zone, specifications)
    context.create(f"route of {subnet_id}", account.ec2.associate_route_table, RouteTableId=table, SubnetId=subnet_id)
    return subnet_id


def _ensure_gateway(
    context: StackContext,
    stack: Stack,
    zone: str,
    job_tags: aws_tags.Tags,
    own_tags: aws_tags.Tags,
    pause: Callable[[float], None],
) -> str:
    """Return the job's NAT gateway as soon as it is available."""
    ec2 = context.account.ec2
    if not _usable_gateways(context.account, job_tags):
        logger.info("creating a NAT gateway; it takes a few minutes")
        nat_tags = {NAT_TAG: "yes"}
        addresses = list_tagged(context.account, "describe_addresses", {**job_tags, **nat_tags})
        if not addresses:
            specifications = aws_tags.tag_specifications(["elastic-ip"], {**own_tags, **nat_tags})
            context.create(
                "address of the NAT gateway", ec2.allocate_address, Domain="vpc", TagSpecifications=specifications
            )
            addresses = list_tagged(context.account, "describe_addresses", {**job_tags, **nat_tags})
        if not addresses:
            raise CloudError("the address of the NAT gateway was allocated, but AWS does not show it")
        allocation_id = addresses[0]["AllocationId"]
        context.create(
            "NAT gateway",
            ec2.create_nat_gateway,
            SubnetId=stack.subnets[zone],
            AllocationId=allocation_id,
            ClientToken=hashlib.sha256(f"{own_tags[aws_tags.JOB]} {allocation_id}".encode()).hexdigest(),
            TagSpecifications=aws_tags.tag_specifications(["natgateway"], own_tags),
        )
    deadline = time.monotonic() + NAT_START_SECONDS
    while time.monotonic() < deadline:
        gateways = _usable_gateways(context.account, job_tags)
        if gateways and gateways[0]["State"] == "available":
            return str(gateways[0]["NatGatewayId"])
        pause(NAT_POLL_SECONDS)
    raise CloudError(f"the NAT gateway is not available after {NAT_START_SECONDS:.0f} s")


def _usable_gateways(account: Account, job_tags: aws_tags.Tags) -> list[Resource]:
    return list_tagged(account, "describe_nat_gateways", job_tags, state=["pending", "available"])


def _ensure_table(
    context: StackContext, stack: Stack, gateway: str, job_tags: aws_tags.Tags, own_tags: aws_tags.Tags
) -> str:
    """Return the job's route table: to S3 by the stack's endpoint, to all else by the NAT gateway."""
    ec2 = context.account.ec2
    if not list_tagged(context.account, "describe_route_tables", job_tags):
        specifications = aws_tags.tag_specifications(["route-table"], own_tags)
        context.create(
            "route table of the job", ec2.create_route_table, VpcId=stack.vpc, TagSpecifications=specifications
        )
    tables = list_tagged(context.account, "describe_route_tables", job_tags)
    if not tables:
        raise CloudError("the route table of the job was created, but AWS does not show it")
    table = str(tables[0]["RouteTableId"])
    context.create(
        "route through the NAT gateway",
        ec2.create_route,
        RouteTableId=table,
        DestinationCidrBlock=network.ANY_IPV4,
        NatGatewayId=gateway,
    )
    network.add_to_s3_endpoint(context, stack.vpc, table)
    return table
