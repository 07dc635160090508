"""The way of a job's machines to the internet: a public address each, or a NAT gateway for the time of the job.

Behind a NAT gateway the machines are in a subnet of the job, whose route table sends everything to the gateway. Only
the answers to the user's ssh connections leave by the internet gateway, so that the jump host can have an address.
S3 traffic uses the stack's endpoint, because the gateway costs by the GB. All parts carry the job's tag; the gateway
and its address are billed until `instances.remove_leftovers` has removed them.

Sources: AWS, ModifyNetworkInterfaceAttribute ("will only apply to the primary network interface"), "NAT gateways",
"Route table concepts" (the most specific route decides), "NAT gateway metrics and dimensions".
"""

import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call_with_retry, list_tagged, paginate
from infra.aws.stack import network
from infra.aws.stack.resources import RESOURCE_VISIBILITY_SECONDS, StackContext, wait_for
from infra.aws.stack.stack import Stack
from infra.aws.tags import Resource
from infra.errors import CloudError
from train.tools import host

logger = logging.getLogger(__name__)

NAT_TAG = "imgnet:nat"  # of the gateway's address, which must not become the jump host's
NAT_START_SECONDS = 600.0
NAT_METRIC_PERIOD_SECONDS = 300
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
    ec2 = context.account.ec2
    gateway = _ensure_gateway(context, stack.subnets[zone], own_tags, pause)
    table = _ensure_tagged(
        context, pause, "route-table", "describe_route_tables", own_tags, ec2.create_route_table, VpcId=stack.vpc
    )
    table_id = str(table["RouteTableId"])
    context.create(
        "route through the NAT gateway",
        ec2.create_route,
        RouteTableId=table_id,
        DestinationCidrBlock=network.ANY_IPV4,
        NatGatewayId=gateway,
    )
    network.add_to_s3_endpoint(context, stack.vpc, table_id)  # to S3 without the gateway, which costs by the GB
    network.route_to_internet(context, stack.vpc, table_id, ssh_address)
    subnet_ids = [
        str(subnet["SubnetId"])
        for subnet in list_tagged(context.account, "describe_subnets", _identifying(own_tags))
        if subnet["AvailabilityZone"] == zone
    ]
    specifications = aws_tags.tag_specifications(["subnet"], own_tags)
    subnet_id = subnet_ids[0] if subnet_ids else network.create_job_subnet(context, stack.vpc, zone, specifications)
    context.create(f"route of {subnet_id}", ec2.associate_route_table, RouteTableId=table_id, SubnetId=subnet_id)
    return subnet_id


def read_nat_bytes(account: Account, uid: str) -> dict[str, int]:
    """Return what each NAT gateway of a job has processed, by its ID; AWS bills these bytes. Raises `CloudError`.

    CloudWatch counts them some minutes late: what came in from the machines, and from the internet.
    """
    bytes_by_gateway = {}
    action = "traffic of the NAT gateway (cloudwatch:GetMetricData)"
    end = datetime.fromtimestamp(host.unix_time() + NAT_METRIC_PERIOD_SECONDS, UTC)
    for gateway in list_tagged(account, "describe_nat_gateways", {aws_tags.JOB: uid}):
        dimensions = [{"Name": "NatGatewayId", "Value": gateway["NatGatewayId"]}]
        metrics = [
            {"Namespace": "AWS/NATGateway", "MetricName": name, "Dimensions": dimensions}
            for name in ("BytesInFromSource", "BytesInFromDestination")
        ]
        queries = [
            {"Id": f"m{i}", "MetricStat": {"Metric": metric, "Period": NAT_METRIC_PERIOD_SECONDS, "Stat": "Sum"}}
            for i, metric in enumerate(metrics)
        ]
        period = {"StartTime": gateway["CreateTime"], "EndTime": end}
        cloudwatch, key = account.cloudwatch, "MetricDataResults"
        results = paginate(action, cloudwatch, "get_metric_data", key, MetricDataQueries=queries, **period)
        bytes_by_gateway[str(gateway["NatGatewayId"])] = round(sum(sum(result["Values"]) for result in results))
    return bytes_by_gateway


def _ensure_gateway(
    context: StackContext, public_subnet: str, own_tags: aws_tags.Tags, pause: Callable[[float], None]
) -> str:
    """Return the job's NAT gateway as soon as it is available."""
    ec2 = context.account.ec2

    def list_gateways(*states: str) -> list[Resource]:
        return list_tagged(context.account, "describe_nat_gateways", _identifying(own_tags), state=states)

    old_failures = [gateway["NatGatewayId"] for gateway in list_gateways("failed")]
    if not list_gateways("pending", "available"):
        logger.info("creating a NAT gateway; it takes a few minutes")
        nat_tags = {**own_tags, NAT_TAG: "yes"}
        address = _ensure_tagged(
            context, pause, "elastic-ip", "describe_addresses", nat_tags, ec2.allocate_address, Domain="vpc"
        )
        request_parts = own_tags[aws_tags.JOB], public_subnet, address["AllocationId"], len(old_failures)
        context.create(
            "NAT gateway",
            ec2.create_nat_gateway,
            SubnetId=public_subnet,
            AllocationId=address["AllocationId"],
            ClientToken=hashlib.sha256(str(request_parts).encode()).hexdigest(),
            TagSpecifications=aws_tags.tag_specifications(["natgateway"], own_tags),
        )

    def find_available() -> list[Resource]:
        for gateway in list_gateways("failed"):
            if gateway["NatGatewayId"] not in old_failures:
                raise CloudError(f"the NAT gateway failed: {gateway.get('FailureMessage')}")
        return list_gateways("available")

    gateways = wait_for(find_available, "the NAT gateway is not available", NAT_START_SECONDS, pause)
    return str(gateways[0]["NatGatewayId"])


def _ensure_tagged(
    context: StackContext,
    pause: Callable[[float], None],
    resource_type: str,
    operation: str,
    own_tags: aws_tags.Tags,
    create_function: Callable[..., object],
    **params: object,
) -> Resource:
    """Return the job's resource of a type, which a describing operation lists; created by `params` if missing."""
    list_resources = partial(list_tagged, context.account, operation, _identifying(own_tags))
    resources = list_resources()
    if not resources:
        specifications = aws_tags.tag_specifications([resource_type], own_tags)
        context.create(f"{resource_type} of the job", create_function, TagSpecifications=specifications, **params)
        timeout_message = f"the {resource_type} of the job was created, but AWS does not show it"
        resources = wait_for(list_resources, timeout_message, RESOURCE_VISIBILITY_SECONDS, pause)
    return resources[0]


def _identifying(own_tags: aws_tags.Tags) -> dict[str, str]:
    """Return those of a resource's tags by which it is found again."""
    return {name: own_tags[name] for name in (aws_tags.STACK, aws_tags.JOB, NAT_TAG) if name in own_tags}
