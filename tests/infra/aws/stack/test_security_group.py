"""Security group, ssh rules, key pairs and the machines' role."""

import json
from typing import Any

import pytest
from support.aws_stack import OWN_CIDR, RecordingAccount, account, aws, home, work
from support.log_lines import log_lines

from infra.aws.stack import key_pairs, policies, role, security_group
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError

__all__ = ["account", "aws", "home", "work"]
TRUST = json.dumps(policies.trust_policy())


# --- the security group ---------------------------------------------------------------------------------------------


@pytest.fixture
def vpc(work: StackContext) -> str:
    return str(work.account.ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"])


def test_security_group_allows_own_machines_and_one_ssh_address(
    account: RecordingAccount, work: StackContext, vpc: str
) -> None:
    group = security_group.ensure_security_group(work, vpc)
    security_group.allow_ssh_from(account, group, OWN_CIDR, "ada")
    (description,) = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    rules = [(rule["IpProtocol"], rule.get("FromPort"), rule["IpRanges"]) for rule in description["IpPermissions"]]
    allowed_groups = [pair["GroupId"] for rule in description["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    assert sorted(rules, key=str) == [
        ("-1", None, []),
        ("tcp", 22, [{"CidrIp": OWN_CIDR, "Description": "ssh from ada"}]),
    ]
    assert allowed_groups == [group] and not any(rule["Ipv6Ranges"] for rule in description["IpPermissions"])
    egress = description["IpPermissionsEgress"]
    assert {rule["IpProtocol"] for rule in egress} == {"-1"} and security_group.is_complete(description)
    groups, addresses = (
        [target for rule in egress for target in rule[kind]] for kind in ("UserIdGroupPairs", "IpRanges")
    )
    assert [pair["GroupId"] for pair in groups] == [group], "EFA needs a rule for traffic to the own machines"
    assert [address["CidrIp"] for address in addresses] == ["0.0.0.0/0"]


def test_foreign_security_group_is_refused_and_stays(account: RecordingAccount, work: StackContext, vpc: str) -> None:
    account.ec2.create_security_group(GroupName="imgnet", Description="theirs", VpcId=vpc)
    account.calls.clear()
    with pytest.raises(
        CloudError,
        match=rf"security group imgnet in {vpc} does not belong to imgnet-cluster: it has no tag imgnet:stack",
    ):
        security_group.ensure_security_group(work, vpc)
    security_group.remove_security_groups(work, vpc)
    assert not account.changes() and not work.leftovers


def test_ensure_security_group_restores_a_removed_rule(account: RecordingAccount, work: StackContext, vpc: str) -> None:
    group = security_group.ensure_security_group(work, vpc)
    own_rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    account.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[own_rule])
    assert not security_group.is_complete(security_group.find_security_group(work, vpc) or {})
    assert security_group.ensure_security_group(work, vpc) == group and security_group.is_complete(
        security_group.find_security_group(work, vpc) or {}
    )


# --- ssh ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(work: StackContext, vpc: str) -> str:
    return security_group.ensure_security_group(work, vpc)


def test_allow_ssh_from_closes_the_owners_old_address(account: RecordingAccount, group: str) -> None:
    with log_lines("infra") as lines:
        security_group.allow_ssh_from(account, group, "203.0.113.7", "ada")
        security_group.allow_ssh_from(account, group, "203.0.113.9/32", "bob")
        assert security_group.list_ssh_addresses(account, group) == ["203.0.113.7/32", "203.0.113.9/32"]
        security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada")
        assert security_group.list_ssh_addresses(account, group) == ["198.51.100.4/32", "203.0.113.9/32"]
        assert lines[-2:] == [
            "opening ssh to 198.51.100.4/32",
            "closing ssh to 203.0.113.7/32, the former address of ada",
        ]
        account.calls.clear()
        security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada")
    assert not account.changes() and len(lines) == 4


def test_allow_ssh_from_opens_several_ports(account: RecordingAccount, group: str) -> None:
    security_group.allow_ssh_from(account, group, OWN_CIDR, "ada")
    security_group.allow_ssh_from(account, group, OWN_CIDR, "ada", ports=(22, 2222))
    (description,) = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert sorted(rule["FromPort"] for rule in description["IpPermissions"] if rule["IpProtocol"] == "tcp") == [
        22,
        2222,
    ]


def test_allow_ssh_from_one_address_for_two_owners(account: RecordingAccount, group: str) -> None:
    security_group.allow_ssh_from(account, group, OWN_CIDR, "ada")
    security_group.allow_ssh_from(account, group, OWN_CIDR, "bob")
    assert security_group.list_ssh_addresses(account, group) == [OWN_CIDR]


def test_rule_description_replaces_characters_aws_rejects() -> None:
    assert (
        security_group.rule_description("Zoë|x <y>") == "ssh from Zo__x _y_"
        and len(security_group.rule_description("a" * 400)) == 255
    )


# --- the key pair ---------------------------------------------------------------------------------------------------


def test_key_pairs_are_imported_once_and_only_ours_removed(account: RecordingAccount, work: StackContext) -> None:
    account.ec2.create_key_pair(KeyName="theirs")
    for _ in range(2):
        public = key_pairs.generate_key_pair()[1]
        for _ in range(2):
            key_pairs.ensure_key_pair(work, key_pairs.key_pair_name(public), public)
    assert len(account.ec2.describe_key_pairs()["KeyPairs"]) == 3
    key_pairs.remove_key_pairs(work)
    assert [key_pair["KeyName"] for key_pair in account.ec2.describe_key_pairs()["KeyPairs"]] == ["theirs"]


def test_foreign_key_pair_is_refused(account: RecordingAccount, work: StackContext) -> None:
    public = key_pairs.generate_key_pair()[1]
    account.ec2.import_key_pair(KeyName=key_pairs.key_pair_name(public), PublicKeyMaterial=public.encode())
    with pytest.raises(
        CloudError, match=r"does not belong to imgnet-cluster: .*type: aws ec2 delete-key-pair --key-name imgnet-"
    ):
        key_pairs.ensure_key_pair(work, key_pairs.key_pair_name(public), public)


# --- the role -------------------------------------------------------------------------------------------------------


def test_role_is_of_ec2_and_has_the_policy_of_machines(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    role.grant_access(work, "fs-1", "my-imagenet")
    requests: dict[str, Any] = dict(account.calls)
    (statement,) = json.loads(requests["CreateRole"]["AssumeRolePolicyDocument"])["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"} and statement["Action"] == "sts:AssumeRole"
    machine_policy = policies.machine_policy(account.identity[0], account.region, "fs-1", "my-imagenet")
    assert json.loads(requests["PutRolePolicy"]["PolicyDocument"]) == machine_policy
    profile = {"InstanceProfileName": "imgnet-machine", "RoleName": "imgnet-machine"}
    assert requests["AddRoleToInstanceProfile"] == profile


def test_grant_access_follows_file_system_and_bucket(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []
    assert (
        role.missing_parts(work, "fs-2", None)
        == role.missing_parts(work, "fs-1", "b")
        == ["rights of role imgnet-machine in us-west-1"]
    )
    role.grant_access(work, "fs-2", "b")
    assert role.missing_parts(work, "fs-2", "b") == []


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
def test_role_without_permission_names_the_admin_command(
    account: RecordingAccount, work: StackContext, action: str
) -> None:
    account.denied = {action: "AccessDenied"}
    with pytest.raises(CloudError, match=r"^role imgnet-machine .*an admin types once: .*imgnet-cluster check --iam$"):
        role.ensure(work)
        role.grant_access(work, "fs-1", None)


def test_role_for_all_regions_is_used_unchanged(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    params = {
        "RoleName": "imgnet-machine",
        "PolicyName": "imgnet",
        "PolicyDocument": json.dumps(policies.machine_policy()),
    }
    account.iam.put_role_policy(**params)
    account.denied = {"Put": "AccessDenied", "Create": "AccessDenied"}
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []


def test_foreign_role_and_profile_are_refused_and_stay(account: RecordingAccount, work: StackContext) -> None:
    account.iam.create_role(RoleName="imgnet-machine", AssumeRolePolicyDocument=TRUST)
    with pytest.raises(
        CloudError, match="role imgnet-machine does not belong to imgnet-cluster: it has no tag imgnet:stack"
    ):
        role.ensure(work)
    account.iam.create_instance_profile(InstanceProfileName="imgnet-machine")
    with pytest.raises(
        CloudError,
        match="instance profile imgnet-machine does not belong to imgnet-cluster: it has no tag imgnet:stack",
    ):
        role.ensure(work)
    role.remove(work)
    assert account.iam.get_role(RoleName="imgnet-machine") and account.iam.list_instance_profiles()["InstanceProfiles"]
