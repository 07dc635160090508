"""The network of a stack: one VPC, a public subnet in each zone, a way out, and S3 without one.

Source: AWS, "VPC with public subnets", "Gateway endpoints for Amazon S3". Names of EFS need DNS host names switched on.
"""

from dataclasses import dataclass
from ipaddress import IPv4Network

from infra.aws import tags
from infra.aws.client import call, paginate
from infra.aws.errors import CloudError

from .resources import RESOURCE_VISIBILITY_SECONDS, Resource, StackContext, wait_for

VPC_CIDR = IPv4Network("10.77.0.0/16")
SUBNET_CIDRS = [str(one) for one in VPC_CIDR.subnets(new_prefix=20)]  # 16 zones of 4091 addresses
ANY_IPV4 = "0.0.0.0/0"
NO_EFS_TAG = "imgnet:no-files"  # the tag of a subnet in a zone that EFS does not serve
RAISE_VPC_QUOTA_COMMAND = "aws service-quotas request-service-quota-increase --service-code vpc --quota-code L-F678F1CE"


@dataclass(frozen=True)
class StackNetwork:
    """What is there of it: ids, subnets by zone, and one short line for each part that is not."""

    vpc: str | None
    subnets: dict[str, str]
    missing_parts: tuple[str, ...]


def inspect_network(context: StackContext) -> StackNetwork:
    """Describe the network. Raises `CloudError`."""
    ours = sorted(list_vpc_ids(context), key=lambda one: (not _has_subnets(context, one), one))
    if not ours:
        return StackNetwork(None, {}, (f"network {VPC_CIDR} with a public subnet in each zone (VPC)",))
    vpc = ours[0]
    subnets = _list_subnets(context, vpc)
    gateways = [one["InternetGatewayId"] for one in _list_gateways(context, vpc) if one["Attachments"]]
    tables = _list_route_tables(context, vpc)
    parts = {
        "host names in the network": _has_dns_hostnames(context, vpc),
        "internet gateway": bool(gateways),
        "route table": bool(tables)
        and _has_internet_route(tables[0], gateways)
        and _associated_subnets(tables[0]) >= {one["SubnetId"] for one in subnets},
        "S3 gateway endpoint (free)": bool(_list_s3_endpoints(context, vpc)),
        **{f"subnet in {zone}": zone in _subnets_by_zone(subnets) for zone in list_zones(context)},
    }
    return StackNetwork(
        vpc, _subnets_by_zone(subnets, only_with_efs=True), tuple(name for name, there in parts.items() if not there)
    )


def ensure(context: StackContext) -> StackNetwork:
    """Make what is missing of the network. Raises `CloudError`."""
    vpc = _ensure_vpc(context)
    if not _has_dns_hostnames(context, vpc):
        words = {"VpcId": vpc, "EnableDnsHostnames": {"Value": True}}
        context.create("host names in the network", context.account.ec2.modify_vpc_attribute, **words)
    subnets = _ensure_subnets(context, vpc)
    gateway = _ensure_gateway(context, vpc)
    table = _ensure_route_table(context, vpc)
    _ensure_routes(context, table, gateway, [one["SubnetId"] for one in subnets])
    _ensure_s3_endpoint(context, vpc, table["RouteTableId"])
    return StackNetwork(vpc, _subnets_by_zone(subnets, only_with_efs=True), ())


def mark_without_efs(context: StackContext, zone: str, subnet: str) -> None:
    """Mark a subnet: EFS does not serve its zone, so no machines go there."""
    context.log(f"{zone} has no EFS: no machines there")
    words = {"Resources": [subnet], "Tags": tags.to_aws_tags({NO_EFS_TAG: "yes"})}
    context.create(f"mark of {zone}", context.account.ec2.create_tags, **words)


def remove(context: StackContext) -> None:
    """Remove every network of ours, in order; what stays is in `work.left`."""
    ec2 = context.account.ec2
    for vpc in list_vpc_ids(context):
        for endpoint in _list_s3_endpoints(context, vpc):
            context.delete("S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[endpoint["VpcEndpointId"]])
        for subnet in _list_subnets(context, vpc):
            context.delete(f"subnet {subnet['SubnetId']}", ec2.delete_subnet, SubnetId=subnet["SubnetId"])
        for table in _list_route_tables(context, vpc):
            for one in table["Associations"]:
                id = one["RouteTableAssociationId"]
                context.delete("route of a subnet", ec2.disassociate_route_table, AssociationId=id)
            context.delete("route table", ec2.delete_route_table, RouteTableId=table["RouteTableId"])
        for gateway in _list_gateways(context, vpc):
            _delete_gateway(context, gateway)
        context.delete(f"network {vpc} (free)", ec2.delete_vpc, VpcId=vpc)
    for gateway in _list_gateways(context, None):
        _delete_gateway(context, gateway)


def list_zones(context: StackContext) -> list[str]:
    """Return the zones of the region where every account has its machines: no local zones, none to opt into."""
    found = call("zones", context.account.ec2.describe_availability_zones)["AvailabilityZones"]
    return sorted(
        one["ZoneName"]
        for one in found
        if one.get("ZoneType", "availability-zone") == "availability-zone"
        and one.get("OptInStatus", "opt-in-not-required") == "opt-in-not-required"
        and one.get("State", "available") == "available"
        and _zone_index(one["ZoneName"]) < len(SUBNET_CIDRS)
    )


def list_vpc_ids(context: StackContext) -> list[str]:
    """Return the ids of our networks: one, but for what a crash has left."""
    return [one["VpcId"] for one in _list_vpcs(context)]


def list_machines(context: StackContext) -> list[Resource]:
    """Return the machines in our networks that are not about to be gone."""
    ours = list_vpc_ids(context)
    if not ours:
        return []
    alive = ["pending", "running", "stopping", "stopped"]
    where = tags.make_filters({}, vpc_id=ours, instance_state_name=alive)
    found = paginate(
        "machines in the network", context.account.ec2, "describe_instances", "Reservations", Filters=where
    )
    return [machine for one in found for machine in one["Instances"]]


# --- the parts -----------------------------------------------------------------------------------------------------


def _zone_index(zone: str) -> int:
    """The place of a zone's subnet, by its letter: whoever makes it, whatever others there are, it is the same."""
    return ord(zone[-1]) - ord("a")


def _list_own(
    context: StackContext, label: str, operation: str, result_key: str, vpc: str | None = None
) -> list[Resource]:
    where = {"vpc_id": [vpc]} if vpc else {}
    filters = tags.make_filters({tags.STACK: tags.STACK_VALUE}, **where)
    return paginate(label, context.account.ec2, operation, result_key, Filters=filters)


def _list_vpcs(context: StackContext) -> list[Resource]:
    return _list_own(context, "networks", "describe_vpcs", "Vpcs")


def _list_subnets(context: StackContext, vpc: str) -> list[Resource]:
    return _list_own(context, "subnets", "describe_subnets", "Subnets", vpc)


def _list_gateways(context: StackContext, vpc: str | None) -> list[Resource]:
    """Ours at this network, and those at none."""
    found = _list_own(context, "internet gateways", "describe_internet_gateways", "InternetGateways")
    return [one for one in found if [at["VpcId"] for at in one["Attachments"]] in ([vpc], [])]


def _list_route_tables(context: StackContext, vpc: str) -> list[Resource]:
    found = _list_own(context, "route tables", "describe_route_tables", "RouteTables", vpc)
    return sorted(found, key=lambda one: (not _associated_subnets(one), one["RouteTableId"]))


def _list_s3_endpoints(context: StackContext, vpc: str) -> list[Resource]:
    found = _list_own(context, "endpoints", "describe_vpc_endpoints", "VpcEndpoints", vpc)
    return [one for one in found if not one.get("State", "").lower().startswith("delet")]


def _subnets_by_zone(subnets: list[Resource], only_with_efs: bool = False) -> dict[str, str]:
    """By zone; only those with the file system if `shared`."""
    return {
        one["AvailabilityZone"]: str(one["SubnetId"])
        for one in sorted(subnets, key=lambda one: str(one["AvailabilityZone"]))
        if not only_with_efs or tags.read_tags(one).get(NO_EFS_TAG) is None
    }


def _has_dns_hostnames(context: StackContext, vpc: str) -> bool:
    words = {"VpcId": vpc, "Attribute": "enableDnsHostnames"}
    said = call("host names in the network", context.account.ec2.describe_vpc_attribute, **words)
    return bool(said["EnableDnsHostnames"]["Value"])


def _associated_subnets(table: Resource) -> set[str]:
    return {one["SubnetId"] for one in table["Associations"] if one.get("SubnetId")}


def _has_internet_route(table: Resource, gateways: list[str]) -> bool:
    return any(
        one.get("DestinationCidrBlock") == ANY_IPV4 and one.get("GatewayId") in gateways for one in table["Routes"]
    )


def _has_subnets(context: StackContext, vpc: str) -> bool:
    return bool(_list_subnets(context, vpc))


def _ensure_vpc(context: StackContext) -> str:
    ec2 = context.account.ec2

    def make() -> None:
        try:
            context.create(
                "network (VPC)",
                ec2.create_vpc,
                CidrBlock=str(VPC_CIDR),
                TagSpecifications=context.tag_specifications("vpc"),
            )
        except CloudError as error:
            if error.code != "VpcLimitExceeded":
                raise
            more = f"{RAISE_VPC_QUOTA_COMMAND} --desired-value 10 --region {context.account.region}"
            raise CloudError(f"the region has as many networks (VPC) as it may; type: {more}", error.code) from error

    found = context.ensure_single(
        f"network {VPC_CIDR}", lambda: _list_vpcs(context), make,
        lambda one: context.delete("network", ec2.delete_vpc, VpcId=one["VpcId"]),
        id_key="VpcId", is_used=lambda one: _has_subnets(context, one["VpcId"]),
    )  # fmt: skip
    return str(found["VpcId"])


def _ensure_subnets(context: StackContext, vpc: str) -> list[Resource]:
    there = _list_subnets(context, vpc)
    new = [zone for zone in list_zones(context) if zone not in _subnets_by_zone(there)]
    if not new:
        return there
    context.log(f"making a subnet in each of {' '.join(new)}")
    for zone in new:
        words = {"VpcId": vpc, "AvailabilityZone": zone, "CidrBlock": SUBNET_CIDRS[_zone_index(zone)]}
        specifications = context.tag_specifications("subnet")
        context.create(
            f"subnet in {zone}", context.account.ec2.create_subnet, TagSpecifications=specifications, **words
        )

    def all_seen() -> list[Resource]:
        found = _list_subnets(context, vpc)
        return found if _subnets_by_zone(found).keys() >= {*new} else []

    return wait_for(
        all_seen, f"subnets of {vpc} were made, and AWS does not show them with our tag", RESOURCE_VISIBILITY_SECONDS
    )


def _ensure_gateway(context: StackContext, vpc: str) -> str:
    ec2 = context.account.ec2
    words = {"TagSpecifications": context.tag_specifications("internet-gateway")}
    found = context.ensure_single(
        "internet gateway", lambda: _list_gateways(context, vpc),
        lambda: context.create("internet gateway", ec2.create_internet_gateway, **words),
        lambda one: context.delete(
            "internet gateway", ec2.delete_internet_gateway, InternetGatewayId=one["InternetGatewayId"]
        ),
        id_key="InternetGatewayId", is_used=lambda one: bool(one["Attachments"]),
    )  # fmt: skip
    gateway = str(found["InternetGatewayId"])
    if not found["Attachments"]:
        context.create("way out", ec2.attach_internet_gateway, InternetGatewayId=gateway, VpcId=vpc)
    return gateway


def _delete_gateway(context: StackContext, gateway: Resource) -> None:
    ec2, id = context.account.ec2, gateway["InternetGatewayId"]
    for at in gateway["Attachments"]:
        context.delete("way out", ec2.detach_internet_gateway, InternetGatewayId=id, VpcId=at["VpcId"])
    context.delete("internet gateway", ec2.delete_internet_gateway, InternetGatewayId=id)


def _ensure_route_table(context: StackContext, vpc: str) -> Resource:
    ec2 = context.account.ec2
    words = {"VpcId": vpc, "TagSpecifications": context.tag_specifications("route-table")}
    return context.ensure_single(
        "route table", lambda: _list_route_tables(context, vpc),
        lambda: context.create("route table", ec2.create_route_table, **words),
        lambda one: context.delete("route table", ec2.delete_route_table, RouteTableId=one["RouteTableId"]),
        id_key="RouteTableId", is_used=lambda one: bool(_associated_subnets(one)),
    )  # fmt: skip


def _ensure_routes(context: StackContext, table: Resource, gateway: str, subnets: list[str]) -> None:
    ec2, id = context.account.ec2, table["RouteTableId"]
    if not _has_internet_route(table, [gateway]):
        stale = any(one.get("DestinationCidrBlock") == ANY_IPV4 for one in table["Routes"])  # to a gateway that is gone
        function = ec2.replace_route if stale else ec2.create_route
        context.create("route", function, RouteTableId=id, DestinationCidrBlock=ANY_IPV4, GatewayId=gateway)
    for subnet in subnets:
        if subnet not in _associated_subnets(table):
            context.create(f"route of {subnet}", ec2.associate_route_table, RouteTableId=id, SubnetId=subnet)


def _ensure_s3_endpoint(context: StackContext, vpc: str, table: str) -> None:
    ec2, service = context.account.ec2, f"com.amazonaws.{context.account.region}.s3"
    if not _list_s3_endpoints(context, vpc):
        context.create(
            "S3 gateway endpoint", ec2.create_vpc_endpoint, VpcId=vpc, VpcEndpointType="Gateway", ServiceName=service,
            RouteTableIds=[table], TagSpecifications=context.tag_specifications("vpc-endpoint"),
        )  # fmt: skip
    for spare in sorted(one["VpcEndpointId"] for one in _list_s3_endpoints(context, vpc))[1:]:
        context.delete("spare S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[spare])
