"""The launches that the simulated EC2 refuses."""

from typing import Any

import pytest
from support.simcloud.in_process import START, Cloud, refused
from support.simcloud.spot_market import offered

MARKETS = "", "spot", "capacity-block"
WRONG_VALUE, COMBINATION = "InvalidParameterValue", "InvalidParameterCombination"


def error_code(cloud: Cloud, **changes: Any) -> str:
    """Return the code with which a launch is refused. Asserts that nothing is launched."""
    code, status = refused(cloud.launch, **changes)
    assert status == 400 and cloud.sim.instances() == []
    return code


def tag_specification(*kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": "job", "Value": "job-3"}]} for kind in kinds]


@pytest.mark.parametrize(("changes", "expected"), [
    ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
    ({"InstanceType": "p3.16xlarge"}, "Unsupported"),
    ({"KeyName": "nobody"}, "InvalidKeyPair.NotFound"),
    ({"SubnetId": "subnet-0123456789abcdef0"}, "InvalidSubnetID.NotFound"),
    ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidGroup.NotFound"),
    ({"IamInstanceProfile": {"Name": "nobody"}}, WRONG_VALUE),
    ({"Placement": {"GroupName": "nobody"}}, "InvalidPlacementGroup.Unknown"),
    ({"UserData": "x" * 16385}, WRONG_VALUE),
    ({"ClientToken": "x" * 65}, WRONG_VALUE),
    ({"TagSpecifications": tag_specification("placement-group")}, WRONG_VALUE),
    ({"TagSpecifications": tag_specification("spot-instances-request")}, COMBINATION),
    ({"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}]}, "InvalidBlockDeviceMapping"),
])  # fmt: skip
def test_launch_with_unknown_or_unfit_parameters_is_refused_also_as_a_dry_run(
    cloud: Cloud, changes: dict[str, Any], expected: str
) -> None:
    assert error_code(cloud, **changes) == expected
    assert refused(cloud.launch, **changes, DryRun=True) == (expected, 400)


def efa_interfaces(subnet: str, group: str, count: int) -> list[dict[str, Any]]:
    common = {"SubnetId": subnet, "Groups": [group], "InterfaceType": "efa", "DeleteOnTermination": True}
    return [{"NetworkCardIndex": card, "DeviceIndex": min(card, 1), **common} for card in range(count)]


def test_launch_with_impossible_interfaces_is_refused(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    interfaces = efa_interfaces(subnet, group, 4)
    first, *others = interfaces
    for type, expected, changes in (
        ("g5.xlarge", COMBINATION, {"NetworkInterfaces": [first]}),  # it has no EFA
        ("p4d.24xlarge", COMBINATION, {"NetworkInterfaces": [{**first, "AssociatePublicIpAddress": True}, *others]}),
        ("p4d.24xlarge", COMBINATION, {"NetworkInterfaces": [{**first, "InterfaceType": "efa-only"}, *others]}),
        ("p4d.24xlarge", COMBINATION, {"NetworkInterfaces": interfaces, "SubnetId": subnet}),
        ("p4d.24xlarge", COMBINATION, {"NetworkInterfaces": interfaces, "SecurityGroupIds": [group]}),
        ("p4d.24xlarge", WRONG_VALUE, {"NetworkInterfaces": [first, first]}),
        ("p4d.24xlarge", "AttachmentLimitExceeded", {"NetworkInterfaces": efa_interfaces(subnet, group, 5)}),
    ):
        assert error_code(cloud, InstanceType=type, **changes) == expected, (type, changes)
    type = "p6-b300.48xlarge"  # by EC2's own description, its card 0 takes no EFA
    _, subnet, group = cloud.network(offered("us-east-1", type)[0])
    assert error_code(cloud, InstanceType=type, NetworkInterfaces=efa_interfaces(subnet, group, 2)) == COMBINATION


def test_launch_has_to_match_the_reservation(cloud: Cloud) -> None:
    zone, type, end = "us-east-1a", "p5.48xlarge", START + 24 * 3600.0
    plain = cloud.sim.reserve(type, zone, 4)
    block = cloud.sim.reserve(type, zone, 4, is_block=True, end=end)
    later = cloud.sim.reserve(type, zone, 4, is_block=True, start=START + 3600.0, end=end)
    grouped = cloud.sim.reserve(type, zone, 4, placement_group="theirs")
    on_demand, spot, in_block = ({"InstanceMarketOptions": {"MarketType": m} if m else {}} for m in MARKETS)
    for id, market, changes, expected in (
        (plain, on_demand, {"InstanceType": "p4d.24xlarge"}, COMBINATION),
        (plain, on_demand, {"Placement": {"AvailabilityZone": "us-east-1b"}}, COMBINATION),
        (plain, spot, {}, COMBINATION),
        (plain, in_block, {}, COMBINATION),
        (block, on_demand, {}, COMBINATION),
        (grouped, on_demand, {}, COMBINATION),
        ("", in_block, {}, COMBINATION),
        (later, in_block, {}, "InvalidCapacityReservationState"),
        ("cr-0123456789abcdef0", on_demand, {}, "InvalidCapacityReservationId.NotFound"),
    ):
        target = {"CapacityReservationTarget": {"CapacityReservationId": id} if id else {}}
        arguments = {"InstanceType": type, "Placement": {"AvailabilityZone": zone}, **market, **changes}
        assert error_code(cloud, CapacityReservationSpecification=target, **arguments) == expected, (id, arguments)


def test_group_of_reservations_that_is_too_small_is_left_in_silence_unless_the_request_forbids_it(cloud: Cloud) -> None:
    zone, type, arn = "us-east-1a", "p5.48xlarge", "arn:aws:resource-groups:us-east-1:123456789012:group/mine"
    id = cloud.sim.reserve(type, zone, 1, groups=[arn])
    target = {"CapacityReservationTarget": {"CapacityReservationResourceGroupArn": arn}}
    arguments: dict[str, Any] = {"InstanceType": type, "Placement": {"AvailabilityZone": zone}}
    arguments |= {"MinCount": 2, "MaxCount": 2}
    for preference, expected in ("open", COMBINATION), ("capacity-reservations-only", "ReservationCapacityExceeded"):
        specification = {**target, "CapacityReservationPreference": preference}
        assert error_code(cloud, CapacityReservationSpecification=specification, **arguments) == expected
    cloud.launch(CapacityReservationSpecification=target, **arguments)
    described = cloud.ec2.describe_instances()["Reservations"][0]["Instances"]
    assert [instance.get("CapacityReservationId") for instance in described] == [id, None]
