"""The stack's network."""

from typing import Any

import pytest
from support.aws_stack import RecordingAccount, count_resources

from infra.aws.stack import network
from infra.aws.stack.resources import StackContext


def stack_parts(account: RecordingAccount) -> tuple[Any, Any, Any]:
    """Return the stack's route table, internet gateway and S3 endpoint."""
    filters = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    (table,) = account.ec2.describe_route_tables(Filters=filters)["RouteTables"]
    (gateway,) = account.ec2.describe_internet_gateways(Filters=filters)["InternetGateways"]
    (endpoint,) = account.ec2.describe_vpc_endpoints(Filters=filters)["VpcEndpoints"]
    return table, gateway, endpoint


def test_ensure_routes_each_zone_to_the_internet_and_s3(account: RecordingAccount, work: StackContext) -> None:
    created = network.ensure(work)
    subnets = account.ec2.describe_subnets(SubnetIds=[*created.subnets.values()])["Subnets"]
    cidrs = {subnet["AvailabilityZone"]: subnet["CidrBlock"] for subnet in subnets}
    assert cidrs == {"us-west-1a": "10.77.0.0/20", "us-west-1b": "10.77.16.0/20"}
    # Each launch request decides about public addresses.
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets)
    response = account.ec2.describe_vpc_attribute(VpcId=created.vpc, Attribute="enableDnsHostnames")
    assert response["EnableDnsHostnames"]["Value"] is True
    table, gateway, endpoint = stack_parts(account)
    targets = {route.get("DestinationCidrBlock"): route.get("GatewayId") for route in table["Routes"]}
    assert targets["0.0.0.0/0"] == gateway["InternetGatewayId"]
    assert {association["SubnetId"] for association in table["Associations"]} == {*created.subnets.values()}
    assert [attachment["VpcId"] for attachment in gateway["Attachments"]] == [created.vpc]
    assert endpoint["ServiceName"] == "com.amazonaws.us-west-1.s3" and endpoint["VpcEndpointType"] == "Gateway"
    assert endpoint["RouteTableIds"] == [table["RouteTableId"]]


def test_list_zones_leaves_out_local_and_opt_in_zones(work: StackContext, monkeypatch: pytest.MonkeyPatch) -> None:
    names_and_details: list[tuple[str, dict[str, str]]] = [
        ("us-west-1c", {}),
        ("us-west-1a", {}),
        ("us-west-1b", {"State": "unavailable"}),
        ("us-west-1-lax-1a", {"ZoneType": "local-zone", "OptInStatus": "not-opted-in"}),
        ("us-west-1-wl1-las-wlz-1", {"ZoneType": "wavelength-zone"}),
        ("us-west-1d", {"OptInStatus": "not-opted-in"}),
    ]
    plain = {"ZoneType": "availability-zone", "OptInStatus": "opt-in-not-required", "State": "available"}
    zones = [{"ZoneName": name, **plain, **details} for name, details in names_and_details]
    monkeypatch.setattr(work.account.ec2, "describe_availability_zones", lambda: {"AvailabilityZones": zones})
    assert network.list_zones(work) == ["us-west-1a", "us-west-1c"]


def test_ensure_derives_addresses_from_the_zone_alone(
    account: RecordingAccount, work: StackContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = account.ec2.describe_availability_zones
    zone_b = [zone for zone in real()["AvailabilityZones"] if zone["ZoneName"].endswith("b")]
    monkeypatch.setattr(account.ec2, "describe_availability_zones", lambda: {"AvailabilityZones": zone_b})
    assert list(network.ensure(work).subnets) == ["us-west-1b"]
    monkeypatch.setattr(account.ec2, "describe_availability_zones", real)
    assert network.inspect_network(work).missing_parts == ("subnet in us-west-1a",)
    assert list(network.ensure(work).subnets) == ["us-west-1a", "us-west-1b"]


def remove_part(account: RecordingAccount, part: str) -> None:
    """Remove what another person may have removed by hand."""
    table, gateway, endpoint = stack_parts(account)
    ec2, attached = account.ec2, {"InternetGatewayId": gateway["InternetGatewayId"]}
    match part:
        case "route":
            ec2.delete_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0")
        case "association":
            ec2.disassociate_route_table(AssociationId=table["Associations"][0]["RouteTableAssociationId"])
        case "endpoint":
            ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint["VpcEndpointId"]])
        case "attachment" | "gateway":  # without the gateway its route is stale
            ec2.detach_internet_gateway(**attached, VpcId=gateway["Attachments"][0]["VpcId"])
            if part == "gateway":
                ec2.delete_internet_gateway(**attached)


@pytest.mark.parametrize(
    ("part", "label"),
    [
        ("route", "route table"),
        ("association", "route table"),
        ("endpoint", "S3 gateway endpoint (free)"),
        ("attachment", "internet gateway"),
        ("gateway", "internet gateway"),
    ],
)
def test_ensure_restores_a_removed_part(account: RecordingAccount, work: StackContext, part: str, label: str) -> None:
    created = network.ensure(work)
    remove_part(account, part)
    assert label in network.inspect_network(work).missing_parts
    assert network.ensure(work) == created and network.inspect_network(work).missing_parts == ()


def test_ensure_takes_the_used_vpc_and_deletes_idle_ones(account: RecordingAccount, work: StackContext) -> None:
    created = network.ensure(work)
    for _ in range(3):  # one of them sorts first by ID
        account.ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=work.tag_specifications("vpc"))
    assert network.inspect_network(work) == created and network.ensure(work) == created
    assert count_resources(account)["Vpcs"] == 1
