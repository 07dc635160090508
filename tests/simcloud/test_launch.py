"""RunInstances of the simulated EC2: the launches that it refuses, client tokens, and the properties of instances."""

from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served
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


def test_run_instances_rejects_groups_of_another_network_and_full_subnets(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    groups = cloud.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])
    other_groups = [row["GroupId"] for row in groups["SecurityGroups"] if row["GroupId"] != group]
    assert error_code(cloud, SubnetId=subnet, SecurityGroupIds=other_groups) == "InvalidParameter"
    small = cloud.subnet(cloud.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"], "us-east-1a", "10.9.0.0/28")
    assert refused(cloud.launch, 12, SubnetId=small)[0] == "InsufficientFreeAddressesInSubnet"
    assert len(cloud.launch(11, SubnetId=small)) == 11


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
