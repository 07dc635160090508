"""Resources around instances in the simulated AWS: groups, networks, addresses, EFS, prices, quotas, images."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from support.simcloud.in_process import START, Cloud, cloud, refused, served
from support.simcloud.spot_market import IMAGES
from support.simcloud.traffic import Moved

__all__ = ["cloud", "served"]


def create_group(cloud: Cloud, name: str = "g", **options: Any) -> dict[str, Any]:
    response = cloud.ec2.create_placement_group(GroupName=name, Strategy="cluster", **options)
    group: dict[str, Any] = response["PlacementGroup"]
    return group


# --- placement groups ------------------------------------------------------------------------------------------------


def test_placement_group_is_found_by_its_tags(cloud: Cloud) -> None:
    specifications = [{"ResourceType": "placement-group", "Tags": [{"Key": "job", "Value": "job-3"}]}]
    group = create_group(cloud, TagSpecifications=specifications)
    create_group(cloud, "other")
    for filters in ([{"Name": "tag:job", "Values": ["job-*"]}], [{"Name": "group-name", "Values": ["g"]}]):
        (row,) = cloud.ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]
        assert (row["GroupId"], row["Tags"]) == (group["GroupId"], specifications[0]["Tags"])
    cloud.ec2.create_tags(Resources=[group["GroupId"]], Tags=[{"Key": "x", "Value": "y"}])
    (row,) = cloud.ec2.describe_placement_groups(GroupNames=["g"])["PlacementGroups"]
    assert {"Key": "x", "Value": "y"} in row["Tags"]
    filters = [{"Name": "resource-type", "Values": ["placement-group"]}, {"Name": "key", "Values": ["job"]}]
    assert [tag["ResourceId"] for tag in cloud.ec2.describe_tags(Filters=filters)["Tags"]] == [group["GroupId"]]


def test_placement_group_errors_duplicate_unknown_and_in_use(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 10
    create_group(cloud)
    create = cloud.ec2.create_placement_group
    delete = cloud.ec2.delete_placement_group
    assert refused(create, GroupName="g", Strategy="cluster")[0] == "InvalidPlacementGroup.Duplicate"
    assert refused(delete, GroupName="other")[0] == "InvalidPlacementGroup.Unknown"
    assert refused(cloud.ec2.describe_placement_groups, GroupNames=["x"])[0] == "InvalidPlacementGroup.Unknown"
    ids = cloud.launch(Placement={"GroupName": "g"})
    assert refused(delete, GroupName="g")[0] == "InvalidPlacementGroup.InUse"
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert refused(delete, GroupName="g")[0] == "InvalidPlacementGroup.InUse", "still shutting down"
    cloud.sim.advance(10)
    delete(GroupName="g")
    assert cloud.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_cluster_group_has_one_zone_and_no_small_types(cloud: Cloud) -> None:
    create_group(cloud)
    cloud.launch(Placement={"GroupName": "g", "AvailabilityZone": "us-east-1a"})
    elsewhere = {"GroupName": "g", "AvailabilityZone": "us-east-1b"}
    assert refused(cloud.launch, Placement=elsewhere)[0] == "InvalidParameterCombination"
    small = {"InstanceType": "t3.micro", "Placement": {"GroupName": "g"}}
    assert refused(cloud.launch, **small)[0] == "InvalidParameterCombination"
    assert cloud.launch(Placement={"GroupName": "g", "AvailabilityZone": "us-east-1a"})


# --- deletion --------------------------------------------------------------------------------------------------------


def test_network_in_use_by_an_instance_cannot_be_deleted(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 10
    vpc, subnet, security = cloud.network(public=True)
    gateway = cloud.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    cloud.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    ids = cloud.launch(SubnetId=subnet, SecurityGroupIds=[security])
    detach = {"InternetGatewayId": gateway, "VpcId": vpc}
    steps: list[tuple[Any, dict[str, str]]] = [
        (cloud.ec2.detach_internet_gateway, detach),
        (cloud.ec2.delete_security_group, {"GroupId": security}),
        (cloud.ec2.delete_subnet, {"SubnetId": subnet}),
    ]
    for call, arguments in steps:
        assert refused(call, **arguments)[0] == "DependencyViolation"
    cloud.ec2.terminate_instances(InstanceIds=ids)
    for call, arguments in steps:
        assert refused(call, **arguments)[0] == "DependencyViolation", "the instance is shutting down"
    cloud.sim.advance(10)
    for call, arguments in steps[1:]:
        call(**arguments)
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation", "the gateway is attached"
    cloud.ec2.detach_internet_gateway(**detach)
    cloud.ec2.delete_internet_gateway(InternetGatewayId=gateway)
    cloud.ec2.delete_vpc(VpcId=vpc)
    assert cloud.sim.leftovers() == []


def test_delete_vpc_refused_with_groups_endpoints_or_subnets(cloud: Cloud) -> None:
    vpc, subnet, security = cloud.network()
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_subnet(SubnetId=subnet)
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_security_group(GroupId=security)
    endpoint = cloud.ec2.create_vpc_endpoint(VpcId=vpc, ServiceName="com.amazonaws.us-east-1.s3")["VpcEndpoint"]
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint["VpcEndpointId"]])
    cloud.ec2.delete_vpc(VpcId=vpc)


def test_delete_security_group_refused_while_others_name_it(cloud: Cloud) -> None:
    vpc, _, first = cloud.network()
    second = cloud.ec2.create_security_group(GroupName="second", Description="d", VpcId=vpc)["GroupId"]
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": first}]}]
    for group_id in (first, second):
        cloud.ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=rule)
    assert refused(cloud.ec2.delete_security_group, GroupId=first)[0] == "DependencyViolation"
    cloud.ec2.delete_security_group(GroupId=second)
    cloud.ec2.delete_security_group(GroupId=first)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("create_vpc", {"CidrBlock": "10.0.0.0/16"}),
        ("create_placement_group", {"GroupName": "dry", "Strategy": "cluster"}),
        ("create_security_group", {"GroupName": "dry", "Description": "d"}),
        ("create_internet_gateway", {}),
        ("allocate_address", {}),
        ("describe_instances", {}),
        ("terminate_instances", {"InstanceIds": ["i-0123456789abcdef0"]}),
    ],
)
def test_dry_run_changes_nothing(cloud: Cloud, method: str, arguments: dict[str, Any]) -> None:
    vpcs = len(cloud.ec2.describe_vpcs()["Vpcs"])
    assert refused(getattr(cloud.ec2, method), DryRun=True, **arguments) == ("DryRunOperation", 412)
    assert cloud.sim.leaks() == cloud.sim.leftovers() == [] and len(cloud.ec2.describe_vpcs()["Vpcs"]) == vpcs


# --- elastic addresses -----------------------------------------------------------------------------------------------


def test_elastic_address_leads_to_the_machine_and_outlives_it(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = 5
    _, subnet, _ = cloud.network()
    interfaces = [{"DeviceIndex": i, "NetworkCardIndex": i, "SubnetId": subnet, "InterfaceType": "efa"} for i in (0, 1)]
    (id,) = cloud.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=interfaces)
    address = cloud.ec2.allocate_address(Domain="vpc")
    allocation = {"AllocationId": address["AllocationId"]}
    assert address["PublicIp"].startswith("127.1.")
    assert refused(cloud.ec2.associate_address, InstanceId=id, **allocation)[0] == "InvalidInstanceID", "pending"
    cloud.sim.advance(5)
    assert refused(cloud.ec2.associate_address, InstanceId=id, **allocation)[0] == "InvalidInstanceID", "two interfaces"
    first = cloud.instance(id)["NetworkInterfaces"][0]
    cloud.ec2.associate_address(NetworkInterfaceId=first["NetworkInterfaceId"], **allocation)
    instance = cloud.instance(id)
    assert instance["PublicIpAddress"] == instance["PrivateIpAddress"] == cloud.sim.instances()[0].public
    (row,) = cloud.ec2.describe_addresses()["Addresses"]
    assert (row["PublicIp"], row["InstanceId"] or id) == (instance["PublicIpAddress"], id)
    assert refused(cloud.ec2.release_address, **allocation)[0] == "InvalidIPAddress.InUse"
    cloud.ec2.disassociate_address(AssociationId=row["AssociationId"])
    assert "PublicIpAddress" not in cloud.instance(id)
    assert refused(cloud.ec2.disassociate_address, AssociationId="eipassoc-0")[0] == "InvalidAssociationID.NotFound"
    assert cloud.ec2.describe_addresses()["Addresses"][0]["PublicIp"] == address["PublicIp"]
    cloud.ec2.associate_address(NetworkInterfaceId=first["NetworkInterfaceId"], **allocation)
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


# --- EFS -------------------------------------------------------------------------------------------------------------


def test_efs_is_created_and_deleted_by_the_clock(cloud: Cloud) -> None:
    cloud.sim.efs_seconds = 8
    efs = cloud.client("efs")
    _, subnet, security = cloud.network()
    id = efs.create_file_system(CreationToken="t", Encrypted=True, Tags=[{"Key": "a", "Value": "b"}])["FileSystemId"]
    target = {"FileSystemId": id, "SubnetId": subnet, "SecurityGroups": [security]}

    def states(kind: str) -> list[str]:
        describe = {
            "FileSystems": efs.describe_file_systems,
            "MountTargets": lambda: efs.describe_mount_targets(FileSystemId=id),
        }
        return [row["LifeCycleState"] for row in describe[kind]()[kind]]

    assert states("FileSystems") == ["creating"]
    assert refused(efs.create_mount_target, **target) == ("IncorrectFileSystemLifeCycleState", 409)
    cloud.sim.advance(8)
    assert states("FileSystems") == ["available"]
    mount_target = efs.create_mount_target(**target)
    assert mount_target["LifeCycleState"] == "creating" and states("MountTargets") == ["creating"]
    assert refused(efs.create_mount_target, **target) == ("MountTargetConflict", 409)
    cloud.sim.advance(8)
    assert states("MountTargets") == ["available"]
    assert refused(efs.delete_file_system, FileSystemId=id) == ("FileSystemInUse", 409)
    assert refused(cloud.ec2.delete_security_group, GroupId=security)[0] == "DependencyViolation"
    efs.delete_mount_target(MountTargetId=mount_target["MountTargetId"])
    assert states("MountTargets") == ["deleting"]
    assert refused(efs.delete_file_system, FileSystemId=id)[0] == "FileSystemInUse"
    cloud.sim.advance(8)
    assert states("MountTargets") == []
    efs.delete_file_system(FileSystemId=id)
    assert states("FileSystems") == ["deleting"]
    cloud.sim.advance(8)
    assert states("FileSystems") == [] and refused(efs.delete_file_system, FileSystemId=id)[0] == "FileSystemNotFound"
    cloud.ec2.delete_security_group(GroupId=security)


def test_efs_costs_by_what_is_read_and_written(cloud: Cloud) -> None:
    (id,) = cloud.launch()
    before = cloud.sim.bill()
    cloud.sim.transfer(id, efs_read=2 * 10**9)
    assert cloud.sim.bill()["efs"] == pytest.approx(before["efs"] + 0.06)
    cloud.sim.transfer(id, efs_written=3 * 10**9)
    bill = cloud.sim.bill()
    assert bill["efs"] == pytest.approx(before["efs"] + 0.24) and bill["total"] == pytest.approx(before["total"] + 0.24)
    assert cloud.sim.moved[id] == Moved(efs_read=2 * 10**9, efs_written=3 * 10**9)
    cloud.sim.kill(id)
    with pytest.raises(ValueError, match="does not run"):
        cloud.sim.transfer(id, efs_read=1)


# --- prices, quotas, images ------------------------------------------------------------------------------------------


def test_spot_price_history_has_the_price_of_each_zone(cloud: Cloud) -> None:
    cloud.sim.set_price("us-east-1b", "p4d.24xlarge", 9.5)
    query = {"InstanceTypes": ["p4d.24xlarge"], "ProductDescriptions": ["Linux/UNIX"]}
    history = cloud.ec2.describe_spot_price_history(StartTime=datetime.fromtimestamp(START, UTC), **query)
    prices = {row["AvailabilityZone"]: float(row["SpotPrice"]) for row in history["SpotPriceHistory"]}
    assert prices["us-east-1b"] == 9.5 and len(prices) > 2 and len(set(prices.values())) == len(prices)
    assert all(0.25 * 21.96 < price < 0.55 * 21.96 for price in prices.values())
    assert len(history["SpotPriceHistory"]) == len(prices), "one row a zone: the price in force now"
    assert all(0 < START - row["Timestamp"].timestamp() < 3600 for row in history["SpotPriceHistory"])
    (id,) = cloud.launch(InstanceType="p4d.24xlarge", InstanceMarketOptions={"MarketType": "spot"})
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["instances"][id] == pytest.approx(prices["us-east-1a"], rel=1e-4)
    assert cloud.ec2.describe_spot_price_history(InstanceTypes=["p3.16xlarge"])["SpotPriceHistory"] == []


def test_get_products_returns_the_on_demand_price(cloud: Cloud) -> None:
    product = {
        "instanceType": "p5.48xlarge",
        "operatingSystem": "Linux",
        "regionCode": "us-east-1",
        "tenancy": "Shared",
    }
    product |= {"preInstalledSw": "NA", "capacitystatus": "Used"}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in product.items()]
    (text,) = cloud.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    (term,) = json.loads(text)["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert float(dimension["pricePerUnit"]["USD"]) == 55.04 and dimension["unit"] == "Hrs"
    filters[0]["Value"] = "bogus.xlarge"
    assert cloud.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"] == []
    west = cloud.client("pricing", "us-west-2")
    assert refused(west.get_products, ServiceCode="AmazonEC2")[0] == "UnknownEndpoint"


def test_get_service_quota_returns_vcpu(cloud: Cloud) -> None:
    cloud.sim.quota_vcpu = {"L-7212CCBC": 0}
    get_quota = cloud.client("service-quotas").get_service_quota
    assert get_quota(ServiceCode="ec2", QuotaCode="L-7212CCBC")["Quota"]["Value"] == 0.0
    assert get_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"] > 3072
    assert refused(get_quota, ServiceCode="ec2", QuotaCode="L-00000000")[0] == "NoSuchResourceException"
    get_default = cloud.client("service-quotas").get_aws_default_service_quota
    defaults = {code: get_default(ServiceCode="ec2", QuotaCode=code) for code in ("L-417A185B", "L-1216C47A")}
    assert [default["Quota"]["Value"] for default in defaults.values()] == [0.0, 5.0]


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
@pytest.mark.parametrize(
    "name", ["base-oss-nvidia-driver-gpu-ubuntu-22.04", "oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04"]
)
def test_public_parameters_name_images_of_their_region(cloud: Cloud, region: str, name: str) -> None:
    parameter = f"/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"
    id = cloud.client("ssm", region).get_parameter(Name=parameter)["Parameter"]["Value"]
    (image,) = cloud.client("ec2", region).describe_images(ImageIds=[id])["Images"]
    assert image["ImageOwnerAlias"] == "amazon" and image["RootDeviceName"] == "/dev/sda1"
    assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75
    images = cloud.client("ec2", region).describe_images()["Images"]
    assert sorted(image["Name"] for image in images) == sorted(IMAGES.values()), "moto's images of 2017 are there"
    unknown = "/aws/service/deeplearning/ami/x86_64/nothing/latest/ami-id"
    assert refused(cloud.client("ssm", region).get_parameter, Name=unknown)[0] == "ParameterNotFound"


def test_instance_types_are_those_of_moto_without_p3(cloud: Cloud) -> None:
    (p4d,) = cloud.ec2.describe_instance_types(InstanceTypes=["p4d.24xlarge"])["InstanceTypes"]
    assert p4d["VCpuInfo"]["DefaultVCpus"] == 96 and p4d["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"] == 4
    describe = cloud.ec2.describe_instance_types
    assert refused(describe, InstanceTypes=["p3.16xlarge"])[0] == "InvalidInstanceType"
    filters = [{"Name": "instance-type", "Values": ["p3.16xlarge", "p4d.24xlarge"]}]
    response = cloud.ec2.describe_instance_type_offerings(LocationType="availability-zone", Filters=filters)
    assert {row["InstanceType"] for row in response["InstanceTypeOfferings"]} == {"p4d.24xlarge"}


# --- the way to the internet -----------------------------------------------------------------------------------------


def launch_with_two_cards(cloud: Cloud, subnet: str, group: str) -> tuple[str, str]:
    """Launch an instance with two network cards. Returns its id and that of its primary interface."""
    nics = [
        {"NetworkCardIndex": card, "DeviceIndex": 0, "SubnetId": subnet, "Groups": [group], "InterfaceType": kind}
        for card, kind in enumerate(("efa", "efa-only"))
    ]
    (id,) = cloud.launch(InstanceType="g6e.24xlarge", NetworkInterfaces=nics)
    return id, cloud.instance(id)["NetworkInterfaces"][0]["NetworkInterfaceId"]


def test_internet_needs_a_public_address_or_a_nat_gateway(cloud: Cloud) -> None:
    vpc, subnet, group = cloud.network()
    ec2 = cloud.ec2
    id, interface = launch_with_two_cards(cloud, subnet, group)
    assert not cloud.sim.has_internet(id), "an instance with several interfaces is launched without an address"
    cloud.sim.refuses_public_addresses = True
    change = {"NetworkInterfaceId": interface, "AssociatePublicIpAddress": True}
    assert refused(ec2.modify_network_interface_attribute, **change) == ("UnsupportedOperation", 400)
    cloud.sim.refuses_public_addresses = False
    ec2.modify_network_interface_attribute(**change)
    assert cloud.sim.has_internet(id) and cloud.instance(id)["PublicIpAddress"]
    cloud.sim.transfer(id, internet=10**12)
    assert cloud.sim.bill()["nat"] == 0, "what comes in by a public address is free"

    cloud.sim.nat_seconds = 60.0
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    public_subnet = cloud.subnet(vpc, "us-east-1a", "10.7.16.0/20")
    request = {"SubnetId": public_subnet, "AllocationId": address, "ClientToken": "one"}
    gateway = ec2.create_nat_gateway(**request)["NatGateway"]["NatGatewayId"]
    assert ec2.create_nat_gateway(**request)["NatGateway"]["NatGatewayId"] == gateway, "the same token"
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=gateway)
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    private_id, _ = launch_with_two_cards(cloud, subnet, group)
    assert not cloud.sim.has_internet(private_id), "the gateway is pending"
    cloud.sim.advance(60)
    assert cloud.sim.has_internet(private_id)
    assert "nat-gateway" in {row["kind"] for row in cloud.sim.leaks()} and cloud.sim.bill()["nat"] > 0
    cloud.sim.transfer(private_id, internet=2 * 10**9)
    assert cloud.sim.bill()["nat"] == pytest.approx(0.045 + 0.09), "an hour, and two gigabytes"
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["nat"] == pytest.approx(2 * 0.045 + 0.09), "a begun hour costs a whole one"
    ec2.delete_nat_gateway(NatGatewayId=gateway)
    assert refused(ec2.release_address, AllocationId=address)[0] == "InvalidIPAddress.InUse"
    cloud.sim.advance(60)
    ec2.release_address(AllocationId=address)
    assert "nat-gateway" not in {row["kind"] for row in cloud.sim.leaks()}
