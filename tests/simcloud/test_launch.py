"""RunInstances of the simulated EC2: its checks with their error codes, and the properties of new instances."""

import base64
import json
from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served
from support.simcloud.spot_market import offered

__all__ = ["cloud", "served"]
SPOT = {"MarketType": "spot"}
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE a@b"


def error_code(cloud: Cloud, **changes: Any) -> str:
    """Return the code with which a changed request is refused. Asserts that nothing is launched."""
    code, status = refused(cloud.launch, **changes)
    assert status == 400 and cloud.sim.instances() == []
    return code


def tag_specification(kind: str, key: str = "job") -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": "job-3"}]}


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
        ({"ImageId": "ami-ZZ"}, "InvalidAMIID.Malformed"),
        ({"InstanceType": "bogus.xlarge"}, "InvalidParameterValue"),
        ({"InstanceType": "p3.16xlarge"}, "Unsupported"),
        ({"InstanceType": "p4d.24xlarge", "Placement": {"AvailabilityZone": "us-east-1e"}}, "Unsupported"),
        ({"KeyName": "nobody"}, "InvalidKeyPair.NotFound"),
        ({"SubnetId": "subnet-0123456789abcdef0"}, "InvalidSubnetID.NotFound"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidGroup.NotFound"),
        ({"SecurityGroupIds": ["sg-what"]}, "InvalidGroupId.Malformed"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue"),
        ({"IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/x"}}, "InvalidParameterValue"),
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


def test_run_instances_rejects_foreign_groups_and_full_subnets(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    response = cloud.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])
    other_groups = [row["GroupId"] for row in response["SecurityGroups"] if row["GroupId"] != group]
    assert error_code(cloud, SubnetId=subnet, SecurityGroupIds=other_groups) == "InvalidParameter"
    small = cloud.subnet(cloud.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"], "us-east-1a", "10.9.0.0/28")
    assert refused(cloud.launch, 12, SubnetId=small)[0] == "InsufficientFreeAddressesInSubnet"
    assert len(cloud.launch(11, SubnetId=small)) == 11
    assert refused(cloud.launch, 1, SubnetId=small)[0] == "InsufficientFreeAddressesInSubnet"


def test_quotas_count_vcpu_by_market_and_family(cloud: Cloud) -> None:
    cloud.sim.quota_vcpu = {"L-DB2E81BA": 8, "L-3819A6DF": 4, "L-C4BD4855": 0, "L-7212CCBC": 96, "L-417A185B": 0}
    assert refused(cloud.launch, 3) == ("VcpuLimitExceeded", 400)
    first, _ = cloud.launch(2)
    assert refused(cloud.launch)[0] == "VcpuLimitExceeded"
    cloud.launch(InstanceMarketOptions=SPOT)
    assert refused(cloud.launch, InstanceMarketOptions=SPOT) == ("MaxSpotInstanceCountExceeded", 400)
    large: dict[str, Any] = {"InstanceMarketOptions": SPOT, "Placement": {"AvailabilityZone": "us-east-1d"}}
    assert refused(cloud.launch, InstanceType="p5.48xlarge", **large)[0] == "MaxSpotInstanceCountExceeded"
    assert cloud.launch(InstanceType="p4d.24xlarge", **large)
    assert refused(cloud.launch, InstanceType="p4d.24xlarge")[0] == "VcpuLimitExceeded"
    cloud.ec2.terminate_instances(InstanceIds=[first])
    assert cloud.launch()


# --- new instances --------------------------------------------------------------------------------------------------


def test_run_instances_sets_profile_metadata_options_and_index(cloud: Cloud) -> None:
    cloud.client("iam").create_instance_profile(InstanceProfileName="node")
    options = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    ids = cloud.launch(3, IamInstanceProfile={"Name": "node"}, MetadataOptions=options)
    instances = [cloud.instance(id) for id in ids]
    assert all(instance["IamInstanceProfile"]["Arn"].endswith(":instance-profile/node") for instance in instances)
    assert all(instance["MetadataOptions"]["HttpTokens"] == "required" for instance in instances)
    assert [instance["AmiLaunchIndex"] for instance in instances] == [0, 1, 2]


def test_run_instances_tags_all_resources(cloud: Cloud) -> None:
    kinds = ("instance", "volume", "network-interface", "spot-instances-request")
    specifications = [tag_specification(kind, kind) for kind in kinds]
    (id,) = cloud.launch(InstanceMarketOptions=SPOT, TagSpecifications=specifications)
    instance = cloud.instance(id)
    interfaces = cloud.ec2.describe_network_interfaces(Filters=[{"Name": "tag:network-interface", "Values": ["job-3"]}])
    disks = cloud.ec2.describe_volumes(Filters=[{"Name": "tag:volume", "Values": ["job-3"]}])
    filters = [{"Name": "tag:spot-instances-request", "Values": ["job-*"]}]
    requests = cloud.ec2.describe_spot_instance_requests(Filters=filters)["SpotInstanceRequests"]
    assert instance["Tags"] == [{"Key": "instance", "Value": "job-3"}]
    assert interfaces["NetworkInterfaces"][0]["Attachment"]["InstanceId"] == id
    assert disks["Volumes"][0]["Attachments"][0]["InstanceId"] == id
    assert requests[0]["SpotInstanceRequestId"] == instance["SpotInstanceRequestId"]
    assert requests[0]["InstanceId"] == id


def test_spot_request_follows_its_instance(cloud: Cloud) -> None:
    first, second, third = cloud.launch(3, InstanceMarketOptions=SPOT)

    def status(id: str) -> tuple[str, str]:
        ids = [cloud.instance(id)["SpotInstanceRequestId"]]
        (row,) = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=ids)["SpotInstanceRequests"]
        return row["State"], row["Status"]["Code"]

    assert status(first) == ("active", "fulfilled")
    cloud.sim.interrupt(first, 60)
    assert status(first) == ("active", "marked-for-termination")
    cloud.sim.advance(60)
    cloud.ec2.terminate_instances(InstanceIds=[second])
    assert status(first) == ("closed", "instance-terminated-no-capacity")
    assert status(second) == ("closed", "instance-terminated-by-user")
    request = cloud.instance(third)["SpotInstanceRequestId"]
    cloud.ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request])
    assert status(third)[0] == "cancelled" and cloud.state(third) == "running"
    call = cloud.ec2.describe_spot_instance_requests
    assert refused(call, SpotInstanceRequestIds=["sir-00000000"])[0] == "InvalidSpotInstanceRequestID.NotFound"


def test_disks_are_as_requested_and_end_with_the_instance(cloud: Cloud) -> None:
    disks = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True}}]
    disks[0]["Ebs"] |= {"Iops": 6000, "Throughput": 500}  # type: ignore[operator]
    kept_disk = {"DeviceName": "/dev/sdb", "Ebs": {"VolumeSize": 10, "DeleteOnTermination": False}}
    (id,) = cloud.launch(BlockDeviceMappings=[*disks, kept_disk])
    (default_id,) = cloud.launch()
    large, kept, default = cloud.ec2.describe_volumes()["Volumes"]
    assert (large["Size"], large["Iops"], large["Throughput"], large["Encrypted"]) == (200, 6000, 500, True)
    assert (default["Size"], default["VolumeType"]) == (75, "gp3")
    cloud.ec2.terminate_instances(InstanceIds=[id, default_id])
    assert [row["VolumeId"] for row in cloud.ec2.describe_volumes()["Volumes"]] == [kept["VolumeId"]]


def test_addresses_are_unique_loopback_addresses(cloud: Cloud) -> None:
    _, subnet, _ = cloud.network(public=True)
    _, private_subnet, _ = cloud.network()
    cloud.launch(3, SubnetId=subnet)
    cloud.launch(SubnetId=private_subnet)
    cloud.launch(NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": private_subnet, "AssociatePublicIpAddress": True}])
    views = cloud.sim.instances()
    assert [view.public == view.private for view in views] == [True, True, True, False, True]
    assert views[3].public is None and len({view.private for view in views}) == 5
    assert all(view.private.startswith("127.1.") for view in views)
    assert cloud.instance(views[0].id)["PublicIpAddress"] == views[0].public
    assert "PublicIpAddress" not in cloud.instance(views[3].id)


def efa_interfaces(subnet: str, group: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": min(card, 1),
            "SubnetId": subnet,
            "Groups": [group],
            "InterfaceType": "efa",
            "DeleteOnTermination": True,
        }
        for card in range(count)
    ]


@pytest.mark.parametrize(("type", "zone", "number"), [("p4d.24xlarge", "a", 4), ("p5.48xlarge", "d", 32)])
def test_efa_interfaces_keep_cards_and_have_no_public_address(cloud: Cloud, type: str, zone: str, number: int) -> None:
    _, subnet, group = cloud.network(f"us-east-1{zone}", public=True)
    (id,) = cloud.launch(InstanceType=type, NetworkInterfaces=efa_interfaces(subnet, group, number))
    interfaces = cloud.instance(id)["NetworkInterfaces"]
    assert [interface["Attachment"]["NetworkCardIndex"] for interface in interfaces] == list(range(number))
    assert [interface["Attachment"]["DeviceIndex"] for interface in interfaces] == [
        min(card, 1) for card in range(number)
    ]
    assert {interface["InterfaceType"] for interface in interfaces} == {"efa"}
    assert {interface["Groups"][0]["GroupId"] for interface in interfaces} == {group}
    assert "PublicIpAddress" not in cloud.instance(id) and cloud.instance(id)["PrivateIpAddress"].startswith("127.1.")
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert cloud.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_run_instances_rejects_impossible_interfaces(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    interfaces = efa_interfaces(subnet, group, 4)
    assert error_code(cloud, NetworkInterfaces=interfaces[:1]) == "InvalidParameterCombination"  # g5.xlarge has no EFA
    p4d = {"InstanceType": "p4d.24xlarge"}
    public = [{**interfaces[0], "AssociatePublicIpAddress": True}, *interfaces[1:]]
    assert error_code(cloud, **p4d, NetworkInterfaces=public) == "InvalidParameterCombination"
    assert error_code(cloud, **p4d, NetworkInterfaces=[interfaces[0], interfaces[0]]) == "InvalidParameterValue"
    assert error_code(cloud, **p4d, NetworkInterfaces=efa_interfaces(subnet, group, 5)) == "AttachmentLimitExceeded"
    assert error_code(cloud, **p4d, NetworkInterfaces=interfaces, SubnetId=subnet) == "InvalidParameterCombination"
    assert (
        error_code(cloud, **p4d, NetworkInterfaces=interfaces, SecurityGroupIds=[group])
        == "InvalidParameterCombination"
    )


def test_run_instances_checks_the_interface_types_of_each_card(cloud: Cloud) -> None:
    """By EC2's own description, card 0 of p6-b300 takes no EFA, and no primary interface is EFA-only."""
    zone = offered("us-east-1", "p6-b300.48xlarge")[0]
    _, subnet, group = cloud.network(zone)
    p6: dict[str, Any] = {"InstanceType": "p6-b300.48xlarge"}
    interfaces = efa_interfaces(subnet, group, 2)
    assert error_code(cloud, **p6, NetworkInterfaces=interfaces) == "InvalidParameterCombination"
    efa_only = [{**interfaces[0], "InterfaceType": "efa-only"}, interfaces[1]]
    assert error_code(cloud, InstanceType="p4d.24xlarge", NetworkInterfaces=efa_only) == "InvalidParameterCombination"
    plain = {**interfaces[0], "InterfaceType": "interface"}
    (id,) = cloud.launch(**p6, NetworkInterfaces=[plain, {**interfaces[1], "InterfaceType": "efa-only"}])
    first, second = cloud.instance(id)["NetworkInterfaces"]
    assert first["PrivateIpAddress"] and not second.get("PrivateIpAddress"), "an EFA-only interface has no IP address"


def test_view_has_key_user_data_and_login(cloud: Cloud) -> None:
    cloud.ec2.import_key_pair(KeyName="job", PublicKeyMaterial=PUBLIC_KEY.encode())
    user_data = "#cloud-config\n" + json.dumps({"bootcmd": [["true"]]})
    (id,) = cloud.launch(
        KeyName="job", UserData=user_data, InstanceMarketOptions=SPOT, TagSpecifications=[tag_specification("instance")]
    )
    cloud.sim.login = ("tester", 2222)
    (view,) = cloud.sim.instances()
    assert (view.id, view.key, view.user_data, view.market) == (id, PUBLIC_KEY, user_data, "spot")
    assert view.ami_tags == {"imgnet:user": "tester", "imgnet:port": "2222"} and view.tags == {"job": "job-3"}
    (image,) = cloud.ec2.describe_images(ImageIds=[cloud.image()])["Images"]
    assert {tag["Key"]: tag["Value"] for tag in image["Tags"]} == view.ami_tags
    attribute = cloud.ec2.describe_instance_attribute(InstanceId=id, Attribute="userData")
    assert base64.b64decode(attribute["UserData"]["Value"]).decode() == user_data
    cloud.sim.login = ("ubuntu", 22)
