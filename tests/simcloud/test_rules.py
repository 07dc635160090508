"""Resources around instances in the simulated AWS: what EC2 and EFS refuse to delete, dry runs, addresses, gateways."""

from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, refused, served

from infra.aws import tags
from infra.aws.stack.policies import user_policy

__all__ = ["cloud", "served"]
IN_USE = "DependencyViolation"


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
    vpc, subnet, security = cloud.network(public=True)
    gateway = cloud.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    detach = {"InternetGatewayId": gateway, "VpcId": vpc}
    cloud.ec2.attach_internet_gateway(**detach)
    ids = cloud.launch(SubnetId=subnet, SecurityGroupIds=[security])
    steps: list[tuple[Any, dict[str, str]]] = [
        (cloud.ec2.detach_internet_gateway, detach),
        (cloud.ec2.delete_security_group, {"GroupId": security}),
        (cloud.ec2.delete_subnet, {"SubnetId": subnet}),
    ]
    for is_shutting_down in (False, True):
        if is_shutting_down:
            cloud.ec2.terminate_instances(InstanceIds=ids)
        for call, arguments in steps:
            assert refused(call, **arguments)[0] == IN_USE
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


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("create_vpc", {"CidrBlock": "10.0.0.0/16"}),
        ("create_placement_group", {"GroupName": "dry", "Strategy": "cluster"}),
        ("allocate_address", {}),
        ("terminate_instances", {"InstanceIds": ["i-0123456789abcdef0"]}),
    ],
)
def test_dry_run_changes_nothing(cloud: Cloud, method: str, arguments: dict[str, Any]) -> None:
    vpcs = len(cloud.ec2.describe_vpcs()["Vpcs"])
    assert refused(getattr(cloud.ec2, method), DryRun=True, **arguments) == ("DryRunOperation", 412)
    assert cloud.sim.leaks() == cloud.sim.leftovers() == [] and len(cloud.ec2.describe_vpcs()["Vpcs"]) == vpcs


# --- addresses and the way to the internet ---------------------------------------------------------------------------


def test_elastic_address_leads_to_the_machine_and_outlives_it(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    address = cloud.ec2.allocate_address(Domain="vpc")
    allocation = {"AllocationId": address["AllocationId"]}
    cloud.ec2.associate_address(InstanceId=id, **allocation)
    assert cloud.instance(id)["PublicIpAddress"] == cloud.instance(id)["PrivateIpAddress"]
    assert refused(cloud.ec2.release_address, **allocation)[0] == "InvalidIPAddress.InUse"
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert [leak["kind"] for leak in cloud.sim.leaks()] == ["address"]
    assert cloud.ec2.describe_addresses()["Addresses"][0]["PublicIp"] == address["PublicIp"]
    cloud.ec2.release_address(**allocation)
    assert cloud.sim.leaks() == []


def test_elastic_addresses_are_limited_and_cost_when_idle(cloud: Cloud) -> None:
    ids = [cloud.ec2.allocate_address()["AllocationId"] for _ in range(5)]
    assert refused(cloud.ec2.allocate_address)[0] == "AddressLimitExceeded"
    cloud.sim.advance(3600)
    for id in ids:
        cloud.ec2.release_address(AllocationId=id)
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["addresses"] == pytest.approx(0.025)


def test_internet_needs_a_public_address_or_a_nat_gateway(cloud: Cloud) -> None:
    cloud.sim.nat_seconds = 60.0
    vpc, subnet, group = cloud.network()
    ec2 = cloud.ec2

    def launch_with_two_cards() -> tuple[str, str]:
        """Launch an instance. Returns its id and that of its primary interface."""
        nics = [
            {"NetworkCardIndex": card, "DeviceIndex": 0, "SubnetId": subnet, "Groups": [group], "InterfaceType": kind}
            for card, kind in enumerate(("efa", "efa-only"))
        ]
        (id,) = cloud.launch(InstanceType="g6e.24xlarge", NetworkInterfaces=nics)
        return id, cloud.instance(id)["NetworkInterfaces"][0]["NetworkInterfaceId"]

    id, interface = launch_with_two_cards()
    assert not cloud.sim.has_internet(id), "an instance with several interfaces is launched without an address"
    cloud.sim.refuses_public_addresses = True
    change = {"NetworkInterfaceId": interface, "AssociatePublicIpAddress": True}
    assert refused(ec2.modify_network_interface_attribute, **change) == ("UnsupportedOperation", 400)
    cloud.sim.refuses_public_addresses = False
    ec2.modify_network_interface_attribute(**change)
    cloud.sim.transfer(id, internet=10**12)
    assert cloud.sim.has_internet(id) and cloud.sim.bill()["nat"] == 0, "what comes in by a public address is free"

    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    public_subnet = cloud.subnet(vpc, "us-east-1a", "10.7.16.0/20")
    request = {"SubnetId": public_subnet, "AllocationId": address, "ClientToken": "one"}
    gateway = ec2.create_nat_gateway(**request)["NatGateway"]["NatGatewayId"]
    assert ec2.create_nat_gateway(**request)["NatGateway"]["NatGatewayId"] == gateway, "the same token"
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=gateway)
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    private_id, _ = launch_with_two_cards()
    assert not cloud.sim.has_internet(private_id), "the gateway is pending"
    cloud.sim.advance(60)
    assert cloud.sim.has_internet(private_id)
    cloud.sim.transfer(private_id, internet=2 * 10**9)
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["nat"] == pytest.approx(2 * 0.045 + 0.09), "a begun hour costs a whole one"
    assert "nat-gateway" in {row["kind"] for row in cloud.sim.leaks()}
    ec2.delete_nat_gateway(NatGatewayId=gateway)
    assert refused(ec2.release_address, AllocationId=address)[0] == "InvalidIPAddress.InUse"
    cloud.sim.advance(60)
    ec2.release_address(AllocationId=address)
    assert "nat-gateway" not in {row["kind"] for row in cloud.sim.leaks()}


# --- permissions -----------------------------------------------------------------------------------------------------


def test_instance_connect_takes_keys_for_running_instances_with_our_tag_only(cloud: Cloud) -> None:
    send = cloud.client("ec2-instance-connect").send_ssh_public_key
    own_id, other_id = (
        cloud.launch(TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": key, "Value": value}]}])[0]
        for key, value in ((tags.STACK, tags.STACK_VALUE), ("Name", "other"))
    )
    cloud.sim.tick()
    key = {"InstanceOSUser": "ubuntu", "SSHPublicKey": "ssh-ed25519 AAAA" + "A" * 240}
    cloud.sim.policy = user_policy()
    assert send(InstanceId=own_id, **key)["Success"]
    assert refused(send, InstanceId=other_id, **key)[0] == "AccessDeniedException"
    assert refused(send, InstanceId=own_id, **{**key, "SSHPublicKey": "x" * 256})[0] == "InvalidArgsException"
    cloud.ec2.terminate_instances(InstanceIds=[own_id])
    assert refused(send, InstanceId=own_id, **key)[0] == "EC2InstanceStateInvalidException"
