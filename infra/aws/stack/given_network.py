"""A network of the user's that has the stack: it is checked, and never changed.

Only the stack's security group and mount targets are made in it. A file system can be mounted in one network at a time,
so the stack of a region is in its own network or in one of the user's. A tag of the file system names that one, and
later commands find it there.

Sources: AWS, "Creating mount targets" (one VPC at a time, one mount target in a zone), "DNS attributes for your VPC",
"Route table concepts" (a subnet that has no route table of its own follows the main one).
"""

from collections.abc import Sequence

from infra.aws.client import list_tagged
from infra.aws.launch_request import Internet
from infra.aws.tags import Resource
from infra.errors import CloudError

from .network import ANY_IPV4, DNS_HOSTNAMES, StackNetwork, is_attribute_on, list_zones
from .resources import StackContext


def look_up(context: StackContext, network_ids: Sequence[str], internet: Internet | None) -> StackNetwork:
    """Return a network by the ID of its VPC, of some of its subnets, or both. Without subnets, all that suit are taken.

    `internet` is the way that a job's machines need, None for any. Raises `CloudError` when the network has no such way
    or cannot have the file system.
    """
    if internet is Internet.NAT:
        raise CloudError(
            "--internet nat makes no NAT gateway in a network of yours; use --internet private with --subnet and --from"
        )
    account = context.account
    vpc_ids = [id for id in network_ids if id.startswith("vpc-")]
    subnet_ids = [id for id in network_ids if id not in vpc_ids]
    filters = {"subnet_id": subnet_ids} if subnet_ids else {"vpc_id": vpc_ids}
    subnets = sorted(
        list_tagged(account, "describe_subnets", {}, **filters), key=lambda subnet: str(subnet["SubnetId"])
    )
    if not subnet_ids:
        zones = list_zones(context)
        subnets = [subnet for subnet in subnets if subnet["AvailabilityZone"] in zones]
    found_ids = {subnet[key] for subnet in subnets for key in ("SubnetId", "VpcId")}
    if missing := [id for id in subnet_ids or vpc_ids if id not in found_ids]:
        raise CloudError(
            f"{', '.join(missing)}: {account.region} has no such network with subnets; to list them: "
            f"aws ec2 describe-subnets --region {account.region}"
        )
    vpc = (vpc_ids or [str(subnets[0]["VpcId"])])[0]
    for subnet in subnets:
        if subnet["VpcId"] != vpc:
            raise CloudError(f"{subnet['SubnetId']} is in {subnet['VpcId']} and not in {vpc}; name one network")
    _check_dns(context, vpc)
    tables = list_tagged(account, "describe_route_tables", {}, vpc_id=[vpc])
    endpoints = list_tagged(account, "describe_vpc_endpoints", {}, vpc_id=[vpc])
    s3_endpoints = [endpoint for endpoint in endpoints if endpoint["ServiceName"].endswith(".s3")]
    with_s3 = {table for endpoint in s3_endpoints for table in endpoint.get("RouteTableIds", [])}
    subnet_by_zone, problems, has_s3_endpoint = dict[str, str](), list[str](), True
    for subnet in subnets:
        zone, id = subnet["AvailabilityZone"], str(subnet["SubnetId"])
        table = _route_table(tables, id)
        if problem := _find_route_problem(table, id, internet or (None if subnet_ids else Internet.PUBLIC)):
            hint = f"{problem.partition(', so')[0]}; name the subnets: --subnet"
            problems.append(problem if internet or subnet_ids else hint)
        elif subnet_by_zone.setdefault(zone, id) != id and subnet_ids:
            raise CloudError(f"{subnet_by_zone[zone]} and {id} are both in {zone}; leave one of them out")
        elif not _is_public(table) and table["RouteTableId"] not in with_s3:
            has_s3_endpoint = False
    if problems and (subnet_ids or not subnet_by_zone):
        raise CloudError(problems[0])
    subnet_by_zone = dict(sorted(subnet_by_zone.items()))
    return StackNetwork(vpc, subnet_by_zone, (), is_given=True, has_s3_endpoint=has_s3_endpoint)


def _check_dns(context: StackContext, vpc: str) -> None:
    for attribute, option in (("enableDnsSupport", "dns-support"), (DNS_HOSTNAMES, "dns-hostnames")):
        if not is_attribute_on(context, vpc, attribute):
            raise CloudError(
                f"{vpc}: {attribute} is off, so machines cannot find the file system by its name; type: "
                f"aws ec2 modify-vpc-attribute --region {context.account.region} --vpc-id {vpc} --enable-{option}"
            )


def _route_table(tables: Sequence[Resource], subnet: str) -> Resource:
    def rank(table: Resource) -> int:
        own = [association for association in table["Associations"] if association.get("SubnetId") == subnet]
        return 0 if own else 1 if any(association.get("Main") for association in table["Associations"]) else 2

    return min(tables, key=rank)


def _internet_routes(table: Resource) -> list[Resource]:
    return [
        route
        for route in table["Routes"]
        if route.get("DestinationCidrBlock") == ANY_IPV4 and route.get("State") == "active"
    ]


def _is_public(table: Resource) -> bool:
    return any(str(route.get("GatewayId", "")).startswith("igw-") for route in _internet_routes(table))


def _find_route_problem(table: Resource, subnet: str, internet: Internet | None) -> str:
    """Return why machines of a subnet lack this way to the internet, "" when they have it."""
    is_public = _is_public(table)
    if internet in (Internet.PUBLIC, Internet.NONE) and not is_public:
        return (
            f"{subnet} has no route to an internet gateway ({table['RouteTableId']}), so no machine there can have a "
            "public address; if this computer reaches private ones: --internet private --from ADDRESS/32"
        )
    if not _internet_routes(table):
        return (
            f"{subnet} has no route to the internet ({table['RouteTableId']}), from which machines install packages; "
            "add one to a NAT gateway, or name another subnet"
        )
    if internet is Internet.PRIVATE and is_public:
        return (
            f"{subnet} leads to an internet gateway ({table['RouteTableId']}), which serves public addresses only; "
            "leave --internet private out, or name a subnet behind a NAT gateway"
        )
    return ""
