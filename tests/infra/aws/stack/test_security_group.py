"""Security group, ssh rules, key pairs and the machines' role."""

import json
from typing import Any

import pytest
from support.aws_stack import RecordingAccount

from infra.aws.stack import key_pairs, policies, role, security_group
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError

# --- the security group ---------------------------------------------------------------------------------------------


@pytest.fixture
def vpc(work: StackContext) -> str:
    return str(work.account.ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"])


def test_ensure_security_group_restores_a_removed_rule(account: RecordingAccount, work: StackContext, vpc: str) -> None:
    group = security_group.ensure_security_group(work, vpc)
    own_rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    account.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[own_rule])
    assert not security_group.is_complete(security_group.find_security_group(work, vpc) or {})
    assert security_group.ensure_security_group(work, vpc) == group
    assert security_group.is_complete(security_group.find_security_group(work, vpc) or {})


# --- ssh ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(work: StackContext, vpc: str) -> str:
    return security_group.ensure_security_group(work, vpc)


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
        security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada", ports=(22, 2222))
    assert not account.changes()
    assert ssh_rules(account, group) == {
        (22, "198.51.100.4/32"): "ssh from ada",
        (2222, "198.51.100.4/32"): "ssh from ada",
        (22, "203.0.113.9/32"): "ssh from Zo__x _y_",  # in the characters that AWS takes
    }


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


# --- the role -------------------------------------------------------------------------------------------------------


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
    profile = {"InstanceProfileName": "imgnet-machine", "RoleName": "imgnet-machine"}
    assert requests["AddRoleToInstanceProfile"] == profile


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
def test_missing_permission_names_the_admin_command(account: RecordingAccount, work: StackContext, action: str) -> None:
    account.denied = {action: "AccessDenied"}
    with pytest.raises(CloudError, match=r"^role imgnet-machine .*an admin types once: .*imgnet-cluster check --iam$"):
        role.ensure(work)
        role.grant_access(work, "fs-1", None)


def test_role_for_all_regions_is_used_unchanged(account: RecordingAccount, work: StackContext) -> None:
    role.ensure(work)
    document = json.dumps(policies.machine_policy())
    account.iam.put_role_policy(RoleName="imgnet-machine", PolicyName="imgnet", PolicyDocument=document)
    account.denied = {"Put": "AccessDenied", "Create": "AccessDenied"}
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []
