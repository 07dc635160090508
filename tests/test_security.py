"""The security table of docs/aws.md, with a test for each line: what is open, to whom, and how it is protected."""

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
from support.iam import is_allowed
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import AwsFrontend, serve

from cluster.jobs import submit
from cluster.machines import code_archive
from cluster.planning.launch_options import make_launch_options
from infra.aws import tags
from infra.aws.client import Account
from infra.aws.instances import instances
from infra.aws.instances.user_data import HOST_KEY_SCRIPT, SETUP_SCRIPT
from infra.aws.stack import key_pairs, policies, role, stack

ROOT = Path(__file__).resolve().parents[1]
HERE = "203.0.113.7/32"
SECRET = "a-secret-access-key-of-the-user"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A simulated EC2, the account that created a stack in it, and the stack."""
    server, url = serve(sim=SimulatedAws())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        variables = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "us", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}
        for name, value in {**variables, "EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(f"AWS_{name}", value)
        patch.setattr("infra.aws.stack.resources.SETTLE_SECONDS", 0.01)
        account = Account()
        yield server.front, account, stack.ensure(account, HERE)
    server.shutdown()
    server.server_close()


def security_group(account: Account, own_stack: stack.Stack) -> dict[str, Any]:
    response = account.ec2.describe_security_groups(GroupIds=[own_stack.security_group])
    group: dict[str, Any] = response["SecurityGroups"][0]
    return group


def run_instances_request(recipe: str, **options: Any) -> dict[str, Any]:
    """Return the RunInstances request that a launch would send."""
    [loaded_recipe] = submit.load_recipes(str(ROOT / "recipes" / recipe))
    plan = submit.plan(loaded_recipe, make_launch_options(backend="aws", **options), offline=True)
    assert plan.rental_plan
    return cast("dict[str, Any]", dict(plan.rental_plan.requests)["ec2:RunInstances"])


def test_security_table_has_the_tested_lines() -> None:
    table = re.search(r"\| open \| to whom.*?\n\n", (ROOT / "docs/aws.md").read_text(), re.DOTALL)
    assert table
    lines = [row.split("|")[1].strip() for row in table[0].strip().splitlines()[2:]]
    assert lines == [
        "ssh to the machines",
        "login for a minute",
        "everything between the machines",
        "host keys",
        "the machines' rights",
        "metadata service",
        "disks and file system",
        "your credentials",
    ]


def test_ssh_is_open_to_one_address_and_nothing_else(cloud: Any) -> None:
    _, account, own_stack = cloud
    ingress_rules = [
        rule
        for rule in security_group(account, own_stack)["IpPermissions"]
        if rule.get("IpRanges") or rule.get("Ipv6Ranges")
    ]
    assert [(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in ingress_rules] == [("tcp", 22, 22)]
    assert [ip_range["CidrIp"] for ip_range in ingress_rules[0]["IpRanges"]] == [HERE]
    assert key_pairs.KEY_PATH.expanduser().stat().st_mode & 0o77 == 0


def test_login_for_a_minute_is_allowed_to_the_user_for_our_machines_only() -> None:
    action, machine = "ec2-instance-connect:SendSSHPublicKey", "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
    user = policies.user_policy("123456789012", "us-east-1")
    ours = {f"aws:ResourceTag/{tags.STACK}": tags.STACK_VALUE}
    assert is_allowed(user, action, machine, ours) and not is_allowed(user, action, machine, {})
    assert not is_allowed(policies.machine_policy(file_system="fs-1", bucket="ours"), action, machine, ours)


def test_all_traffic_between_the_machines_is_open(cloud: Any) -> None:
    _, account, own_stack = cloud
    group = security_group(account, own_stack)
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        allowed_groups = [
            pair["GroupId"] for rule in rules if rule["IpProtocol"] == "-1" for pair in rule["UserIdGroupPairs"]
        ]
        assert allowed_groups == [own_stack.security_group]


def test_boot_host_key_is_pinned_and_then_replaced() -> None:
    data = json.loads(run_instances_request("resnet50_18min.py")["UserData"].partition("\n")[2])
    assert set(data["ssh_keys"]) == {"ed25519_private", "ed25519_public"} and data["ssh_deletekeys"]
    # tests/infra/aws/instances/test_user_data.py runs the script.
    assert "rm -f ssh_host_*" in HOST_KEY_SCRIPT and "user-data" in HOST_KEY_SCRIPT


def test_machine_role_may_mount_one_file_system_and_no_ec2(cloud: Any) -> None:
    _, account, own_stack = cloud
    profile = account.iam.get_instance_profile(InstanceProfileName=role.ROLE_NAME)["InstanceProfile"]
    name = profile["Roles"][0]["RoleName"]
    assert not account.iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
    documents = [
        account.iam.get_role_policy(RoleName=name, PolicyName=policy_name)["PolicyDocument"]
        for policy_name in account.iam.list_role_policies(RoleName=name)["PolicyNames"]
    ]
    rules = [rule for document in documents for rule in document["Statement"]]
    actions = {
        action for rule in rules for action in ([rule["Action"]] if isinstance(rule["Action"], str) else rule["Action"])
    }
    assert actions <= {
        "elasticfilesystem:ClientMount",
        "elasticfilesystem:ClientWrite",
        "elasticfilesystem:DescribeMountTargets",
        "ec2:DescribeAvailabilityZones",
    }
    mounts = [rule for rule in rules if "elasticfilesystem:ClientMount" in rule["Action"]]
    assert [str(rule["Resource"]).endswith(f"file-system/{own_stack.file_system}") for rule in mounts] == [True]


@pytest.mark.parametrize("recipe", ["resnet50_18min.py", "quickstart.py"])
def test_metadata_service_requires_a_token_and_one_hop(recipe: str) -> None:
    options = run_instances_request(recipe)["MetadataOptions"]
    assert options == {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_disks_and_file_system_are_encrypted(cloud: Any) -> None:
    _, account, own_stack = cloud
    assert all(disk["Ebs"]["Encrypted"] for disk in run_instances_request("resnet50_18min.py")["BlockDeviceMappings"])
    [file_system] = account.efs.describe_file_systems(FileSystemId=own_stack.file_system)["FileSystems"]
    policy = json.loads(account.efs.describe_file_system_policy(FileSystemId=own_stack.file_system)["Policy"])
    deny_statements = [rule for rule in policy["Statement"] if rule["Effect"] == "Deny"]
    assert file_system["Encrypted"] and "SecureTransport" in json.dumps(deny_statements) and "tls,iam" in SETUP_SCRIPT


def test_credentials_stay_on_this_computer(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    front: AwsFrontend = cloud[0]
    monkeypatch.chdir(ROOT)
    plan = submit.plan(
        submit.load_recipes(str(ROOT / "recipes/quickstart.py"))[0], make_launch_options(backend="aws", machines=2)
    )
    archive, _ = code_archive.pack_code()
    assert plan.rental_plan and SECRET not in json.dumps([plan.spec.to_json(), plan.rental_plan.requests])
    assert SECRET.encode() not in archive and not any(b".aws/credentials" in path for path in archive.split(b"\0"))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET and front.calls
    assert not instances.describe(cloud[1], {})  # planning rents nothing
