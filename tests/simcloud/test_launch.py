"""RunInstances of the simulated EC2: the launches that it refuses, also into reserved capacity."""

from typing import Any

import pytest
from support.simcloud.in_process import START, Cloud, cloud, refused, served
from support.simcloud.spot_market import offered

__all__ = ["cloud", "served"]


def error_code(cloud: Cloud, **changes: Any) -> str:
    """Return the code with which a changed request is refused. Asserts that nothing is launched."""
    code, status = refused(cloud.launch, **changes)
    assert status == 400 and cloud.sim.instances() == []
    return code


def tag_specification(kind: str) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": "job", "Value": "job-3"}]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
        ({"InstanceType": "p3.16xlarge"}, "Unsupported"),
        ({"InstanceType": "p4d.24xlarge", "Placement": {"AvailabilityZone": "us-east-1e"}}, "Unsupported"),
        ({"KeyName": "nobody"}, "InvalidKeyPair.NotFound"),
        ({"SubnetId": "subnet-0123456789abcdef0"}, "InvalidSubnetID.NotFound"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidGroup.NotFound"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue"),
        ({"Placement": {"GroupName": "nobody"}}, "InvalidPlacementGroup.Unknown"),
        ({"UserData": "x" * 16385}, "InvalidParameterValue"),
        ({"ClientToken": "x" * 65}, "InvalidParameterValue"),
        ({"TagSpecifications": [tag_specification("placement-group")]}, "InvalidParameterValue"),
        ({"TagSpecifications": [tag_specification("spot-instances-request")]}, "InvalidParameterCombination"),
        ({"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}]}, "InvalidBlockDeviceMapping"),
    ],
)
def test_run_instances_rejects_unknown_or_unfit_parameters(
    cloud: Cloud, changes: dict[str, Any], expected: str
) -> None:
    assert error_code(cloud, **changes) == expected
    has_no_market = "1e" in str(changes)  # what the market refuses, a dry run does not see
    assert refused(cloud.launch, **changes, DryRun=True) == (
        ("DryRunOperation", 412) if has_no_market else (expected, 400)
    )


def efa_interfaces(subnet: str, group: str, count: int) -> list[dict[str, Any]]:
    common = {"SubnetId": subnet, "Groups": [group], "InterfaceType": "efa", "DeleteOnTermination": True}
    return [{"NetworkCardIndex": card, "DeviceIndex": min(card, 1), **common} for card in range(count)]


def test_run_instances_rejects_impossible_interfaces(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    interfaces = efa_interfaces(subnet, group, 4)
    assert error_code(cloud, NetworkInterfaces=interfaces[:1]) == "InvalidParameterCombination"  # g5.xlarge has no EFA
    first, *others = interfaces
    for expected, changes in (
        ("InvalidParameterCombination", {"NetworkInterfaces": [{**first, "AssociatePublicIpAddress": True}, *others]}),
        ("InvalidParameterCombination", {"NetworkInterfaces": [{**first, "InterfaceType": "efa-only"}, *others]}),
        ("InvalidParameterCombination", {"NetworkInterfaces": interfaces, "SubnetId": subnet}),
        ("InvalidParameterCombination", {"NetworkInterfaces": interfaces, "SecurityGroupIds": [group]}),
        ("InvalidParameterValue", {"NetworkInterfaces": [first, first]}),
        ("AttachmentLimitExceeded", {"NetworkInterfaces": efa_interfaces(subnet, group, 5)}),
    ):
        assert error_code(cloud, InstanceType="p4d.24xlarge", **changes) == expected
    # By EC2's own description, card 0 of this type takes no EFA.
    type = "p6-b300.48xlarge"
    _, subnet, group = cloud.network(offered("us-east-1", type)[0])
    first, second = efa_interfaces(subnet, group, 2)
    assert error_code(cloud, InstanceType=type, NetworkInterfaces=[first, second]) == "InvalidParameterCombination"
    interfaces = [{**first, "InterfaceType": "interface"}, {**second, "InterfaceType": "efa-only"}]
    (id,) = cloud.launch(InstanceType=type, NetworkInterfaces=interfaces)
    plain, efa_only = cloud.instance(id)["NetworkInterfaces"]
    assert plain["PrivateIpAddress"] and not efa_only.get("PrivateIpAddress")
    assert "PublicIpAddress" not in cloud.instance(id), "EC2 gives none to an instance with several interfaces"


# --- reserved capacity ------------------------------------------------------------------------------------------------

ZONE, TYPE = "us-east-1a", "p5.48xlarge"
HOUR = 3600.0
GROUP = "arn:aws:resource-groups:us-east-1:123456789012:group/mine"
BLOCK_MARKET = {"MarketType": "capacity-block"}


def into(id: str, block: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a launch into a reservation, or into those of a group."""
    key = "CapacityReservationResourceGroupArn" if id.startswith("arn:") else "CapacityReservationId"
    target = {"CapacityReservationTarget": {key: id}}
    market = {"InstanceMarketOptions": BLOCK_MARKET} if block else {}
    arguments = {"InstanceType": TYPE, "Placement": {"AvailabilityZone": ZONE}, **market, **changes}
    return {"CapacityReservationSpecification": target, **arguments}


def test_launch_has_to_match_the_reservation(cloud: Cloud) -> None:
    plain = cloud.sim.reserve(TYPE, ZONE, 4)
    block = cloud.sim.reserve(TYPE, ZONE, 4, is_block=True, end=START + 24 * HOUR)
    later = cloud.sim.reserve(TYPE, ZONE, 4, is_block=True, start=START + HOUR, end=START + 24 * HOUR)
    grouped = cloud.sim.reserve(TYPE, ZONE, 4, placement_group="theirs")
    for arguments in (
        into(plain, InstanceType="p4d.24xlarge"),
        into(plain, Placement={"AvailabilityZone": "us-east-1b"}),
        into(plain, block=True),
        into(block),
        into(plain, InstanceMarketOptions={"MarketType": "spot"}),
        into(grouped),
        {"InstanceType": TYPE, "InstanceMarketOptions": BLOCK_MARKET},  # without a target
    ):
        assert error_code(cloud, **arguments) == "InvalidParameterCombination", arguments
    assert error_code(cloud, **into(later, block=True)) == "InvalidCapacityReservationState"
    assert error_code(cloud, **into("cr-0123456789abcdef0")) == "InvalidCapacityReservationId.NotFound"
    cloud.ec2.create_placement_group(GroupName="theirs", Strategy="cluster")
    cloud.launch(2, **into(grouped, Placement={"AvailabilityZone": ZONE, "GroupName": "theirs"}))


def test_group_takes_machines_of_its_matching_members(cloud: Cloud) -> None:
    members = [cloud.sim.reserve(TYPE, ZONE, 2, groups=[GROUP]) for _ in range(2)]
    other = cloud.sim.reserve("p4d.24xlarge", ZONE, 8, groups=[GROUP])
    ids = cloud.launch(3, **into(GROUP))
    assert {cloud.instance(id)["CapacityReservationId"] for id in ids} == set(members)
    rows = cloud.ec2.describe_capacity_reservations(CapacityReservationIds=[*members, other])["CapacityReservations"]
    assert [row["AvailableInstanceCount"] for row in rows] == [0, 1, 8]
    (first, second) = cloud.launch(2, **into(GROUP))
    assert "CapacityReservationId" not in cloud.instance(second), f"{first} took the last; the rest runs on demand"
