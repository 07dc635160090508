import json
from pathlib import Path
from typing import Any

import pytest
from support.aws_stack import HERE, Seen, account, aws, home, work

from infra.aws.errors import CloudError
from infra.aws.stack import key_pairs, policies, role, security_group
from infra.aws.stack.resources import StackContext

__all__ = ["account", "aws", "home", "work"]
GOLDEN = Path(__file__).parents[2] / "golden"
TRUST = json.dumps(policies.trust_policy())


def asked(account: Seen, *actions: str, **names: str) -> list[Any]:
    """The requests of these actions, with names in the place of ids."""
    text = json.dumps([[action, words] for action, words in account.calls if action in actions])
    for name, id in names.items():
        text = text.replace(id, f"<{name}>")
    return list(json.loads(text))


def golden(name: str, found: Any) -> None:
    assert found == json.loads((GOLDEN / name).read_text())


# --- the security group ---------------------------------------------------------------------------------------------


@pytest.fixture
def vpc(work: StackContext) -> str:
    return str(work.account.ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"])


def test_the_group_is_asked_for_exactly_so(account: Seen, work: StackContext, vpc: str) -> None:
    group = security_group.ensure_security_group(work, vpc)
    security_group.allow_ssh_from(account, group, HERE, "ada")
    actions = ("CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress")
    owner = account.owner
    golden("security_group.json", asked(account, *actions, group=group, vpc=vpc, owner=owner))


def test_machines_hear_each_other_and_nobody_else_but_ssh_from_one_address(
    account: Seen, work: StackContext, vpc: str
) -> None:
    group = security_group.ensure_security_group(work, vpc)
    security_group.allow_ssh_from(account, group, HERE, "ada")
    (one,) = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    rules = [(rule["IpProtocol"], rule.get("FromPort"), rule["IpRanges"]) for rule in one["IpPermissions"]]
    own = [pair["GroupId"] for rule in one["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    assert sorted(rules, key=str) == [("-1", None, []), ("tcp", 22, [{"CidrIp": HERE, "Description": "ssh from ada"}])]
    assert own == [group] and not any(rule["Ipv6Ranges"] for rule in one["IpPermissions"])
    assert {rule["IpProtocol"] for rule in one["IpPermissionsEgress"]} == {"-1"} and security_group.is_complete(one)


def test_a_group_of_our_name_without_our_tag_is_refused_and_stays(account: Seen, work: StackContext, vpc: str) -> None:
    account.ec2.create_security_group(GroupName="imgnet", Description="theirs", VpcId=vpc)
    account.calls.clear()
    with pytest.raises(CloudError, match=rf"security group imgnet in {vpc} is not ours: it has no tag imgnet:stack"):
        security_group.ensure_security_group(work, vpc)
    security_group.remove_security_groups(work, vpc)
    assert not account.changes() and not work.leftovers


def test_a_rule_that_somebody_took_away_is_set_again(account: Seen, work: StackContext, vpc: str) -> None:
    group = security_group.ensure_security_group(work, vpc)
    own = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    account.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=[own])
    assert not security_group.is_complete(security_group.find_security_group(work, vpc) or {})
    assert security_group.ensure_security_group(work, vpc) == group and security_group.is_complete(
        security_group.find_security_group(work, vpc) or {}
    )


# --- ssh ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(work: StackContext, vpc: str) -> str:
    return security_group.ensure_security_group(work, vpc)


def test_a_person_who_moves_takes_their_address_along_and_hears_so(account: Seen, group: str) -> None:
    said: list[str] = []
    security_group.allow_ssh_from(account, group, "203.0.113.7", "ada", log=said.append)
    security_group.allow_ssh_from(account, group, "203.0.113.9/32", "bob", log=said.append)
    assert security_group.list_ssh_addresses(account, group) == ["203.0.113.7/32", "203.0.113.9/32"]
    security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada", log=said.append)
    assert security_group.list_ssh_addresses(account, group) == ["198.51.100.4/32", "203.0.113.9/32"]
    assert said[-2:] == [
        "letting in ssh from 198.51.100.4/32",
        "no more ssh from 203.0.113.7/32, where ada was before",
    ]
    account.calls.clear()
    security_group.allow_ssh_from(account, group, "198.51.100.4/32", "ada", log=said.append)
    assert not account.changes() and len(said) == 4


def test_an_image_with_another_port_has_that_one_too(account: Seen, group: str) -> None:
    security_group.allow_ssh_from(account, group, HERE, "ada")
    security_group.allow_ssh_from(account, group, HERE, "ada", ports=(22, 2222))
    (one,) = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert sorted(rule["FromPort"] for rule in one["IpPermissions"] if rule["IpProtocol"] == "tcp") == [22, 2222]


def test_two_people_behind_one_address_are_both_let_in(account: Seen, group: str) -> None:
    security_group.allow_ssh_from(account, group, HERE, "ada")
    security_group.allow_ssh_from(account, group, HERE, "bob")
    assert security_group.list_ssh_addresses(account, group) == [HERE]


def test_a_name_that_aws_would_not_take_is_written_in_letters_it_takes() -> None:
    assert (
        security_group.rule_description("Zoë|x <y>") == "ssh from Zo__x _y_"
        and len(security_group.rule_description("a" * 400)) == 255
    )


# --- the key pair ---------------------------------------------------------------------------------------------------


def test_each_persons_key_is_imported_once_and_all_of_ours_are_removed(account: Seen, work: StackContext) -> None:
    account.ec2.create_key_pair(KeyName="theirs")
    for _ in range(2):
        public = key_pairs.generate_key_pair()[1]
        for _ in range(2):
            security_group.ensure_key_pair(work, key_pairs.key_pair_name(public), public)
    assert len(account.ec2.describe_key_pairs()["KeyPairs"]) == 3
    security_group.remove_key_pairs(work)
    assert [one["KeyName"] for one in account.ec2.describe_key_pairs()["KeyPairs"]] == ["theirs"]


def test_a_key_pair_of_our_name_without_our_tag_is_refused(account: Seen, work: StackContext) -> None:
    public = key_pairs.generate_key_pair()[1]
    account.ec2.import_key_pair(KeyName=key_pairs.key_pair_name(public), PublicKeyMaterial=public.encode())
    with pytest.raises(CloudError, match=r"is not ours: .*type: aws ec2 delete-key-pair --key-name imgnet-"):
        security_group.ensure_key_pair(work, key_pairs.key_pair_name(public), public)


# --- the role -------------------------------------------------------------------------------------------------------


def test_the_role_is_asked_for_exactly_so(account: Seen, work: StackContext) -> None:
    role.ensure(work)
    role.grant_access(work, "fs-0123456789abcdef0", "my-imagenet")
    found = asked(
        account, "CreateRole", "PutRolePolicy", "CreateInstanceProfile", "AddRoleToInstanceProfile", owner=account.owner
    )
    for _, words in found:
        for name in ("AssumeRolePolicyDocument", "PolicyDocument"):
            words |= {name: json.loads(words[name])} if name in words else {}
    golden("role.json", found)


def test_the_rights_follow_the_file_system_and_the_bucket(account: Seen, work: StackContext) -> None:
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


def test_the_role_stays_while_another_region_uses_it(account: Seen, work: StackContext) -> None:
    there = StackContext(Seen("eu-west-1"))
    for each in (work, there):
        role.ensure(each)
        role.grant_access(each, "fs-1", None)
    role.remove(work)
    assert role.missing_parts(there, "fs-1", None) == [] and role.missing_parts(work, "fs-1", None)
    role.remove(there)
    assert not account.iam.list_roles()["Roles"] and not work.leftovers + there.leftovers


@pytest.mark.parametrize("action", ["CreateRole", "CreateInstanceProfile", "PutRolePolicy"])
def test_who_may_not_make_the_role_is_told_what_an_admin_types(account: Seen, work: StackContext, action: str) -> None:
    account.deny = {action: "AccessDenied"}
    with pytest.raises(CloudError, match=r"^role imgnet-machine .*an admin types once: .*imgnet-cluster check --iam$"):
        role.ensure(work)
        role.grant_access(work, "fs-1", None)


def test_a_role_that_an_admin_made_for_all_regions_is_used_as_it_is(account: Seen, work: StackContext) -> None:
    role.ensure(work)
    words = {
        "RoleName": "imgnet-machine",
        "PolicyName": "imgnet",
        "PolicyDocument": json.dumps(policies.machine_policy()),
    }
    account.iam.put_role_policy(**words)
    account.deny = {"Put": "AccessDenied", "Create": "AccessDenied"}
    role.ensure(work)
    role.grant_access(work, "fs-1", None)
    assert role.missing_parts(work, "fs-1", None) == []


def test_a_role_and_a_profile_of_our_name_without_our_tag_are_refused_and_stay(
    account: Seen, work: StackContext
) -> None:
    account.iam.create_role(RoleName="imgnet-machine", AssumeRolePolicyDocument=TRUST)
    with pytest.raises(CloudError, match="role imgnet-machine is not ours: it has no tag imgnet:stack"):
        role.ensure(work)
    account.iam.create_instance_profile(InstanceProfileName="imgnet-machine")
    with pytest.raises(CloudError, match="instance profile imgnet-machine is not ours: it has no tag imgnet:stack"):
        role.ensure(work)
    role.remove(work)
    assert account.iam.get_role(RoleName="imgnet-machine") and account.iam.list_instance_profiles()["InstanceProfiles"]
