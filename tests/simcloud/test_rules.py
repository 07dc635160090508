"""What surrounds instances in the simulated EC2: groups, networks, elastic addresses, EFS, prices, quotas, images."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from support.simcloud.in_process import START, Cloud, cloud, refused, served

__all__ = ["cloud", "served"]


def group(cloud: Cloud, name: str = "g", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = cloud.ec2.create_placement_group(GroupName=name, Strategy="cluster", **more)
    return made["PlacementGroup"]  # type: ignore[no-any-return]


# --- placement groups ------------------------------------------------------------------------------------------------


def test_a_group_has_tags_and_is_found_by_them(cloud: Cloud) -> None:
    specs = [{"ResourceType": "placement-group", "Tags": [{"Key": "job", "Value": "job-3"}]}]
    made = group(cloud, TagSpecifications=specs)
    group(cloud, "other")
    for filters in ([{"Name": "tag:job", "Values": ["job-*"]}], [{"Name": "group-name", "Values": ["g"]}]):
        (found,) = cloud.ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]
        assert (found["GroupId"], found["Tags"]) == (made["GroupId"], specs[0]["Tags"])
    cloud.ec2.create_tags(Resources=[made["GroupId"]], Tags=[{"Key": "x", "Value": "y"}])
    (found,) = cloud.ec2.describe_placement_groups(GroupNames=["g"])["PlacementGroups"]
    assert {"Key": "x", "Value": "y"} in found["Tags"]
    filters = [{"Name": "resource-type", "Values": ["placement-group"]}, {"Name": "key", "Values": ["job"]}]
    assert [one["ResourceId"] for one in cloud.ec2.describe_tags(Filters=filters)["Tags"]] == [made["GroupId"]]


def test_groups_are_duplicate_unknown_and_in_use(cloud: Cloud) -> None:
    cloud.sim.stop_seconds = 10
    group(cloud)
    make, drop = cloud.ec2.create_placement_group, cloud.ec2.delete_placement_group
    assert refused(make, GroupName="g", Strategy="cluster")[0] == "InvalidPlacementGroup.Duplicate"
    assert refused(drop, GroupName="other")[0] == "InvalidPlacementGroup.Unknown"
    assert refused(cloud.ec2.describe_placement_groups, GroupNames=["x"])[0] == "InvalidPlacementGroup.Unknown"
    ids = cloud.launch(Placement={"GroupName": "g"})
    assert refused(drop, GroupName="g")[0] == "InvalidPlacementGroup.InUse"
    cloud.ec2.terminate_instances(InstanceIds=ids)
    assert refused(drop, GroupName="g")[0] == "InvalidPlacementGroup.InUse", "still shutting down"
    cloud.sim.advance(10)
    drop(GroupName="g")
    assert cloud.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_a_group_of_another_region_is_another_one(cloud: Cloud) -> None:
    group(cloud)
    west = cloud.client("ec2", "us-west-2")
    assert west.describe_placement_groups()["PlacementGroups"] == []
    west.create_placement_group(GroupName="g", Strategy="cluster")


def test_a_cluster_group_is_in_one_zone_and_takes_no_small_types(cloud: Cloud) -> None:
    made = group(cloud)
    cloud.launch(Placement={"GroupId": made["GroupId"], "AvailabilityZone": "us-east-1a"})
    elsewhere = {"GroupName": "g", "AvailabilityZone": "us-east-1b"}
    assert refused(cloud.launch, Placement=elsewhere)[0] == "InvalidParameterCombination"
    small = {"InstanceType": "t3.micro", "Placement": {"GroupName": "g"}}
    assert refused(cloud.launch, **small)[0] == "InvalidParameterCombination"
    assert cloud.launch(Placement={"GroupName": "g", "AvailabilityZone": "us-east-1a"})


# --- in use ----------------------------------------------------------------------------------------------------------


def test_networks_cannot_go_while_a_machine_is_in_them(cloud: Cloud) -> None:
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
    for now in (START, START + 1):  # running, then shutting down
        for call, words in steps:
            assert refused(call, **words)[0] == "DependencyViolation"
        if now == START:
            cloud.ec2.terminate_instances(InstanceIds=ids)
    cloud.sim.advance(10)
    for call, words in steps[1:]:
        call(**words)
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation", "the gateway is attached"
    cloud.ec2.detach_internet_gateway(**detach)
    cloud.ec2.delete_internet_gateway(InternetGatewayId=gateway)
    cloud.ec2.delete_vpc(VpcId=vpc)
    assert cloud.sim.leftovers() == []


def test_a_network_with_groups_endpoints_or_subnets_stays(cloud: Cloud) -> None:
    vpc, subnet, security = cloud.network()
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_subnet(SubnetId=subnet)
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_security_group(GroupId=security)
    made = cloud.ec2.create_vpc_endpoint(VpcId=vpc, ServiceName="com.amazonaws.us-east-1.s3")["VpcEndpoint"]
    assert refused(cloud.ec2.delete_vpc, VpcId=vpc)[0] == "DependencyViolation"
    cloud.ec2.delete_vpc_endpoints(VpcEndpointIds=[made["VpcEndpointId"]])
    cloud.ec2.delete_vpc(VpcId=vpc)


def test_a_group_named_by_another_groups_rules_stays_and_its_own_rules_do_not_count(cloud: Cloud) -> None:
    vpc, _, first = cloud.network()
    second = cloud.ec2.create_security_group(GroupName="second", Description="d", VpcId=vpc)["GroupId"]
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": first}]}]
    for one in (first, second):
        cloud.ec2.authorize_security_group_ingress(GroupId=one, IpPermissions=rule)
    assert refused(cloud.ec2.delete_security_group, GroupId=first)[0] == "DependencyViolation"
    cloud.ec2.delete_security_group(GroupId=second)
    cloud.ec2.delete_security_group(GroupId=first)


@pytest.mark.parametrize(
    ("call", "words"),
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
def test_a_dry_run_does_nothing(cloud: Cloud, call: str, words: dict[str, Any]) -> None:
    vpcs = len(cloud.ec2.describe_vpcs()["Vpcs"])
    assert refused(getattr(cloud.ec2, call), DryRun=True, **words) == ("DryRunOperation", 412)
    assert cloud.sim.leaks() == cloud.sim.leftovers() == [] and len(cloud.ec2.describe_vpcs()["Vpcs"]) == vpcs


def test_what_is_not_simulated_says_so(cloud: Cloud) -> None:
    call = cloud.ec2.get_spot_placement_scores
    assert refused(call, TargetCapacity=1, InstanceTypes=["g5.xlarge"]) == ("NotImplemented", 501)


# --- elastic addresses -----------------------------------------------------------------------------------------------


def test_an_elastic_address_leads_to_the_machine_and_outlives_it(cloud: Cloud) -> None:
    cloud.sim.boot_seconds = 5
    _, subnet, _ = cloud.network()
    nics = [{"DeviceIndex": i, "NetworkCardIndex": i, "SubnetId": subnet, "InterfaceType": "efa"} for i in (0, 1)]
    (id,) = cloud.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=nics)
    address = cloud.ec2.allocate_address(Domain="vpc")
    connect = {"AllocationId": address["AllocationId"]}
    assert address["PublicIp"].startswith("127.1.")
    assert refused(cloud.ec2.associate_address, InstanceId=id, **connect)[0] == "InvalidInstanceID", "pending"
    cloud.sim.advance(5)
    assert refused(cloud.ec2.associate_address, InstanceId=id, **connect)[0] == "InvalidInstanceID", "two interfaces"
    first = cloud.instance(id)["NetworkInterfaces"][0]
    cloud.ec2.associate_address(NetworkInterfaceId=first["NetworkInterfaceId"], **connect)
    found = cloud.instance(id)
    assert found["PublicIpAddress"] == found["PrivateIpAddress"] == cloud.sim.instances()[0].public
    (told,) = cloud.ec2.describe_addresses()["Addresses"]
    assert (told["PublicIp"], told["InstanceId"] or id) == (found["PublicIpAddress"], id)
    assert refused(cloud.ec2.release_address, **connect)[0] == "InvalidIPAddress.InUse"
    drop = cloud.ec2.delete_network_interface
    assert refused(drop, NetworkInterfaceId=first["NetworkInterfaceId"])[0] == "InvalidParameterValue", "in use"
    cloud.ec2.disassociate_address(AssociationId=told["AssociationId"])
    assert "PublicIpAddress" not in cloud.instance(id)
    assert refused(cloud.ec2.disassociate_address, AssociationId="eipassoc-0")[0] == "InvalidAssociationID.NotFound"
    assert cloud.ec2.describe_addresses()["Addresses"][0]["PublicIp"] == address["PublicIp"]
    cloud.ec2.associate_address(NetworkInterfaceId=first["NetworkInterfaceId"], **connect)
    cloud.ec2.terminate_instances(InstanceIds=[id])
    assert [one["kind"] for one in cloud.sim.leaks()] == ["address"]
    assert cloud.ec2.describe_addresses()["Addresses"][0]["PublicIp"] == address["PublicIp"]
    cloud.ec2.release_address(**connect)
    assert cloud.sim.leaks() == []


def test_elastic_addresses_are_few_and_cost_also_idle(cloud: Cloud) -> None:
    made = [cloud.ec2.allocate_address()["AllocationId"] for _ in range(5)]
    assert refused(cloud.ec2.allocate_address)[0] == "AddressLimitExceeded"
    cloud.sim.advance(3600)
    for id in made:
        cloud.ec2.release_address(AllocationId=id)
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["addresses"] == pytest.approx(0.025)


# --- EFS -------------------------------------------------------------------------------------------------------------


def test_efs_comes_and_goes_by_the_clock(cloud: Cloud) -> None:
    cloud.sim.efs_seconds = 8
    efs = cloud.client("efs")
    _, subnet, security = cloud.network()
    id = efs.create_file_system(CreationToken="t", Encrypted=True, Tags=[{"Key": "a", "Value": "b"}])["FileSystemId"]
    target = {"FileSystemId": id, "SubnetId": subnet, "SecurityGroups": [security]}

    def state(what: str) -> list[str]:
        told = efs.describe_file_systems() if what == "FileSystems" else efs.describe_mount_targets(FileSystemId=id)
        return [one["LifeCycleState"] for one in told[what]]

    assert state("FileSystems") == ["creating"]
    assert refused(efs.create_mount_target, **target) == ("IncorrectFileSystemLifeCycleState", 409)
    cloud.sim.advance(8)
    assert state("FileSystems") == ["available"]
    made = efs.create_mount_target(**target)
    assert made["LifeCycleState"] == "creating" and state("MountTargets") == ["creating"]
    assert refused(efs.create_mount_target, **target) == ("MountTargetConflict", 409)
    cloud.sim.advance(8)
    assert state("MountTargets") == ["available"]
    assert refused(efs.delete_file_system, FileSystemId=id) == ("FileSystemInUse", 409)
    assert refused(cloud.ec2.delete_security_group, GroupId=security)[0] == "DependencyViolation"
    efs.delete_mount_target(MountTargetId=made["MountTargetId"])
    assert state("MountTargets") == ["deleting"]
    assert refused(efs.delete_file_system, FileSystemId=id)[0] == "FileSystemInUse"
    cloud.sim.advance(8)
    assert state("MountTargets") == []
    efs.delete_file_system(FileSystemId=id)
    assert state("FileSystems") == ["deleting"]
    cloud.sim.advance(8)
    assert state("FileSystems") == [] and refused(efs.delete_file_system, FileSystemId=id)[0] == "FileSystemNotFound"
    cloud.ec2.delete_security_group(GroupId=security)


def test_efs_without_waiting_refuses_doubles_and_unknown_groups(cloud: Cloud) -> None:
    efs = cloud.client("efs")
    _, subnet, _ = cloud.network()
    id = efs.create_file_system(CreationToken="t")["FileSystemId"]
    assert refused(efs.create_file_system, CreationToken="t") == ("FileSystemAlreadyExists", 409)
    words = {"FileSystemId": id, "SubnetId": subnet, "SecurityGroups": ["sg-0123456789abcdef0"]}
    assert refused(efs.create_mount_target, **words) == ("SecurityGroupNotFound", 400)
    assert [(one["kind"], one["id"]) for one in cloud.sim.leftovers() if one["kind"] == "file-system"] == [
        ("file-system", id)
    ]


def test_efs_costs_by_what_it_stores(cloud: Cloud) -> None:
    cloud.sim.efs_gb = 730
    cloud.client("efs").create_file_system(CreationToken="t")
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["efs"] == pytest.approx(0.30)


# --- prices, quotas, images ------------------------------------------------------------------------------------------


def test_spot_history_has_todays_price_of_each_zone(cloud: Cloud) -> None:
    cloud.sim.set_price("us-east-1b", "p4d.24xlarge", 9.5)
    words = {"InstanceTypes": ["p4d.24xlarge"], "ProductDescriptions": ["Linux/UNIX"]}
    rows = cloud.ec2.describe_spot_price_history(StartTime=datetime.fromtimestamp(START, UTC), **words)
    prices = {one["AvailabilityZone"]: float(one["SpotPrice"]) for one in rows["SpotPriceHistory"]}
    assert prices["us-east-1b"] == 9.5 and len(prices) > 2 and len(set(prices.values())) == len(prices)
    assert all(0.25 * 21.96 < price < 0.55 * 21.96 for price in prices.values())
    assert len(rows["SpotPriceHistory"]) == len(prices), "one row a zone: the price in force now"
    assert all(0 < START - one["Timestamp"].timestamp() < 3600 for one in rows["SpotPriceHistory"])
    (id,) = cloud.launch(InstanceType="p4d.24xlarge", InstanceMarketOptions={"MarketType": "spot"})
    cloud.sim.advance(3600)
    assert cloud.sim.bill()["instances"][id] == pytest.approx(prices["us-east-1a"], rel=1e-4)
    assert cloud.ec2.describe_spot_price_history(InstanceTypes=["p3.16xlarge"])["SpotPriceHistory"] == []


def test_the_price_list_knows_the_on_demand_price(cloud: Cloud) -> None:
    wanted = {"instanceType": "p5.48xlarge", "operatingSystem": "Linux", "regionCode": "us-east-1", "tenancy": "Shared"}
    wanted |= {"preInstalledSw": "NA", "capacitystatus": "Used"}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    (text,) = cloud.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    (term,) = json.loads(text)["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert float(dimension["pricePerUnit"]["USD"]) == 55.04 and dimension["unit"] == "Hrs"
    filters[0]["Value"] = "bogus.xlarge"
    assert cloud.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"] == []
    west = cloud.client("pricing", "us-west-2")
    assert refused(west.get_products, ServiceCode="AmazonEC2")[0] == "UnknownEndpoint"


def test_quotas_are_told_in_vcpu(cloud: Cloud) -> None:
    cloud.sim.quota_vcpu = {"L-7212CCBC": 0}
    ask = cloud.client("service-quotas").get_service_quota
    told = ask(ServiceCode="ec2", QuotaCode="L-7212CCBC")["Quota"]
    assert (told["Value"], told["QuotaName"]) == (0.0, "All P4, P3 and P2 Spot Instance Requests")
    assert ask(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]["Value"] > 3072
    assert refused(ask, ServiceCode="ec2", QuotaCode="L-00000000")[0] == "NoSuchResourceException"


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
@pytest.mark.parametrize(
    "name", ["base-oss-nvidia-driver-gpu-ubuntu-22.04", "oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04"]
)
def test_public_parameters_name_images_of_their_region(cloud: Cloud, region: str, name: str) -> None:
    full = f"/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"
    id = cloud.client("ssm", region).get_parameter(Name=full)["Parameter"]["Value"]
    (image,) = cloud.client("ec2", region).describe_images(ImageIds=[id])["Images"]
    assert image["ImageOwnerAlias"] == "amazon" and image["RootDeviceName"] == "/dev/sda1"
    assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75
    images = cloud.client("ec2", region).describe_images()["Images"]
    assert len(images) == 3, "none of moto's of 2017"
    other = "/aws/service/deeplearning/ami/x86_64/nothing/latest/ami-id"
    assert refused(cloud.client("ssm", region).get_parameter, Name=other)[0] == "ParameterNotFound"


def test_types_and_offerings_are_motos_and_p3_is_gone(cloud: Cloud) -> None:
    (p4d,) = cloud.ec2.describe_instance_types(InstanceTypes=["p4d.24xlarge"])["InstanceTypes"]
    assert p4d["VCpuInfo"]["DefaultVCpus"] == 96 and p4d["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"] == 4
    ask = cloud.ec2.describe_instance_types
    assert refused(ask, InstanceTypes=["p3.16xlarge"])[0] == "InvalidInstanceType"
    filters = [{"Name": "instance-type", "Values": ["p3.16xlarge", "p4d.24xlarge"]}]
    rows = cloud.ec2.describe_instance_type_offerings(LocationType="availability-zone", Filters=filters)
    assert {one["InstanceType"] for one in rows["InstanceTypeOfferings"]} == {"p4d.24xlarge"}
