"""The parts of the stack: network, security group, ssh, keys, role, file system, bucket, claims on jobs."""

import json
import re
import shlex
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner
from support.aws_stack import OWN_CIDR, RecordingAccount, count_resources

from cluster.cli.app import cli
from infra.aws import tags
from infra.aws.stack import efs, key_pairs, network, policies, resources, role, security_group, stack
from infra.aws.stack.claims import CLAIM_PREFIX, read_claim, write_claim
from infra.aws.stack.network import StackNetwork
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError


@pytest.fixture
def own_network(work: StackContext) -> StackNetwork:
    return network.ensure(work)


@pytest.fixture
def group(work: StackContext, own_network: StackNetwork) -> str:
    return security_group.ensure_security_group(work, str(own_network.vpc))


# --- parts that are made twice, or removed by hand -------------------------------------------------------------------


def test_ensure_single_reports_an_invisible_resource(work: StackContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "RESOURCE_VISIBILITY_SECONDS", 0.05)
    with pytest.raises(CloudError, match=r"thing was created, but AWS does not show it .*run the same command again"):
        nothing = lambda **params: None  # noqa: E731
        work.ensure_single("thing", "vpc", list, nothing, nothing, id_key="Id", is_used=lambda _: False)


def stack_parts(account: RecordingAccount) -> tuple[Any, Any, Any]:
    filters = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    (table,) = account.ec2.describe_route_tables(Filters=filters)["RouteTables"]
    (gateway,) = account.ec2.describe_internet_gateways(Filters=filters)["InternetGateways"]
    (endpoint,) = account.ec2.describe_vpc_endpoints(Filters=filters)["VpcEndpoints"]
    return table, gateway, endpoint


def remove_part(account: RecordingAccount, created: stack.Stack, part: str) -> None:
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
            ec2.detach_internet_gateway(**attached, VpcId=created.vpc)
            if part == "gateway":
                ec2.delete_internet_gateway(**attached)
        case "rule":
            own_rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": created.security_group}]}
            ec2.revoke_security_group_egress(GroupId=created.security_group, IpPermissions=[own_rule])
        case "mount target":
            target = account.efs.describe_mount_targets(FileSystemId=created.file_system)["MountTargets"][0]
            account.efs.delete_mount_target(MountTargetId=target["MountTargetId"])


@pytest.mark.parametrize(("part", "label"), [
    ("route", "route table"),
    ("association", "route table"),
    ("endpoint", "S3 gateway endpoint (free)"),
    ("attachment", "internet gateway"),
    ("gateway", "internet gateway"),
    ("rule", "security group imgnet"),
    ("mount target", "mount target in us-west-1"),
])  # fmt: skip
def test_ensure_restores_a_removed_part(account: RecordingAccount, part: str, label: str) -> None:
    created = stack.ensure(account, OWN_CIDR)
    remove_part(account, created, part)
    assert [line for line in stack.inspect(account)[0] if line.startswith(label)]
    assert stack.ensure(account, OWN_CIDR) == created and stack.inspect(account)[0] == []


# --- the network -----------------------------------------------------------------------------------------------------


def test_ensure_routes_each_zone_to_the_internet_and_s3(account: RecordingAccount, own_network: StackNetwork) -> None:
    subnets = account.ec2.describe_subnets(SubnetIds=[*own_network.subnets.values()])["Subnets"]
    cidrs = {subnet["AvailabilityZone"]: subnet["CidrBlock"] for subnet in subnets}
    assert cidrs == {"us-west-1a": "10.77.0.0/20", "us-west-1b": "10.77.16.0/20"}
    # Each launch request decides about public addresses.
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets)
    response = account.ec2.describe_vpc_attribute(VpcId=own_network.vpc, Attribute="enableDnsHostnames")
    assert response["EnableDnsHostnames"]["Value"] is True
    table, gateway, endpoint = stack_parts(account)
    targets = {route.get("DestinationCidrBlock"): route.get("GatewayId") for route in table["Routes"]}
    assert targets["0.0.0.0/0"] == gateway["InternetGatewayId"]
    assert {association["SubnetId"] for association in table["Associations"]} == {*own_network.subnets.values()}
    assert [attachment["VpcId"] for attachment in gateway["Attachments"]] == [own_network.vpc]
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


def test_ensure_takes_the_used_vpc_and_deletes_idle_ones(
    account: RecordingAccount, work: StackContext, own_network: StackNetwork
) -> None:
    for _ in range(3):  # one of them sorts first by ID
        account.ec2.create_vpc(CidrBlock="10.77.0.0/16", TagSpecifications=work.tag_specifications("vpc"))
    assert network.inspect_network(work) == own_network and network.ensure(work) == own_network
    assert count_resources(account)["Vpcs"] == 1


@pytest.mark.parametrize("code", ["InvalidGatewayID.NotFound", "InvalidNatGatewayID.NotFound"])
def test_route_to_a_gateway_that_is_not_visible_yet_is_made_a_moment_later(
    account: RecordingAccount, work: StackContext, code: str
) -> None:
    def refuse() -> None:
        raise ClientError({"Error": {"Code": code, "Message": "no"}}, "CreateRoute")

    account.before = {"CreateRoute": refuse}
    network.ensure(work)
    table, gateway, _ = stack_parts(account)
    assert gateway["InternetGatewayId"] in [route.get("GatewayId") for route in table["Routes"]]


# --- security group, keys, role --------------------------------------------------------------------------------------


def ssh_rules(account: RecordingAccount, group: str) -> dict[tuple[int, str], str]:
    """Return the descriptions of the rules for ssh, by port and address."""
    (description,) = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    return {
        (rule["FromPort"], ip_range["CidrIp"]): ip_range["Description"]
        for rule in description["IpPermissions"]
        if rule["IpProtocol"] == "tcp"
        for ip_range in rule["IpRanges"]
    }


def test_allow_ssh_from_closes_the_owners_old_address(account: RecordingAccount, group: str) -> None:
    security_group.allow_ssh_from(account, group, "203.0.113.7", "ada")
    security_group.allow_ssh_from(account, group, "203.0.113.9/32", "Zoë|x <y>")
    security_group.allow_ssh_from(account, group, "203.0.113.9/32", "bob")
    for _ in range(2):
        account.calls.clear()
        security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada", image_port=2222)
    assert not account.changes()
    assert ssh_rules(account, group) == {
        (22, "198.51.100.4/32"): "ssh from ada",
        (2222, "198.51.100.4/32"): "ssh from ada",
        (22, "203.0.113.9/32"): "ssh from Zo__x _y_",  # in the characters that AWS takes
    }


def test_allow_ssh_from_leaves_open_what_live_machines_are_supervised_from(
    account: RecordingAccount, work: StackContext, own_network: StackNetwork, group: str
) -> None:
    """The other computer of the same owner, and another owner behind the same address, who has no rule of his own."""
    used, idle, home = "198.51.100.1/32", "198.51.100.2/32", "198.51.100.3/32"
    security_group.allow_ssh_from(account, group, used, "ann")
    security_group.allow_ssh_from(account, group, used, "bob")
    specifications = work.tag_specifications("instance")
    specifications[0]["Tags"].append({"Key": tags.SSH_FROM, "Value": used})
    image = account.ec2.describe_images()["Images"]
    subnet = own_network.subnets["us-west-1a"]
    machine = account.ec2.run_instances(
        ImageId=image[0]["ImageId"] if image else "ami-1",
        MinCount=1,
        MaxCount=1,
        SubnetId=subnet,
        TagSpecifications=specifications,
    )["Instances"][0]["InstanceId"]
    for address in (idle, home):
        security_group.allow_ssh_from(account, group, address, "ann")
    assert {address for _, address in ssh_rules(account, group)} == {used, home}
    account.ec2.terminate_instances(InstanceIds=[machine])
    security_group.allow_ssh_from(account, group, home, "ann")
    assert {address for _, address in ssh_rules(account, group)} == {home}


def test_key_pairs_are_imported_once_and_only_ours_removed(account: RecordingAccount, work: StackContext) -> None:
    account.ec2.create_key_pair(KeyName="theirs")
    for _ in range(2):
        public = key_pairs.generate_key_pair()[1]
        for _ in range(2):
            key_pairs.ensure_key_pair(work, key_pairs.key_pair_name(public), public)
    assert len(account.ec2.describe_key_pairs()["KeyPairs"]) == 3
    key_pairs.remove_key_pairs(work)
    assert [key_pair["KeyName"] for key_pair in account.ec2.describe_key_pairs()["KeyPairs"]] == ["theirs"]


def test_ensure_own_key_generates_one_private_file_also_in_parallel(home: Path) -> None:
    start = threading.Barrier(4)

    def read_key(_: int) -> bytes:
        start.wait(120)
        return key_pairs.ensure_own_key().read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(read_key, range(4)))) == 1
    path = key_pairs.ensure_own_key()
    assert path == home / ".imgnet/aws/id_ed25519" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.with_suffix(".pub").read_text().startswith(key_pairs.read_public_key(path))
    assert sorted(file.name for file in path.parent.iterdir()) == ["id_ed25519", "id_ed25519.pub"]


def test_unreadable_key_names_the_file_or_the_tool(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, damaged = home / "locked", home / "damaged"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    damaged.write_text("no key\n")
    damaged.chmod(0o600)
    for path, reason in ((damaged, ""), (locked, ".*passphrase")):
        with pytest.raises(CloudError, match=f"^{path}: {reason}"):
            key_pairs.read_public_key(path)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(CloudError, match=r"ssh-keygen cannot be run .*install OpenSSH"):
        key_pairs.ensure_own_key()


def test_role_is_of_ec2_and_has_the_policy_of_machines(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    for file_system, bucket in (("fs-2", None), ("fs-1", "my-imagenet")):
        role.grant_access(work, file_system, bucket)
        assert role.missing_parts(work, file_system, bucket) == []
    assert role.missing_parts(work, "fs-2", None) == ["rights of role imgnet-machine in us-west-1"]
    requests: dict[str, Any] = dict(account.calls)
    (statement,) = json.loads(requests["CreateRole"]["AssumeRolePolicyDocument"])["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"} and statement["Action"] == "sts:AssumeRole"
    machine_policy = policies.machine_policy(account.identity[0], account.region, "fs-1", "my-imagenet")
    assert json.loads(requests["PutRolePolicy"]["PolicyDocument"]) == machine_policy


def test_remove_keeps_a_role_that_another_region_uses(account: RecordingAccount, work: StackContext) -> None:
    western_context = StackContext(RecordingAccount("eu-west-1"))
    for context in (work, western_context):
        role.ensure(context)
        role.grant_access(context, "fs-1", None)
    role.remove(work)
    assert role.missing_parts(western_context, "fs-1", None) == [] and role.missing_parts(work, "fs-1", None)
    role.remove(western_context)
    assert not account.iam.list_roles()["Roles"] and not work.leftovers + western_context.leftovers


@pytest.mark.parametrize("action", ["CreateRole", "CreateInstanceProfile", "PutRolePolicy"])
def test_missing_permission_names_the_command_with_which_an_admin_grants_it(
    account: RecordingAccount, work: StackContext, action: str
) -> None:
    account.denied = {action: "AccessDenied"}
    with pytest.raises(CloudError) as caught:
        role.ensure(work)
        role.grant_access(work, "fs-1", None)
    match = re.search(
        r"an admin types once: imgnet-cluster (.+), or .*: imgnet-cluster check --iam$", str(caught.value)
    )
    assert match and str(caught.value).startswith("role imgnet-machine ")
    ran = CliRunner().invoke(cli, [*match[1].split(), "--from", OWN_CIDR])
    assert ran.exit_code == 0 and stack.inspect(account)[0] == [], ran.output


def test_role_that_another_policy_denies_names_it_too(account: RecordingAccount, work: StackContext) -> None:
    def deny() -> None:
        message = "no, with an explicit deny in a service control policy"
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": message}}, "CreateRole")

    account.before = {"CreateRole": deny}
    with pytest.raises(CloudError, match=r"policy forbids it, .*service control policy.*; role imgnet-machine does"):
        role.ensure(work)


def test_role_for_all_regions_is_used_unchanged(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    document = json.dumps(policies.machine_policy())
    account.iam.put_role_policy(RoleName="imgnet-machine", PolicyName="imgnet", PolicyDocument=document)
    account.denied = {"Put": "AccessDenied", "Create": "AccessDenied"}
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []


def test_role_that_an_admin_makes_with_the_commands_of_the_page_is_used(
    account: RecordingAccount, work: StackContext
) -> None:
    printed = json.loads(CliRunner().invoke(cli, ["check", "--iam"]).stdout)
    page = (Path(__file__).parents[4] / "docs/aws.md").read_text().replace("\\\n", "")
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("aws iam ")]
    assert len(commands) == 4
    for verb, *words in commands:
        options = dict(zip(words[::2], words[1::2], strict=True))
        params: dict[str, Any] = {}
        for option, text in options.items():
            if match := re.fullmatch(r"\$\(jq \.(\w+) iam\.json\)", text):
                text = json.dumps(printed[match[1]])
            tag = dict(part.split("=") for part in text.split(",")) if option == "--tags" else {}
            params[option.removeprefix("--").title().replace("-", "")] = [tag] if tag else text
        getattr(account.iam, verb.replace("-", "_"))(**params)
    account.denied = {"Put": "AccessDenied", "Create": "AccessDenied"}
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []


# --- the file system and the bucket ----------------------------------------------------------------------------------


def test_ensure_creates_an_encrypted_file_system_in_each_zone_for_tls_and_a_role(
    account: RecordingAccount, work: StackContext, own_network: StackNetwork, group: str
) -> None:
    subnets = own_network.subnets
    file_system, served = efs.ensure(work, own_network, group)
    (description,) = account.efs.describe_file_systems()["FileSystems"]
    assert description["Encrypted"]
    targets = account.efs.describe_mount_targets(FileSystemId=file_system.id)["MountTargets"]
    assert {target["SubnetId"] for target in targets} == {*served.values()} == {*subnets.values()}
    for target in targets:
        response = account.efs.describe_mount_target_security_groups(MountTargetId=target["MountTargetId"])
        assert response["SecurityGroups"] == [group]
    policy = json.loads(account.efs.describe_file_system_policy(FileSystemId=file_system.id)["Policy"])
    deny, allow = policy["Statement"]
    assert deny["Effect"] == "Deny" and deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert allow["Effect"] == "Allow" and allow["Principal"] == {"AWS": "arn:aws:iam::123456789012:root"}
    assert allow["Action"] == ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    (point,) = account.efs.describe_access_points(FileSystemId=file_system.id)["AccessPoints"]
    assert point["PosixUser"] == {"Uid": 1000, "Gid": 1000} and point["RootDirectory"]["Path"] == "/imgnet"


def test_bucket_is_private_encrypted_over_tls_only_and_found_by_others(account: RecordingAccount) -> None:
    own_stack = stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    assert own_stack.bucket == "imgnet-data" and stack.inspect(RecordingAccount())[1] == own_stack == stack.ensure(
        RecordingAccount(), OWN_CIDR
    )
    public_access = account.s3.get_public_access_block(Bucket="imgnet-data")["PublicAccessBlockConfiguration"]
    assert len(public_access) == 4 and all(public_access.values())
    lifecycle = account.s3.get_bucket_lifecycle_configuration(Bucket="imgnet-data")["Rules"]
    assert [rule["AbortIncompleteMultipartUpload"] for rule in lifecycle] == [{"DaysAfterInitiation": 7}]
    rules = account.s3.get_bucket_encryption(Bucket="imgnet-data")["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    policy = json.loads(account.s3.get_bucket_policy(Bucket="imgnet-data")["Policy"])
    assert policy == policies.bucket_policy("imgnet-data", account.region)


# --- claims: of the computers that adopt a job, the last one supervises it -------------------------------------------

UID = "job-3-9073e811"
TOMORROW = time.time() + 86400


@pytest.fixture
def file_system(work: StackContext) -> str:
    """The stack's file system. Two other jobs are claimed on it: one claim has expired, one is valid."""
    efs.ensure(work, StackNetwork(None, {}, ()), "sg-1")
    description = efs.describe_own(work)
    assert description
    old, other = (f"{'0' * 32} {tags.format_time(TOMORROW - days * 86400)}" for days in (2, 0))
    work.account.efs.tag_resource(
        ResourceId=description["FileSystemId"],
        Tags=tags.to_aws_tags({f"{CLAIM_PREFIX}job-1-00000001": old, f"{CLAIM_PREFIX}job-2-00000002": other}),
    )
    return str(description["FileSystemId"])


def test_last_claim_counts_and_expired_ones_are_removed(account: RecordingAccount, file_system: str) -> None:
    assert read_claim(account, UID).id == ""
    for claim in ("a" * 32, "b" * 32):
        write_claim(account, UID, claim, TOMORROW)
        known_claim = read_claim(account, UID)
        assert (known_claim.id, known_claim.expires) == (claim, pytest.approx(TOMORROW, abs=1))
        assert known_claim.since == pytest.approx(time.time(), abs=60) and account.owner in known_claim.holder
    assert read_claim(account, "job-1-00000001").id == "" and read_claim(account, "job-2-00000002").id == "0" * 32
    (description,) = account.efs.describe_file_systems()["FileSystems"]
    assert tags.is_ours(description)


def test_of_two_computers_that_claim_a_job_at_once_one_is_refused(account: RecordingAccount, file_system: str) -> None:
    account.after["TagResource"] = lambda: write_claim(RecordingAccount(), UID, "b" * 32, TOMORROW)
    with pytest.raises(CloudError, match=f"^{UID}: another computer has adopted this job at the same moment$"):
        write_claim(account, UID, "a" * 32, TOMORROW)
    assert read_claim(account, UID).id == "b" * 32


def test_claim_without_a_stack_is_refused(account: RecordingAccount) -> None:
    assert read_claim(account, UID).id == ""
    with pytest.raises(CloudError, match="no file system"):
        write_claim(account, UID, "a" * 32, TOMORROW)
