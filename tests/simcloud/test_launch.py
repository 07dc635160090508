"""RunInstances of the simulated EC2: what is refused and with which code, and what a launched instance has."""

import base64
import json
from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served

__all__ = ["cloud", "served"]
SPOT = {"MarketType": "spot"}
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE a@b"


def code(cloud: Cloud, **changes: Any) -> str:
    """The code that a changed request is refused with; nothing is launched."""
    answer, status = refused(cloud.launch, **changes)
    assert status == 400 and cloud.sim.instances() == []
    return answer


def spec(kind: str, key: str = "job") -> dict[str, Any]:
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
        ({"TagSpecifications": [spec("placement-group")]}, "InvalidParameterValue"),
        ({"TagSpecifications": [spec("spot-instances-request")]}, "InvalidParameterCombination"),
        ({"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}]}, "InvalidBlockDeviceMapping"),
        ({"InstanceMarketOptions": {**SPOT, "SpotOptions": {"MaxPrice": "0.01"}}}, "SpotMaxPriceTooLow"),
        (
            {"InstanceMarketOptions": {**SPOT, "SpotOptions": {"InstanceInterruptionBehavior": "stop"}}},
            "InvalidParameterCombination",
        ),
    ],
)
def test_what_does_not_exist_or_does_not_fit_is_refused(cloud: Cloud, changes: dict[str, Any], expected: str) -> None:
    assert code(cloud, **changes) == expected
    assert refused(cloud.launch, **changes, DryRun=True) == (
        ("DryRunOperation", 412) if "MaxPrice" in str(changes) or "1e" in str(changes) else (expected, 400)
    )


def test_a_dry_run_of_a_good_launch_launches_nothing(cloud: Cloud) -> None:
    assert refused(cloud.launch, ClientToken="t", DryRun=True) == ("DryRunOperation", 412)
    assert cloud.sim.instances() == [] and cloud.launch(ClientToken="t")


def test_groups_of_another_network_and_full_subnets_are_refused(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    other = cloud.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])
    others = [one["GroupId"] for one in other["SecurityGroups"] if one["GroupId"] != group]
    assert code(cloud, SubnetId=subnet, SecurityGroupIds=others) == "InvalidParameter"
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
    big = {"InstanceMarketOptions": SPOT, "Placement": {"AvailabilityZone": "us-east-1d"}}
    assert refused(cloud.launch, InstanceType="p5.48xlarge", **big)[0] == "MaxSpotInstanceCountExceeded"
    assert cloud.launch(InstanceType="p4d.24xlarge", **big)
    assert refused(cloud.launch, InstanceType="p4d.24xlarge")[0] == "VcpuLimitExceeded"
    cloud.ec2.terminate_instances(InstanceIds=[first])
    assert cloud.launch()


def test_fewer_are_launched_where_the_quota_allows_fewer(cloud: Cloud) -> None:
    cloud.sim.quota_vcpu = {"L-DB2E81BA": 8}
    assert len(cloud.launch(MinCount=1, MaxCount=9)) == 2


# --- what an instance has --------------------------------------------------------------------------------------------


def test_every_instance_has_the_profile_the_metadata_options_and_its_number(cloud: Cloud) -> None:
    cloud.client("iam").create_instance_profile(InstanceProfileName="node")
    options = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    ids = cloud.launch(3, IamInstanceProfile={"Name": "node"}, MetadataOptions=options)
    found = [cloud.instance(id) for id in ids]
    assert all(one["IamInstanceProfile"]["Arn"].endswith(":instance-profile/node") for one in found)
    assert all(one["MetadataOptions"]["HttpTokens"] == "required" for one in found)
    assert [one["AmiLaunchIndex"] for one in found] == [0, 1, 2]


def test_all_things_of_a_launch_bear_their_tags(cloud: Cloud) -> None:
    kinds = ("instance", "volume", "network-interface", "spot-instances-request")
    specs = [spec(kind, kind) for kind in kinds]
    (id,) = cloud.launch(InstanceMarketOptions=SPOT, TagSpecifications=specs)
    found = cloud.instance(id)
    nic = cloud.ec2.describe_network_interfaces(Filters=[{"Name": "tag:network-interface", "Values": ["job-3"]}])
    disk = cloud.ec2.describe_volumes(Filters=[{"Name": "tag:volume", "Values": ["job-3"]}])
    asked = [{"Name": "tag:spot-instances-request", "Values": ["job-*"]}]
    request = cloud.ec2.describe_spot_instance_requests(Filters=asked)["SpotInstanceRequests"]
    assert found["Tags"] == [{"Key": "instance", "Value": "job-3"}]
    assert nic["NetworkInterfaces"][0]["Attachment"]["InstanceId"] == id
    assert disk["Volumes"][0]["Attachments"][0]["InstanceId"] == id
    assert request[0]["SpotInstanceRequestId"] == found["SpotInstanceRequestId"] and request[0]["InstanceId"] == id


def test_a_spot_request_follows_its_instance(cloud: Cloud) -> None:
    first, second, third = cloud.launch(3, InstanceMarketOptions=SPOT)

    def status(id: str) -> tuple[str, str]:
        asked = [cloud.instance(id)["SpotInstanceRequestId"]]
        (one,) = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=asked)["SpotInstanceRequests"]
        return one["State"], one["Status"]["Code"]

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
    assert cloud.find_ids(instance_lifecycle="spot", spot_instance_request_id=request) == [third]
    call = cloud.ec2.describe_spot_instance_requests
    assert refused(call, SpotInstanceRequestIds=["sir-00000000"])[0] == "InvalidSpotInstanceRequestID.NotFound"


def test_disks_are_as_asked_and_go_with_the_instance(cloud: Cloud) -> None:
    disks = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True}}]
    disks[0]["Ebs"] |= {"Iops": 6000, "Throughput": 500}  # type: ignore[operator]
    kept = {"DeviceName": "/dev/sdb", "Ebs": {"VolumeSize": 10, "DeleteOnTermination": False}}
    (id,) = cloud.launch(BlockDeviceMappings=[*disks, kept])
    (plain,) = cloud.launch()
    big, small, default = cloud.ec2.describe_volumes()["Volumes"]
    assert (big["Size"], big["Iops"], big["Throughput"], big["Encrypted"]) == (200, 6000, 500, True)
    assert (default["Size"], default["VolumeType"]) == (75, "gp3")
    cloud.ec2.terminate_instances(InstanceIds=[id, plain])
    assert [one["VolumeId"] for one in cloud.ec2.describe_volumes()["Volumes"]] == [small["VolumeId"]]


def test_addresses_are_loopback_unique_and_the_same_inside_and_outside(cloud: Cloud) -> None:
    _, subnet, _ = cloud.network(public=True)
    _, hidden, _ = cloud.network()
    cloud.launch(3, SubnetId=subnet)
    cloud.launch(SubnetId=hidden)
    cloud.launch(NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": hidden, "AssociatePublicIpAddress": True}])
    shown = cloud.sim.instances()
    assert [one.public == one.private for one in shown] == [True, True, True, False, True]
    assert shown[3].public is None and len({one.private for one in shown}) == 5
    assert all(one.private.startswith("127.1.") for one in shown)
    assert cloud.instance(shown[0].id)["PublicIpAddress"] == shown[0].public
    assert "PublicIpAddress" not in cloud.instance(shown[3].id)


def efa(subnet: str, group: str, number: int) -> list[dict[str, Any]]:
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": min(card, 1),
            "SubnetId": subnet,
            "Groups": [group],
            "InterfaceType": "efa",
            "DeleteOnTermination": True,
        }
        for card in range(number)
    ]


@pytest.mark.parametrize(("type", "zone", "number"), [("p4d.24xlarge", "a", 4), ("p5.48xlarge", "d", 32)])
def test_efa_interfaces_keep_their_cards_and_the_machine_gets_no_public_address(
    cloud: Cloud, type: str, zone: str, number: int
) -> None:
    _, subnet, group = cloud.network(f"us-east-1{zone}", public=True)
    (id,) = cloud.launch(InstanceType=type, NetworkInterfaces=efa(subnet, group, number))
    nics = cloud.instance(id)["NetworkInterfaces"]
    assert [one["Attachment"]["NetworkCardIndex"] for one in nics] == list(range(number))
    assert [one["Attachment"]["DeviceIndex"] for one in nics] == [min(card, 1) for card in range(number)]
    assert {one["InterfaceType"] for one in nics} == {"efa"} and {one["Groups"][0]["GroupId"] for one in nics} == {
        group
    }
    assert "PublicIpAddress" not in cloud.instance(id) and cloud.instance(id)["PrivateIpAddress"].startswith("127.1.")
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert cloud.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_interfaces_that_cannot_be_are_refused(cloud: Cloud) -> None:
    _, subnet, group = cloud.network()
    nics = efa(subnet, group, 4)
    assert code(cloud, NetworkInterfaces=nics[:1]) == "InvalidParameterCombination"  # g5.xlarge has no EFA
    p4d = {"InstanceType": "p4d.24xlarge"}
    public = [{**nics[0], "AssociatePublicIpAddress": True}, *nics[1:]]
    assert code(cloud, **p4d, NetworkInterfaces=public) == "InvalidParameterCombination"
    assert code(cloud, **p4d, NetworkInterfaces=[nics[0], nics[0]]) == "InvalidParameterValue"
    assert code(cloud, **p4d, NetworkInterfaces=efa(subnet, group, 5)) == "AttachmentLimitExceeded"
    assert code(cloud, **p4d, NetworkInterfaces=nics, SubnetId=subnet) == "InvalidParameterCombination"
    assert code(cloud, **p4d, NetworkInterfaces=nics, SecurityGroupIds=[group]) == "InvalidParameterCombination"


def test_outside_an_instance_shows_key_user_data_and_how_to_log_in(cloud: Cloud) -> None:
    cloud.ec2.import_key_pair(KeyName="job", PublicKeyMaterial=PUBLIC.encode())
    data = "#cloud-config\n" + json.dumps({"bootcmd": [["true"]]})
    (id,) = cloud.launch(KeyName="job", UserData=data, InstanceMarketOptions=SPOT, TagSpecifications=[spec("instance")])
    cloud.sim.login = ("tester", 2222)
    (one,) = cloud.sim.instances()
    assert (one.id, one.key, one.user_data, one.market) == (id, PUBLIC, data, "spot")
    assert one.ami_tags == {"imgnet:user": "tester", "imgnet:port": "2222"} and one.tags == {"job": "job-3"}
    (image,) = cloud.ec2.describe_images(ImageIds=[cloud.image()])["Images"]
    assert {tag["Key"]: tag["Value"] for tag in image["Tags"]} == one.ami_tags
    told = cloud.ec2.describe_instance_attribute(InstanceId=id, Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(told).decode() == data
    cloud.sim.login = ("ubuntu", 22)


def test_reservation_and_group_can_be_filtered_by(cloud: Cloud) -> None:
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    words = cloud.request(Placement={"GroupName": "g"}, MinCount=2, MaxCount=2)
    made = cloud.ec2.run_instances(**words)
    ids = [one["InstanceId"] for one in made["Instances"]]
    cloud.launch()
    assert cloud.find_ids(placement_group_name="g") == cloud.find_ids(reservation_id=made["ReservationId"]) == ids
    assert cloud.find_ids(launch_index="1") == ids[1:] and cloud.instance(ids[0])["Placement"]["GroupName"] == "g"
