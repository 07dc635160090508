"""The network of a stack: one VPC, a public subnet in each zone, a way out, and S3 without one.

Source: AWS, "VPC with public subnets", "Gateway endpoints for Amazon S3". Names of EFS need DNS host names switched on.
"""

from dataclasses import dataclass
from ipaddress import IPv4Network

from infra.aws import tags
from infra.aws.client import call, pages
from infra.aws.errors import CloudError

from .resources import SEEN_SECONDS, Thing, Work, until

CIDR = IPv4Network("10.77.0.0/16")
SUBNETS = [str(one) for one in CIDR.subnets(new_prefix=20)]  # 16 zones of 4091 addresses
ANYWHERE = "0.0.0.0/0"
NO_FILES = "imgnet:no-files"  # the tag of a subnet in a zone that EFS does not serve
VPC_QUOTA = "aws service-quotas request-service-quota-increase --service-code vpc --quota-code L-F678F1CE"


@dataclass(frozen=True)
class Network:
    """What is there of it: ids, subnets by zone, and one short line for each part that is not."""

    vpc: str | None
    subnets: dict[str, str]
    missing: tuple[str, ...]


def look(work: Work) -> Network:
    """Describe the network. Raises `CloudError`."""
    ours = sorted(vpcs(work), key=lambda one: (not _in_use(work, one), one))
    if not ours:
        return Network(None, {}, (f"network {CIDR} with a public subnet in each zone (VPC)",))
    vpc = ours[0]
    subnets = _subnets(work, vpc)
    gateways = [one["InternetGatewayId"] for one in _gateways(work, vpc) if one["Attachments"]]
    tables = _tables(work, vpc)
    parts = {
        "host names in the network": _names_hosts(work, vpc),
        "internet gateway": bool(gateways),
        "route table": bool(tables)
        and _leads_out(tables[0], gateways)
        and _joined(tables[0]) >= {one["SubnetId"] for one in subnets},
        "S3 gateway endpoint (free)": bool(_endpoints(work, vpc)),
        **{f"subnet in {zone}": zone in _by_zone(subnets) for zone in zones(work)},
    }
    return Network(vpc, _by_zone(subnets, shared=True), tuple(name for name, there in parts.items() if not there))


def ensure(work: Work) -> Network:
    """Make what is missing of the network. Raises `CloudError`."""
    vpc = _vpc(work)
    if not _names_hosts(work, vpc):
        words = {"VpcId": vpc, "EnableDnsHostnames": {"Value": True}}
        work.make("host names in the network", work.account.ec2.modify_vpc_attribute, **words)
    subnets = _make_subnets(work, vpc)
    gateway = _gateway(work, vpc)
    table = _table(work, vpc)
    _route(work, table, gateway, [one["SubnetId"] for one in subnets])
    _endpoint(work, vpc, table["RouteTableId"])
    return Network(vpc, _by_zone(subnets, shared=True), ())


def without_files(work: Work, zone: str, subnet: str) -> None:
    """Mark a subnet: EFS does not serve its zone, so no machines go there."""
    work.say(f"{zone} has no EFS: no machines there")
    words = {"Resources": [subnet], "Tags": tags.pairs({NO_FILES: "yes"})}
    work.make(f"mark of {zone}", work.account.ec2.create_tags, **words)


def remove(work: Work) -> None:
    """Remove every network of ours, in order; what stays is in `work.left`."""
    ec2 = work.account.ec2
    for vpc in vpcs(work):
        for endpoint in _endpoints(work, vpc):
            work.drop("S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[endpoint["VpcEndpointId"]])
        for subnet in _subnets(work, vpc):
            work.drop(f"subnet {subnet['SubnetId']}", ec2.delete_subnet, SubnetId=subnet["SubnetId"])
        for table in _tables(work, vpc):
            for one in table["Associations"]:
                id = one["RouteTableAssociationId"]
                work.drop("route of a subnet", ec2.disassociate_route_table, AssociationId=id)
            work.drop("route table", ec2.delete_route_table, RouteTableId=table["RouteTableId"])
        for gateway in _gateways(work, vpc):
            _drop_gateway(work, gateway)
        work.drop(f"network {vpc} (free)", ec2.delete_vpc, VpcId=vpc)
    for gateway in _gateways(work, None):
        _drop_gateway(work, gateway)


def zones(work: Work) -> list[str]:
    """Return the zones of the region where every account has its machines: no local zones, none to opt into."""
    found = call("zones", work.account.ec2.describe_availability_zones)["AvailabilityZones"]
    return sorted(
        one["ZoneName"]
        for one in found
        if one.get("ZoneType", "availability-zone") == "availability-zone"
        and one.get("OptInStatus", "opt-in-not-required") == "opt-in-not-required"
        and one.get("State", "available") == "available"
        and _number(one["ZoneName"]) < len(SUBNETS)
    )


def vpcs(work: Work) -> list[str]:
    """Return the ids of our networks: one, but for what a crash has left."""
    return [one["VpcId"] for one in _vpcs(work)]


def machines(work: Work) -> list[Thing]:
    """Return the machines in our networks that are not about to be gone."""
    ours = vpcs(work)
    if not ours:
        return []
    alive = ["pending", "running", "stopping", "stopped"]
    where = tags.filters({}, vpc_id=ours, instance_state_name=alive)
    found = pages("machines in the network", work.account.ec2, "describe_instances", "Reservations", Filters=where)
    return [machine for one in found for machine in one["Instances"]]


# --- the parts -----------------------------------------------------------------------------------------------------


def _number(zone: str) -> int:
    """The place of a zone's subnet, by its letter: whoever makes it, whatever others there are, it is the same."""
    return ord(zone[-1]) - ord("a")


def _our(work: Work, what: str, operation: str, key: str, vpc: str | None = None) -> list[Thing]:
    where = {"vpc_id": [vpc]} if vpc else {}
    filters = tags.filters({tags.STACK: tags.OURS}, **where)
    return pages(what, work.account.ec2, operation, key, Filters=filters)


def _vpcs(work: Work) -> list[Thing]:
    return _our(work, "networks", "describe_vpcs", "Vpcs")


def _subnets(work: Work, vpc: str) -> list[Thing]:
    return _our(work, "subnets", "describe_subnets", "Subnets", vpc)


def _gateways(work: Work, vpc: str | None) -> list[Thing]:
    """Ours at this network, and those at none."""
    found = _our(work, "internet gateways", "describe_internet_gateways", "InternetGateways")
    return [one for one in found if [at["VpcId"] for at in one["Attachments"]] in ([vpc], [])]


def _tables(work: Work, vpc: str) -> list[Thing]:
    found = _our(work, "route tables", "describe_route_tables", "RouteTables", vpc)
    return sorted(found, key=lambda one: (not _joined(one), one["RouteTableId"]))


def _endpoints(work: Work, vpc: str) -> list[Thing]:
    found = _our(work, "endpoints", "describe_vpc_endpoints", "VpcEndpoints", vpc)
    return [one for one in found if not one.get("State", "").lower().startswith("delet")]


def _by_zone(subnets: list[Thing], shared: bool = False) -> dict[str, str]:
    """By zone; only those with the file system if `shared`."""
    return {
        one["AvailabilityZone"]: str(one["SubnetId"])
        for one in sorted(subnets, key=lambda one: str(one["AvailabilityZone"]))
        if not shared or tags.read(one).get(NO_FILES) is None
    }


def _names_hosts(work: Work, vpc: str) -> bool:
    words = {"VpcId": vpc, "Attribute": "enableDnsHostnames"}
    said = call("host names in the network", work.account.ec2.describe_vpc_attribute, **words)
    return bool(said["EnableDnsHostnames"]["Value"])


def _joined(table: Thing) -> set[str]:
    return {one["SubnetId"] for one in table["Associations"] if one.get("SubnetId")}


def _leads_out(table: Thing, gateways: list[str]) -> bool:
    return any(
        one.get("DestinationCidrBlock") == ANYWHERE and one.get("GatewayId") in gateways for one in table["Routes"]
    )


def _in_use(work: Work, vpc: str) -> bool:
    return bool(_subnets(work, vpc))


def _vpc(work: Work) -> str:
    ec2 = work.account.ec2

    def make() -> None:
        try:
            work.make(
                "network (VPC)", ec2.create_vpc, CidrBlock=str(CIDR), TagSpecifications=work.specifications("vpc")
            )
        except CloudError as error:
            if error.code != "VpcLimitExceeded":
                raise
            more = f"{VPC_QUOTA} --desired-value 10 --region {work.account.region}"
            raise CloudError(f"the region has as many networks (VPC) as it may; type: {more}", error.code) from error

    found = work.agree(
        f"network {CIDR}", lambda: _vpcs(work), make,
        lambda one: work.drop("network", ec2.delete_vpc, VpcId=one["VpcId"]),
        id="VpcId", used=lambda one: _in_use(work, one["VpcId"]),
    )  # fmt: skip
    return str(found["VpcId"])


def _make_subnets(work: Work, vpc: str) -> list[Thing]:
    there = _subnets(work, vpc)
    new = [zone for zone in zones(work) if zone not in _by_zone(there)]
    if not new:
        return there
    work.say(f"making a subnet in each of {' '.join(new)}")
    for zone in new:
        words = {"VpcId": vpc, "AvailabilityZone": zone, "CidrBlock": SUBNETS[_number(zone)]}
        specifications = work.specifications("subnet")
        work.make(f"subnet in {zone}", work.account.ec2.create_subnet, TagSpecifications=specifications, **words)

    def all_seen() -> list[Thing]:
        found = _subnets(work, vpc)
        return found if _by_zone(found).keys() >= {*new} else []

    return until(all_seen, f"subnets of {vpc} were made, and AWS does not show them with our tag", SEEN_SECONDS)


def _gateway(work: Work, vpc: str) -> str:
    ec2 = work.account.ec2
    words = {"TagSpecifications": work.specifications("internet-gateway")}
    found = work.agree(
        "internet gateway", lambda: _gateways(work, vpc),
        lambda: work.make("internet gateway", ec2.create_internet_gateway, **words),
        lambda one: work.drop(
            "internet gateway", ec2.delete_internet_gateway, InternetGatewayId=one["InternetGatewayId"]
        ),
        id="InternetGatewayId", used=lambda one: bool(one["Attachments"]),
    )  # fmt: skip
    gateway = str(found["InternetGatewayId"])
    if not found["Attachments"]:
        work.make("way out", ec2.attach_internet_gateway, InternetGatewayId=gateway, VpcId=vpc)
    return gateway


def _drop_gateway(work: Work, gateway: Thing) -> None:
    ec2, id = work.account.ec2, gateway["InternetGatewayId"]
    for at in gateway["Attachments"]:
        work.drop("way out", ec2.detach_internet_gateway, InternetGatewayId=id, VpcId=at["VpcId"])
    work.drop("internet gateway", ec2.delete_internet_gateway, InternetGatewayId=id)


def _table(work: Work, vpc: str) -> Thing:
    ec2 = work.account.ec2
    words = {"VpcId": vpc, "TagSpecifications": work.specifications("route-table")}
    return work.agree(
        "route table", lambda: _tables(work, vpc),
        lambda: work.make("route table", ec2.create_route_table, **words),
        lambda one: work.drop("route table", ec2.delete_route_table, RouteTableId=one["RouteTableId"]),
        id="RouteTableId", used=lambda one: bool(_joined(one)),
    )  # fmt: skip


def _route(work: Work, table: Thing, gateway: str, subnets: list[str]) -> None:
    ec2, id = work.account.ec2, table["RouteTableId"]
    if not _leads_out(table, [gateway]):
        stale = any(one.get("DestinationCidrBlock") == ANYWHERE for one in table["Routes"])  # to a gateway that is gone
        function = ec2.replace_route if stale else ec2.create_route
        work.make("route", function, RouteTableId=id, DestinationCidrBlock=ANYWHERE, GatewayId=gateway)
    for subnet in subnets:
        if subnet not in _joined(table):
            work.make(f"route of {subnet}", ec2.associate_route_table, RouteTableId=id, SubnetId=subnet)


def _endpoint(work: Work, vpc: str, table: str) -> None:
    ec2, service = work.account.ec2, f"com.amazonaws.{work.account.region}.s3"
    if not _endpoints(work, vpc):
        work.make(
            "S3 gateway endpoint", ec2.create_vpc_endpoint, VpcId=vpc, VpcEndpointType="Gateway", ServiceName=service,
            RouteTableIds=[table], TagSpecifications=work.specifications("vpc-endpoint"),
        )  # fmt: skip
    for spare in sorted(one["VpcEndpointId"] for one in _endpoints(work, vpc))[1:]:
        work.drop("spare S3 endpoint", ec2.delete_vpc_endpoints, VpcEndpointIds=[spare])
