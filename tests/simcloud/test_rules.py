"""What the simulated EC2 and EFS refuse to create or delete, what counts as a leak, and kills of callers."""

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import moto
import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served

__all__ = ["cloud", "served"]
IN_USE = "DependencyViolation"
JOB_TAG = {"Key": "job", "Value": "job-3"}


def test_moto_has_the_version_that_is_patched() -> None:
    assert moto.__version__ == "5.2.5", "run these tests, mend support/simcloud/moto_patches.py, then change this line"


def test_leaks_cost_and_leftovers_do_not(cloud: Cloud) -> None:
    def tagged(*kinds: str) -> dict[str, Any]:
        return {"TagSpecifications": [{"ResourceType": kind, "Tags": [JOB_TAG]} for kind in kinds]}

    cloud.sim.stop_seconds = 5
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    cloud.ec2.allocate_address(**tagged("elastic-ip"))
    ids = cloud.launch(**tagged("instance", "volume"))
    assert sorted(row["kind"] for row in cloud.sim.leaks()) == ["address", "instance", "volume"]
    assert all(row["tags"] == {"job": "job-3"} for row in cloud.sim.leaks())
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert len(cloud.sim.leaks()) == 3, "shutting-down is not gone"
    cloud.sim.advance(5)
    assert [row["kind"] for row in cloud.sim.leaks()] == ["address"]
    assert [(row["kind"], row["name"]) for row in cloud.sim.leftovers()] == [("placement-group", "g")]


def test_terminate_instances_with_one_unknown_id_ends_none(cloud: Cloud) -> None:
    ids = cloud.launch(2)
    code, _ = refused(cloud.ec2.terminate_instances, InstanceIds=[*ids, "i-0123456789abcdef0"])
    assert code == "InvalidInstanceID.NotFound" and [cloud.state(id) for id in ids] == ["running", "running"]


def test_placement_group_is_refused_twice_or_unknown_and_kept_until_its_instances_are_gone(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 10
    create, delete = cloud.ec2.create_placement_group, cloud.ec2.delete_placement_group
    create(GroupName="g", Strategy="cluster")
    assert refused(create, GroupName="g", Strategy="cluster")[0] == "InvalidPlacementGroup.Duplicate"
    for call, arguments in ((delete, {"GroupName": "x"}), (cloud.ec2.describe_placement_groups, {"GroupNames": ["x"]})):
        assert refused(call, **arguments)[0] == "InvalidPlacementGroup.Unknown"
    ids = cloud.launch(Placement={"GroupName": "g"})
    assert refused(delete, GroupName="g")[0] == "InvalidPlacementGroup.InUse"
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert refused(delete, GroupName="g")[0] == "InvalidPlacementGroup.InUse", "still shutting down"
    cloud.sim.advance(10)
    delete(GroupName="g")
    assert cloud.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_cluster_group_has_one_zone_and_no_small_types(cloud: Cloud) -> None:
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    cloud.launch(Placement={"GroupName": "g", "AvailabilityZone": "us-east-1a"})
    elsewhere = {"GroupName": "g", "AvailabilityZone": "us-east-1b"}
    assert refused(cloud.launch, Placement=elsewhere)[0] == "InvalidParameterCombination"
    small = {"InstanceType": "t3.micro", "Placement": {"GroupName": "g"}}
    assert refused(cloud.launch, **small)[0] == "InvalidParameterCombination"


# --- deletion --------------------------------------------------------------------------------------------------------


def test_network_in_use_by_an_instance_cannot_be_deleted(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 10
    vpc, subnet, security = cloud.network()
    gateway = cloud.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    detach = {"InternetGatewayId": gateway, "VpcId": vpc}
    cloud.ec2.attach_internet_gateway(**detach)
    interface = {"DeviceIndex": 0, "SubnetId": subnet, "Groups": [security], "AssociatePublicIpAddress": True}
    ids = cloud.launch(NetworkInterfaces=[interface])
    steps: list[tuple[Any, dict[str, str]]] = [
        (cloud.ec2.detach_internet_gateway, detach),
        (cloud.ec2.delete_security_group, {"GroupId": security}),
        (cloud.ec2.delete_subnet, {"SubnetId": subnet}),
    ]
    cloud.ec2.terminate_instances(InstanceIds=ids)
    for call, arguments in steps:
        assert refused(call, **arguments)[0] == IN_USE, "it is shutting down"
    cloud.sim.advance(10)
    for call, arguments in steps[1:]:
        call(**arguments)
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == IN_USE, "the gateway is attached"
    cloud.ec2.detach_internet_gateway(**detach)
    cloud.ec2.delete_internet_gateway(InternetGatewayId=gateway)
    cloud.ec2.delete_vpc(VpcId=vpc)
    assert cloud.sim.leftovers() == []


def test_vpc_with_subnets_groups_or_endpoints_cannot_be_deleted(cloud: Cloud) -> None:
    vpc, subnet, security = cloud.network()
    endpoint = cloud.ec2.create_vpc_endpoint(VpcId=vpc, ServiceName="com.amazonaws.us-east-1.s3")["VpcEndpoint"]
    for call, arguments in (
        (cloud.ec2.delete_subnet, {"SubnetId": subnet}),
        (cloud.ec2.delete_security_group, {"GroupId": security}),
        (cloud.ec2.delete_vpc_endpoints, {"VpcEndpointIds": [endpoint["VpcEndpointId"]]}),
        (cloud.ec2.delete_vpc, {"VpcId": vpc}),
    ):
        if call != cloud.ec2.delete_vpc:
            assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == IN_USE
        call(**arguments)


def test_security_group_that_another_names_cannot_be_deleted(cloud: Cloud) -> None:
    vpc, _, first = cloud.network()
    second = cloud.ec2.create_security_group(GroupName="second", Description="d", VpcId=vpc)["GroupId"]
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": first}]}]
    for group_id in (first, second):
        cloud.ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=rule)
    assert refused(cloud.ec2.delete_security_group, GroupId=first)[0] == IN_USE
    cloud.ec2.delete_security_group(GroupId=second)
    cloud.ec2.delete_security_group(GroupId=first)


def test_efs_is_created_and_deleted_by_the_clock(cloud: Cloud) -> None:
    cloud.sim.efs_seconds = 8
    efs = cloud.client("efs")
    _, subnet, security = cloud.network()
    id = efs.create_file_system(CreationToken="t", Encrypted=True)["FileSystemId"]
    target = {"FileSystemId": id, "SubnetId": subnet, "SecurityGroups": [security]}
    assert refused(efs.create_file_system, CreationToken="t")[0] == "FileSystemAlreadyExists"
    assert refused(efs.create_mount_target, **target) == ("IncorrectFileSystemLifeCycleState", 409)
    cloud.sim.advance(8)
    mount_target = efs.create_mount_target(**target)
    assert mount_target["LifeCycleState"] == "creating"
    assert refused(efs.create_mount_target, **target) == ("MountTargetConflict", 409)
    cloud.sim.advance(8)
    assert refused(efs.delete_file_system, FileSystemId=id) == ("FileSystemInUse", 409)
    assert refused(cloud.ec2.delete_security_group, GroupId=security)[0] == IN_USE
    efs.delete_mount_target(MountTargetId=mount_target["MountTargetId"])
    assert refused(efs.delete_file_system, FileSystemId=id)[0] == "FileSystemInUse", "it is still being deleted"
    cloud.sim.advance(8)
    efs.delete_file_system(FileSystemId=id)
    assert efs.describe_file_systems()["FileSystems"][0]["LifeCycleState"] == "deleting"
    cloud.sim.advance(8)
    assert efs.describe_file_systems()["FileSystems"] == []
    cloud.ec2.delete_security_group(GroupId=security)


# --- kills of callers -------------------------------------------------------------------------------------------------


CALLER = """
import sys, boto3
ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=sys.argv[1],
                   aws_access_key_id="k", aws_secret_access_key="s")
for name in ("a", "b", "c"):
    ec2.create_placement_group(GroupName=name, Strategy="cluster")
"""


@pytest.mark.parametrize(("when", "created"), [("before", ["a"]), ("after", ["a", "b"])])
def test_kill_caller_kills_before_or_after_that_call(cloud: Cloud, when: str, created: list[str]) -> None:
    command = json.dumps({"at": 2, "when": when}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{cloud.url}/_sim/kill_caller", command), timeout=120).close()
    completed = subprocess.run([sys.executable, "-c", CALLER, cloud.url], timeout=120)
    assert completed.returncode == -signal.SIGKILL
    assert [row["name"] for row in cloud.sim.leftovers()] == created
    assert cloud.front.calls == [("ec2", "CreatePlacementGroup")] * 2 and len(cloud.front.killed) == 1
