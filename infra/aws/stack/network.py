"""The stack's network: one VPC, a public subnet in each zone, an internet gateway, and an S3 gateway endpoint.

The endpoint keeps S3 traffic off the internet and is free. EFS host names resolve only with DNS host names enabled.
Source: AWS, "VPC with public subnets", "Gateway endpoints for Amazon S3".
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Network

from infra.aws import prices, tags
from infra.aws.client import call, list_tagged, paginate
from infra.aws.error_codes import NETWORKS_QUOTA, quota_increase_command
from infra.aws.tags import Resource
from infra.errors import CloudError

from .resources import RESOURCE_VISIBILITY_SECONDS, StackContext, wait_for

logger = logging.getLogger(__name__)

VPC_CIDR = IPv4Network("10.77.0.0/16")
STACK_CIDR, JOBS_CIDR = VPC_CIDR.subnets(new_prefix=17)
SUBNET_CIDRS = [str(subnet) for subnet in STACK_CIDR.subnets(new_prefix=20)]  # 8 zones of 4,091 addresses
JOB_SUBNET_CIDRS = [str(subnet) for subnet in JOBS_CIDR.subnets(new_prefix=24)]  # 128 subnets of 251 addresses
ANY_IPV4 = "0.0.0.0/0"
DNS_HOSTNAMES = "enableDnsHostnames"  # an attribute of a VPC
# The tag of a subnet in a zone that EFS does not serve; on the file system it names such subnets of the user's network.
NO_EFS_TAG = "imgnet:no-files"


@dataclass(frozen=True)
class StackNetwork:
    """The existing network: VPC, usable subnets by zone, and one short line for each missing part.

    `is_given`: it is the user's, and never changed. EFS has refused to serve `zones_without_efs`, in which no machines
    are rented.
    """

    vpc: str | None
    subnets: dict[str, str]
    missing_parts: tuple[str, ...]
    is_given: bool = False
    zones_without_efs: tuple[str, ...] = ()
    has_s3_endpoint: bool = True  # in all its subnets that do not lead to an internet gateway

    @property
    def given_ids(self) -> tuple[str, ...]:
        """The IDs by which a network of the user's is found again, () for the stack's own."""
        return (str(self.vpc), *self.subnets.values()) if self.is_given else ()

    def describe(self) -> str:
        """Return a line about a network of the user's."""
        subnets = ", ".join(f"{subnet} in {zone}" for zone, subnet in self.subnets.items())
        note = f"; no S3 gateway endpoint: what comes from S3 passes its NAT gateway, ${prices.NAT_PER_GB:g} per GB"
        return f"{self.vpc}, which is yours and stays as it is: {subnets}{'' if self.has_s3_endpoint else note}"


def inspect_network(context: StackContext) -> StackNetwork:
    """Return the network as it is, without a change. Raises `CloudError`."""
    vpc_ids = sorted(list_vpc_ids(context))
    if not vpc_ids:
        return StackNetwork(None, {}, (f"network {VPC_CIDR} with a public subnet in each zone (VPC)",))
    vpc = next((vpc_id for vpc_id in vpc_ids if len(vpc_ids) > 1 and _list_subnets(context, vpc_id)), vpc_ids[0])
    with ThreadPoolExecutor() as pool:
        subnets_answer = pool.submit(_list_subnets, context, vpc)
        gateways = pool.submit(_list_gateways, context, vpc)
        tables_answer = pool.submit(_list_route_tables, context, vpc)
        has_dns_hostnames = pool.submit(is_attribute_on, context, vpc, DNS_HOSTNAMES)
        endpoints = pool.submit(_list_s3_endpoints, context, vpc)
        zones = pool.submit(list_zones, context)
    subnets, tables = subnets_answer.result(), tables_answer.result()
    gateway_ids = [gateway["InternetGatewayId"] for gateway in gateways.result() if gateway["Attachments"]]
    part_exists = {
        "DNS host names of the network": has_dns_hostnames.result(),
        "internet gateway": bool(gateway_ids),
        "route table": bool(tables)
        and _has_internet_route(tables[0], gateway_ids)
        and _associated_subnets(tables[0]) >= {subnet["SubnetId"] for subnet in subnets},
        "S3 gateway endpoint (free)": bool(endpoints.result()),
        **{f"subnet in {zone}": zone in _subnets_by_zone(subnets) for zone in zones.result()},
    }
    missing_parts = tuple(part for part, exists in part_exists.items() if not exists)
    served = _subnets_by_zone(subnets, only_with_efs=True)
    unserved = tuple(sorted(_subnets_by_zone(subnets).keys() - served.keys()))
    return StackNetwork(vpc, served, missing_parts, zones_without_efs=unserved)


def ensure(context: StackContext) -> StackNetwork:
    """Create what is missing of the network, and return it. Raises `CloudError`."""
    vpc = _ensure_vpc(context)
    if not is_attribute_on(context, vpc, DNS_HOSTNAMES):
        context.create(
            "DNS host names of the network",
            context.account.ec2.modify_vpc_attribute,
            VpcId=vpc,
            EnableDnsHostnames={"Value": True},
        )
    subnets = _ensure_subnets(context, vpc)
    gateway = _ensure_gateway(context, vpc)
    table = _ensure_route_table(context, vpc)
    _ensure_routes(context, table, gateway, [subnet["SubnetId"] for subnet in subnets])
    _ensure_s3_endpoint(context, vpc, table["RouteTableId"])
    return StackNetwork(vpc, _subnets_by_zone(subnets, only_with_efs=True), ())


def remove(context: StackContext) -> None:
    """Delete the stack's networks, in the order that AWS requires. `context.leftovers` names what is left."""
    ec2 = context.account.ec2
    for vpc in list_vpc_ids(context):
        for endpoint in _list_s3_endpoints(context, vpc):
            context.delete("S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[endpoint["VpcEndpointId"]])
        for subnet in _list_subnets(context, vpc):
            context.delete(f"subnet {subnet['SubnetId']}", ec2.delete_subnet, SubnetId=subnet["SubnetId"])
        for table in _list_route_tables(context, vpc):
            for association in table["Associations"]:
                association_id = association["RouteTableAssociationId"]
                context.delete("route table association", ec2.disassociate_route_table, AssociationId=association_id)
            context.delete("route table", ec2.delete_route_table, RouteTableId=table["RouteTableId"])
        for gateway in _list_gateways(context, vpc):
            _delete_gateway(context, gateway)
        context.delete(f"network {vpc} (free)", ec2.delete_vpc, VpcId=vpc)
    for gateway in _list_gateways(context, None):
        _delete_gateway(context, gateway)


def list_zones(context: StackContext) -> list[str]:
    """Return the region's availability zones that every account can use: no local zones, no zones to opt into."""
    response = call("zones", context.account.ec2.describe_availability_zones)
    return sorted(
        zone["ZoneName"]
        for zone in response["AvailabilityZones"]
        if zone.get("ZoneType", "availability-zone") == "availability-zone"
        and zone.get("OptInStatus", "opt-in-not-required") == "opt-in-not-required"
        and zone.get("State", "available") == "available"
        and _zone_index(zone["ZoneName"]) < len(SUBNET_CIDRS)
    )


def is_attribute_on(context: StackContext, vpc: str, attribute: str) -> bool:
    """Whether an attribute of a network, such as `DNS_HOSTNAMES`, is on."""
    ask = context.account.ec2.describe_vpc_attribute
    response = call(f"{attribute} of {vpc}", ask, VpcId=vpc, Attribute=attribute)
    return bool(response[attribute[0].upper() + attribute[1:]]["Value"])


def list_vpc_ids(context: StackContext) -> list[str]:
    """Return the IDs of the stack's VPCs: one, unless a crash has left another."""
    return [vpc["VpcId"] for vpc in _list_own(context, "describe_vpcs")]


def list_machines(context: StackContext) -> list[Resource]:
    """Return the instances that are not terminating: all in the stack's VPCs, and those with its tag anywhere."""
    states = ["pending", "running", "stopping", "stopped"]
    vpc_ids = list_vpc_ids(context)
    selections = [tags.make_filters({tags.STACK: tags.STACK_VALUE}, instance_state_name=states)]
    selections += [tags.make_filters({}, vpc_id=vpc_ids, instance_state_name=states)] if vpc_ids else []
    ec2, machines = context.account.ec2, dict[str, Resource]()
    for filters in selections:
        for found in paginate("machines in the network", ec2, "describe_instances", "Reservations", Filters=filters):
            machines |= {machine["InstanceId"]: machine for machine in found["Instances"]}
    return [*machines.values()]


# --- the parts of a job's network ----------------------------------------------------------------------------------


def create_job_subnet(context: StackContext, vpc: str, zone: str, specifications: list[Resource]) -> str:
    """Create a subnet of a job in a zone, at the first free address range, and return it. Raises `CloudError`."""
    ec2 = context.account.ec2
    subnets = list_tagged(context.account, "describe_subnets", {}, vpc_id=[vpc])
    used_cidrs = {subnet["CidrBlock"] for subnet in subnets}
    for cidr in JOB_SUBNET_CIDRS:
        if cidr not in used_cidrs:
            created = context.create(
                f"subnet of the job in {zone}",
                ec2.create_subnet,
                VpcId=vpc,
                AvailabilityZone=zone,
                CidrBlock=cidr,
                TagSpecifications=specifications,
            )
            if created is not None:  # else another job has just taken the range
                return str(created["Subnet"]["SubnetId"])
    raise CloudError(
        f"the network has {len(JOB_SUBNET_CIDRS)} subnets of jobs and no room for another; type: imgnet-cluster gc"
    )


def route_to_internet(context: StackContext, vpc: str, table: str, address: str) -> None:
    """Route an address range to the internet gateway in a route table of a job. Raises `CloudError`."""
    gateways = [gateway for gateway in _list_gateways(context, vpc) if gateway["Attachments"]]
    if not gateways:
        raise CloudError("the stack has no internet gateway; type: imgnet-cluster up --stack")
    context.create(
        f"route to {address}",
        context.account.ec2.create_route,
        RouteTableId=table,
        DestinationCidrBlock=address,
        GatewayId=gateways[0]["InternetGatewayId"],
    )


def route_jobs_to(context: StackContext, vpc: str, address: str) -> None:
    """Let jobs behind a NAT gateway answer ssh connections from an address range too. Raises `CloudError`."""
    for table in list_tagged(context.account, "describe_route_tables", {tags.STACK: tags.STACK_VALUE}, vpc_id=[vpc]):
        if tags.JOB in tags.read_tags(table):
            route_to_internet(context, vpc, table["RouteTableId"], address)


def add_to_s3_endpoint(context: StackContext, vpc: str, table: str) -> None:
    """Let a route table of a job use the stack's S3 endpoint. Raises `CloudError`."""
    modify = context.account.ec2.modify_vpc_endpoint
    for endpoint in _list_s3_endpoints(context, vpc):
        if table not in endpoint.get("RouteTableIds", []):
            id = endpoint["VpcEndpointId"]
            context.create("route to S3", modify, VpcEndpointId=id, AddRouteTableIds=[table])


def remove_from_s3_endpoint(context: StackContext, vpc: str, table: str) -> None:
    """End the use of the stack's S3 endpoint by a route table of a job. Raises `CloudError`."""
    modify = context.account.ec2.modify_vpc_endpoint
    for endpoint in _list_s3_endpoints(context, vpc):
        if table in endpoint.get("RouteTableIds", []):
            call("remove a route to S3", modify, VpcEndpointId=endpoint["VpcEndpointId"], RemoveRouteTableIds=[table])


# --- the parts -----------------------------------------------------------------------------------------------------


def _zone_index(zone: str) -> int:
    """Return the index of a zone's address range, from the zone's letter.

    It depends on nothing else, so that two processes create the same subnet, whatever other zones they see.
    """
    return ord(zone[-1]) - ord("a")


def _list_own(context: StackContext, operation: str, vpc: str | None = None) -> list[Resource]:
    """Return the stack's resources of a kind, all or those of a VPC. Those with a job's tag are that job's."""
    vpc_filter = {"vpc_id": [vpc]} if vpc else {}
    resources = list_tagged(context.account, operation, {tags.STACK: tags.STACK_VALUE}, **vpc_filter)
    return [resource for resource in resources if tags.JOB not in tags.read_tags(resource)]


def _list_subnets(context: StackContext, vpc: str) -> list[Resource]:
    return _list_own(context, "describe_subnets", vpc)


def _list_gateways(context: StackContext, vpc: str | None) -> list[Resource]:
    """Return the stack's internet gateways that are attached to this VPC or to none."""
    gateways = _list_own(context, "describe_internet_gateways")
    return [
        gateway for gateway in gateways if [attachment["VpcId"] for attachment in gateway["Attachments"]] in ([vpc], [])
    ]


def _list_route_tables(context: StackContext, vpc: str) -> list[Resource]:
    """Return the stack's route tables of a VPC, those in use first."""
    tables = _list_own(context, "describe_route_tables", vpc)
    return sorted(tables, key=lambda table: (not _associated_subnets(table), table["RouteTableId"]))


def _list_s3_endpoints(context: StackContext, vpc: str) -> list[Resource]:
    endpoints = _list_own(context, "describe_vpc_endpoints", vpc)
    return [endpoint for endpoint in endpoints if not endpoint.get("State", "").lower().startswith("delet")]


def _subnets_by_zone(subnets: list[Resource], only_with_efs: bool = False) -> dict[str, str]:
    """Return subnet IDs by zone, sorted by zone: all, or only those in zones that EFS serves."""
    return {
        subnet["AvailabilityZone"]: str(subnet["SubnetId"])
        for subnet in sorted(subnets, key=lambda subnet: str(subnet["AvailabilityZone"]))
        if not only_with_efs or tags.read_tags(subnet).get(NO_EFS_TAG) is None
    }


def _associated_subnets(table: Resource) -> set[str]:
    return {association["SubnetId"] for association in table["Associations"] if association.get("SubnetId")}


def _has_internet_route(table: Resource, gateways: list[str]) -> bool:
    return any(
        route.get("DestinationCidrBlock") == ANY_IPV4 and route.get("GatewayId") in gateways
        for route in table["Routes"]
    )


def _ensure_vpc(context: StackContext) -> str:
    ec2 = context.account.ec2
    try:
        vpc = context.ensure_single(
            f"network {VPC_CIDR}",
            "vpc",
            lambda: _list_own(context, "describe_vpcs"),
            ec2.create_vpc,
            ec2.delete_vpc,
            id_key="VpcId",
            is_used=lambda vpc: bool(_list_subnets(context, vpc["VpcId"])),
            CidrBlock=str(VPC_CIDR),
        )
    except CloudError as error:
        if error.code != "VpcLimitExceeded":
            raise
        command = quota_increase_command(context.account.region, NETWORKS_QUOTA, 10)
        raise CloudError(
            f"the region has as many networks (VPC) as its quota allows; type: {command}", error.code
        ) from error
    return str(vpc["VpcId"])


def _ensure_subnets(context: StackContext, vpc: str) -> list[Resource]:
    existing_subnets = _list_subnets(context, vpc)
    new_zones = set(list_zones(context)) - _subnets_by_zone(existing_subnets).keys()
    if not new_zones:
        return existing_subnets
    logger.info(f"creating a subnet in each of {' '.join(sorted(new_zones))}")
    for zone in sorted(new_zones):
        context.create(
            f"subnet in {zone}",
            context.account.ec2.create_subnet,
            TagSpecifications=context.tag_specifications("subnet"),
            VpcId=vpc,
            AvailabilityZone=zone,
            CidrBlock=SUBNET_CIDRS[_zone_index(zone)],
        )

    def list_when_all_visible() -> list[Resource]:
        subnets = _list_subnets(context, vpc)
        return subnets if _subnets_by_zone(subnets).keys() >= new_zones else []

    timeout_message = f"subnets of {vpc} were created, but AWS does not show them with the tag {tags.STACK}"
    return wait_for(list_when_all_visible, timeout_message, RESOURCE_VISIBILITY_SECONDS)


def _ensure_gateway(context: StackContext, vpc: str) -> str:
    ec2 = context.account.ec2
    gateway = context.ensure_single(
        "internet gateway",
        "internet-gateway",
        lambda: _list_gateways(context, vpc),
        ec2.create_internet_gateway,
        ec2.delete_internet_gateway,
        id_key="InternetGatewayId",
        is_used=lambda gateway: bool(gateway["Attachments"]),
    )
    gateway_id = str(gateway["InternetGatewayId"])
    if not gateway["Attachments"]:
        context.create(
            "attachment of the internet gateway", ec2.attach_internet_gateway, InternetGatewayId=gateway_id, VpcId=vpc
        )
    return gateway_id


def _delete_gateway(context: StackContext, gateway: Resource) -> None:
    ec2, id = context.account.ec2, gateway["InternetGatewayId"]
    for attachment in gateway["Attachments"]:
        label, vpc = "attachment of the internet gateway", attachment["VpcId"]
        context.delete(label, ec2.detach_internet_gateway, InternetGatewayId=id, VpcId=vpc)
    context.delete("internet gateway", ec2.delete_internet_gateway, InternetGatewayId=id)


def _ensure_route_table(context: StackContext, vpc: str) -> Resource:
    ec2 = context.account.ec2
    return context.ensure_single(
        "route table",
        "route-table",
        lambda: _list_route_tables(context, vpc),
        ec2.create_route_table,
        ec2.delete_route_table,
        id_key="RouteTableId",
        is_used=lambda table: bool(_associated_subnets(table)),
        VpcId=vpc,
    )


def _ensure_routes(context: StackContext, table: Resource, gateway: str, subnets: list[str]) -> None:
    """Route a table's internet traffic to the gateway, and associate the subnets with the table."""
    ec2 = context.account.ec2
    table_id = table["RouteTableId"]
    if not _has_internet_route(table, [gateway]):
        # A route to a gateway that was deleted stays in the table and must be replaced.
        has_stale_route = any(route.get("DestinationCidrBlock") == ANY_IPV4 for route in table["Routes"])
        function = ec2.replace_route if has_stale_route else ec2.create_route
        context.create("route", function, RouteTableId=table_id, DestinationCidrBlock=ANY_IPV4, GatewayId=gateway)
    for subnet in subnets:
        if subnet not in _associated_subnets(table):
            context.create(f"route of {subnet}", ec2.associate_route_table, RouteTableId=table_id, SubnetId=subnet)


def _ensure_s3_endpoint(context: StackContext, vpc: str, table: str) -> None:
    """Create the S3 gateway endpoint if missing, and delete spare ones that a crash or a race has left."""
    ec2 = context.account.ec2
    if not _list_s3_endpoints(context, vpc):
        context.create(
            "S3 gateway endpoint",
            ec2.create_vpc_endpoint,
            VpcId=vpc,
            VpcEndpointType="Gateway",
            ServiceName=f"com.amazonaws.{context.account.region}.s3",
            RouteTableIds=[table],
            TagSpecifications=context.tag_specifications("vpc-endpoint"),
        )
    endpoint_ids = sorted(endpoint["VpcEndpointId"] for endpoint in _list_s3_endpoints(context, vpc))
    for spare_id in endpoint_ids[1:]:
        context.delete("spare S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[spare_id])
