from typing import Any

import pytest
from support.aws_stack import Seen, account, aws, counts, home, work

from infra.aws.stack import network
from infra.aws.stack.resources import StackContext

__all__ = ["account", "aws", "home", "work"]


def test_each_zone_has_a_public_subnet_of_its_own_with_room(account: Seen, work: StackContext) -> None:
    made = network.ensure(work)
    found = account.ec2.describe_subnets(SubnetIds=[*made.subnets.values()])["Subnets"]
    assert {one["AvailabilityZone"]: one["CidrBlock"] for one in found} == {
        "us-west-1a": "10.77.0.0/20",
        "us-west-1b": "10.77.16.0/20",
    }
    assert not any(one["MapPublicIpOnLaunch"] for one in found)  # the request asks for an address, or does not
    (vpc,) = account.ec2.describe_vpcs(VpcIds=[made.vpc])["Vpcs"]
    assert vpc["CidrBlock"] == "10.77.0.0/16"


def test_every_subnet_has_a_way_out_and_s3_without_one(account: Seen, work: StackContext) -> None:
    made = network.ensure(work)
    where = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    (table,) = account.ec2.describe_route_tables(Filters=where)["RouteTables"]
    (gateway,) = account.ec2.describe_internet_gateways(Filters=where)["InternetGateways"]
    (endpoint,) = account.ec2.describe_vpc_endpoints(Filters=where)["VpcEndpoints"]
    routes = {one["DestinationCidrBlock"]: one["GatewayId"] for one in table["Routes"] if "DestinationCidrBlock" in one}
    assert routes["0.0.0.0/0"] == gateway["InternetGatewayId"]
    assert {one["SubnetId"] for one in table["Associations"]} == {*made.subnets.values()}
    assert [one["VpcId"] for one in gateway["Attachments"]] == [made.vpc]
    assert endpoint["ServiceName"] == "com.amazonaws.us-west-1.s3" and endpoint["VpcEndpointType"] == "Gateway"
    assert endpoint["RouteTableIds"] == [table["RouteTableId"]]


def test_names_of_file_systems_can_be_resolved(account: Seen, work: StackContext) -> None:
    said = account.ec2.describe_vpc_attribute(VpcId=network.ensure(work).vpc, Attribute="enableDnsHostnames")
    assert said["EnableDnsHostnames"]["Value"] is True


def zone(name: str, **more: Any) -> dict[str, Any]:
    plain = {"ZoneType": "availability-zone", "OptInStatus": "opt-in-not-required", "State": "available"}
    return {"ZoneName": name, **plain, **more}


def test_zones_that_must_be_asked_for_or_are_elsewhere_are_passed_over(
    work: StackContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        zone("us-west-1c"),
        zone("us-west-1a"),
        zone("us-west-1b", State="unavailable"),
        zone("us-west-1-lax-1a", ZoneType="local-zone", OptInStatus="not-opted-in"),
        zone("us-west-1-wl1-las-wlz-1", ZoneType="wavelength-zone"),
        zone("us-west-1d", OptInStatus="not-opted-in"),
    ]
    monkeypatch.setattr(work.account.ec2, "describe_availability_zones", lambda: {"AvailabilityZones": found})
    assert network.list_zones(work) == ["us-west-1a", "us-west-1c"]


def test_a_zones_subnet_has_the_same_addresses_whatever_other_zones_there_are(
    account: Seen, work: StackContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = account.ec2.describe_availability_zones
    one = [each for each in real()["AvailabilityZones"] if each["ZoneName"].endswith("b")]
    monkeypatch.setattr(account.ec2, "describe_availability_zones", lambda: {"AvailabilityZones": one})
    assert list(network.ensure(work).subnets) == ["us-west-1b"]
    monkeypatch.setattr(account.ec2, "describe_availability_zones", real)
    assert network.inspect_network(work).missing_parts == ("subnet in us-west-1a",)
    assert list(network.ensure(work).subnets) == ["us-west-1a", "us-west-1b"]


def test_a_zone_without_the_file_system_is_marked_for_all_and_left_out(account: Seen, work: StackContext) -> None:
    made = network.ensure(work)
    network.mark_without_efs(work, "us-west-1a", made.subnets["us-west-1a"])
    for found in (network.inspect_network(work), network.ensure(work)):
        assert list(found.subnets) == ["us-west-1b"] and found.missing_parts == ()


@pytest.mark.parametrize(
    "part, said",
    [
        ("delete_route", "route table"),
        ("detach_internet_gateway", "internet gateway"),
        ("delete_vpc_endpoints", "S3 gateway endpoint (free)"),
        ("disassociate_route_table", "route table"),
    ],
)
def test_a_part_that_somebody_took_away_is_named_and_made_again(
    account: Seen, work: StackContext, part: str, said: str
) -> None:
    made = network.ensure(work)
    where = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    (table,) = account.ec2.describe_route_tables(Filters=where)["RouteTables"]
    (gateway,) = account.ec2.describe_internet_gateways(Filters=where)["InternetGateways"]
    (endpoint,) = account.ec2.describe_vpc_endpoints(Filters=where)["VpcEndpoints"]
    words: dict[str, Any] = {
        "delete_route": {"RouteTableId": table["RouteTableId"], "DestinationCidrBlock": "0.0.0.0/0"},
        "detach_internet_gateway": {"InternetGatewayId": gateway["InternetGatewayId"], "VpcId": made.vpc},
        "delete_vpc_endpoints": {"VpcEndpointIds": [endpoint["VpcEndpointId"]]},
        "disassociate_route_table": {"AssociationId": table["Associations"][0]["RouteTableAssociationId"]},
    }
    getattr(account.ec2, part)(**words[part])
    assert said in network.inspect_network(work).missing_parts
    assert network.ensure(work) == made and network.inspect_network(work).missing_parts == ()


def test_of_two_networks_the_one_in_use_is_taken_and_an_idle_one_removed(account: Seen, work: StackContext) -> None:
    made = network.ensure(work)
    for _ in range(3):  # one of them comes first by its id
        account.ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=work.tag_specifications("vpc"))
    assert network.inspect_network(work) == made and network.ensure(work) == made
    assert counts(account)["Vpcs"] == 1


def test_a_route_to_a_gateway_that_is_gone_is_replaced(account: Seen, work: StackContext) -> None:
    made = network.ensure(work)
    (gateway,) = account.ec2.describe_internet_gateways(Filters=[{"Name": "attachment.vpc-id", "Values": [made.vpc]}])[
        "InternetGateways"
    ]
    id = gateway["InternetGatewayId"]
    account.ec2.detach_internet_gateway(InternetGatewayId=id, VpcId=made.vpc)
    account.ec2.delete_internet_gateway(InternetGatewayId=id)
    assert network.ensure(work) == made and network.inspect_network(work).missing_parts == ()
