"""The stack as a whole: created, found, removed, with crashes and races."""

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.aws_stack import COMPLETE_STACK, NO_RESOURCES, OWN_CIDR, REGION, Killed, RecordingAccount, count_resources
from support.log_lines import log_lines
from support.simcloud.fixture import IMAGE
from support.simcloud.http_server import AwsFrontend

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.journal_events import StackChange
from infra.aws.stack import key_pairs, network, policies, resources, role, stack
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError


def test_ensure_is_complete_and_idempotent(account: RecordingAccount, aws: Path) -> None:
    text = " | ".join(stack.inspect(account)[0])
    for part in ("network 10.77.0.0/16", "security group", "file system", "key pair", "role"):
        assert part in text
    assert not stack.exists(account) and stack.inspect(account)[1] is None
    assert not account.changes() and not list(aws.iterdir())
    with log_lines("infra") as lines:
        own_stack = stack.ensure(account, OWN_CIDR)
    assert count_resources(account) == COMPLETE_STACK and len(lines) > 5
    assert (list(own_stack.subnets), own_stack.region) == (["us-west-1a", "us-west-1b"], REGION)
    assert own_stack.access_point.startswith("fsap-") and own_stack.file_system.startswith("fs-")
    assert stack.exists(account) and stack.inspect(account)[0] == [] and stack.inspect(account)[1] == own_stack
    account.calls.clear()
    assert stack.ensure(account, OWN_CIDR) == own_stack
    assert not account.changes() and len(account.calls) < 30
    assert stack.remove(account, True) == [] and count_resources(account) == NO_RESOURCES
    account.calls.clear()
    assert stack.remove(account, True) == [] and not account.changes()


def test_remove_keeps_data_without_delete_data(account: RecordingAccount) -> None:
    own_stack = stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    account.s3.put_object(Bucket="imgnet-data", Key="data/one", Body=b"x")
    with pytest.raises(CloudError, match="--bucket imgnet-b: the stack has the bucket imgnet-data already"):
        stack.ensure(account, OWN_CIDR, bucket="imgnet-b")
    with log_lines("infra.aws.stack", logging.INFO) as lines:
        assert stack.remove(account, False) == [], "what is kept on purpose is no failure"
    kept_lines = [line for line in lines if "stays with its data" in line]
    assert len(kept_lines) == 2 and "imgnet-data" in kept_lines[0] and own_stack.file_system in kept_lines[1]
    assert all("GB" in line and "$ a month" in line and "--delete-data" in line for line in kept_lines)
    assert count_resources(account) == {**NO_RESOURCES, "FileSystems": 1, "AccessPoints": 1}
    second_stack = stack.ensure(account, OWN_CIDR)
    for part in ("file_system", "access_point", "bucket"):
        assert getattr(second_stack, part) == getattr(own_stack, part)
    assert count_resources(account) == COMPLETE_STACK
    assert stack.remove(account, True) == [] and not account.s3.list_buckets()["Buckets"]


def test_remove_refuses_while_machines_run_and_waits_for_ending(
    home: Path, front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "RESOURCE_IN_USE_SECONDS", 30.0)
    cloud = front.sim
    cloud.stop_seconds, cloud.efs_seconds = 1000.0, 0.2
    account = RecordingAccount()
    own_stack = stack.ensure(account, OWN_CIDR)
    image = account.ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"]
    (machine,) = account.ec2.run_instances(
        ImageId=image,
        MinCount=1,
        MaxCount=1,
        InstanceType="m5.large",
        TagSpecifications=tags.tag_specifications(["instance"], {tags.JOB: "job-3-9073e811"}),
        SubnetId=own_stack.subnets["us-west-1a"],
        SecurityGroupIds=[own_stack.security_group],
    )["Instances"]
    account.calls.clear()
    with pytest.raises(CloudError, match=rf"{machine['InstanceId']} \(job-3-9073e811\).*imgnet-cluster down") as caught:
        stack.remove(account, True)
    assert "\n" not in str(caught.value) and not account.changes() and stack.inspect(account)[1] == own_stack
    account.ec2.terminate_instances(InstanceIds=[machine["InstanceId"]])
    account.after["DeleteSecurityGroup"] = lambda: setattr(cloud, "stop_seconds", 0)  # the group is in use until then
    with log_lines("infra", logging.INFO) as lines:
        assert stack.remove(account, True) == [] and count_resources(account) == NO_RESOURCES
    assert account.changes().count("DeleteSecurityGroup") == 2
    assert any(line.endswith("still in use: waiting at most 30 s") for line in lines)
    assert not cloud.leaks() and not cloud.leftovers()


def test_remove_names_what_stays_and_goes_on(account: RecordingAccount) -> None:
    stack.ensure(account, OWN_CIDR)
    account.denied = {"DeleteSubnet": "DependencyViolation"}
    leftovers = stack.remove(account, True)
    assert any("subnet-" in line and "DependencyViolation" in line for line in leftovers)
    remaining = count_resources(account)
    assert remaining["Roles"] == remaining["FileSystems"] == remaining["InternetGateways"] == 0
    account.denied = {}
    assert stack.remove(account, True) == [] and count_resources(account) == NO_RESOURCES


def kill_until_done(account: RecordingAccount, command: Callable[[], Any]) -> list[str]:
    """Run a command again and again, killed each time right after the first change that it had not made before.

    Return the actions after which it was killed.
    """
    changes: list[str] = []
    changes_to_live = 1
    while changes_to_live < 10:
        account.changes_left = changes_to_live
        try:
            command()
        except Killed:
            change = json.dumps(account.calls[-1], default=str)
            changes_to_live = changes_to_live + 1 if change in changes else 1
            changes.append(change)
            assert all(count <= COMPLETE_STACK[name] for name, count in count_resources(account).items()), changes
            continue
        account.changes_left = None
        return [json.loads(change)[0] for change in changes]
    raise AssertionError(changes)


@pytest.mark.rehearsal
def test_ensure_and_remove_killed_after_each_change_converge(account: RecordingAccount) -> None:
    kill_actions = kill_until_done(account, lambda: stack.ensure(account, OWN_CIDR, bucket="imgnet-data"))
    assert count_resources(account) == COMPLETE_STACK and stack.inspect(account)[0] == []
    assert len(kill_actions) > 25 and {"CreateVpc", "PutRolePolicy", "PutBucketTagging"} <= {*kill_actions}
    kill_actions = kill_until_done(account, lambda: stack.remove(account, True))
    assert count_resources(account) == NO_RESOURCES and not account.s3.list_buckets()["Buckets"]
    assert len(kill_actions) > 15 and {"DeleteVpc", "DeleteFileSystem", "DeleteRole", "DeleteBucket"} <= {*kill_actions}


def test_remove_deletes_what_a_killed_ensure_left(account: RecordingAccount) -> None:
    for lives in (2, 5, 8, 12):
        account.changes_left = lives
        with pytest.raises(Killed):
            stack.ensure(account, OWN_CIDR)
        assert stack.remove(account, True) == [] and count_resources(account) == NO_RESOURCES


BEFORE = "CreateVpc CreateSubnet AttachInternetGateway CreateSecurityGroup ImportKeyPair CreateFileSystem"
AFTER = "CreateVpc CreateInternetGateway CreateRouteTable CreateVpcEndpoint"


@pytest.mark.parametrize(("moment", "actions"), [("before", BEFORE), ("after", AFTER)])
def test_ensure_agrees_with_another_process(account: RecordingAccount, moment: str, actions: str) -> None:
    other_account = RecordingAccount()
    other_stacks: list[stack.Stack] = []
    for action in actions.split():
        getattr(account, moment)[action] = lambda: other_stacks.append(stack.ensure(other_account, OWN_CIDR))
        own_stack = stack.ensure(account, OWN_CIDR)
        assert other_stacks.pop() == own_stack and count_resources(account) == COMPLETE_STACK, action
        assert stack.remove(account, True) == [] == other_stacks, action


def test_whatever_ensure_creates_has_the_users_tags(account: RecordingAccount) -> None:
    stack.ensure(account, OWN_CIDR, bucket="imgnet-data", user_tags={"CostCenter": "ml"})
    own_tag, user_tag = ("{'Key': 'imgnet:stack', 'Value': 'imgnet'}", "{'Key': 'CostCenter', 'Value': 'ml'}")
    tagged = {name: str(params) for name, params in account.calls if own_tag in str(params)}
    creating = {name for name, params in tagged.items() if user_tag in params}
    assert creating == {name for name in tagged if not name.startswith("Describe")} and len(creating) == 12


def test_ensure_records_an_intent_before_each_change(account: RecordingAccount, aws: Path) -> None:
    account.changes_left = 1
    with pytest.raises(Killed):
        stack.ensure(account, OWN_CIDR)
    (line,) = (aws / f".imgnet/aws/{REGION}.jsonl").read_text().splitlines()
    assert json.loads(line)["intent"] == "make role"
    account.changes_left = None
    stack.ensure(account, OWN_CIDR)
    assert len(stack.stack_journal(REGION).events(StackChange)) >= len(account.changes())


def create_foreign_bucket(account: Account) -> None:
    location = {"LocationConstraint": REGION}
    account.s3.create_bucket(Bucket="imgnet-data", CreateBucketConfiguration=location)
    account.s3.put_bucket_tagging(Bucket="imgnet-data", Tagging={"TagSet": tags.to_aws_tags({"team": "x"})})


def create_foreign_security_group(account: Account) -> None:
    vpc = network.ensure(StackContext(account)).vpc
    account.ec2.create_security_group(GroupName="imgnet", Description="theirs", VpcId=vpc)


def create_foreign_key_pair(account: Account) -> None:
    public = key_pairs.read_public_key(key_pairs.ensure_own_key())
    account.ec2.import_key_pair(KeyName=key_pairs.key_pair_name(public), PublicKeyMaterial=public.encode())


@pytest.mark.parametrize(("create", "deletion", "label"), [
    (lambda account: account.efs.create_file_system(CreationToken=f"imgnet-{REGION}"), "DeleteFileSystem",
     "file system fs-"),
    (lambda account: account.iam.create_role(RoleName="imgnet-machine", AssumeRolePolicyDocument="{}"), "DeleteRole",
     "role imgnet-machine"),
    (lambda account: account.iam.create_instance_profile(InstanceProfileName="imgnet-machine"),
     "DeleteInstanceProfile", "instance profile imgnet-machine"),
    (create_foreign_bucket, "DeleteBucket", "bucket imgnet-data"),
    (create_foreign_security_group, "DeleteSecurityGroup", "security group imgnet in vpc-"),
    (create_foreign_key_pair, "DeleteKeyPair", "key pair imgnet-"),
])  # fmt: skip
def test_foreign_resource_of_our_name_is_refused_and_stays(
    account: RecordingAccount, create: Callable[[Account], None], deletion: str, label: str
) -> None:
    create(account)
    refused = f"^{label}.* does not belong to imgnet-cluster: it has no tag imgnet:stack; "
    with pytest.raises(CloudError, match=refused):
        stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    with contextlib.suppress(CloudError):
        stack.remove(account, True)
    assert deletion not in account.changes()


def test_ensure_at_the_vpc_limit_names_the_command(account: RecordingAccount) -> None:
    account.denied = {"CreateVpc": "VpcLimitExceeded"}
    with pytest.raises(CloudError, match=r"as many networks.*--region us-west-1 .* vpc --quota-code L-F678F1CE"):
        stack.ensure(account, OWN_CIDR)


@pytest.mark.parametrize("text", ["0.0.0.0/0", "203.0.113.0/24", "::1", "home", "0.0.0.0/32"])
def test_ensure_rejects_other_than_one_address_before_any_call(account: RecordingAccount, text: str) -> None:
    with pytest.raises(CloudError, match=r"open to one IPv4 address only"):
        stack.ensure(account, text)
    assert not account.calls


def test_least_policy_makes_changes_and_removes_the_stack(home: Path, front: AwsFrontend) -> None:
    """Every call of a stack, with the tags that it sends, is allowed once an admin has made the role."""
    account = RecordingAccount()
    role.ensure(StackContext(account, stack.stack_journal(REGION)))
    front.sim.policy = policies.user_policy(region=REGION)
    own_stack = stack.ensure(account, OWN_CIDR, user_tags={"CostCenter": "ml"})
    assert stack.inspect(account)[1] == own_stack and stack.remove(account, True) == []
