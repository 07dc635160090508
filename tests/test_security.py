"""The security table of the README, a test for each of its lines: what is open, to whom, with what."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import AwsFrontend, serve

from cluster.backends.aws import plan as aws_plan
from cluster.jobs import submit
from cluster.machines import code_archive
from infra.aws.client import Account
from infra.aws.instances import instances
from infra.aws.instances.user_data import HOST_KEY_SCRIPT, SETUP_SCRIPT
from infra.aws.stack import key_pairs, stack

ROOT = Path(__file__).resolve().parents[1]
HERE = "203.0.113.7/32"
SECRET = "a-secret-access-key-of-the-user"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A simulated EC2 with a stack in it, the account that made it, the stack."""
    server, url = serve(sim=SimulatedAws())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        words = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "us", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}
        for name, value in {**words, "EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(f"AWS_{name}", value)
        patch.setattr("infra.aws.stack.resources.SETTLE", 0.01)
        account = Account()
        yield server.front, account, stack.ensure(account, HERE)
    server.shutdown()
    server.server_close()


def group(account: Account, own: stack.Stack) -> dict[str, Any]:
    found: dict[str, Any] = account.ec2.describe_security_groups(GroupIds=[own.security_group])["SecurityGroups"][0]
    return found


def run(recipe: str, **words: Any) -> dict[str, Any]:
    """The RunInstances that a launch would send."""
    [found] = submit.load_recipes(str(ROOT / "recipes" / recipe))
    plan = submit.plan(found, backend="aws", rental_options={"offline": True}, **words)
    assert plan.rental_plan
    return dict(aws_plan.preview_requests(plan.spec, plan.rental_plan))["ec2:RunInstances"]


def test_the_table_has_the_lines_that_are_tested_here() -> None:
    table = re.search(r"\| open \| to whom.*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert table
    lines = [row.split("|")[1].strip() for row in table[0].strip().splitlines()[2:]]
    assert lines == [
        "ssh to the machines", "everything between the machines", "host keys", "the machines' rights",
        "metadata service", "disks and file system", "your credentials",
    ]  # fmt: skip


def test_ssh_is_open_to_one_address_and_nothing_else_is_to_anybody(cloud: Any) -> None:
    _, account, own = cloud
    doors = [rule for rule in group(account, own)["IpPermissions"] if rule.get("IpRanges") or rule.get("Ipv6Ranges")]
    assert [(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in doors] == [("tcp", 22, 22)]
    assert [place["CidrIp"] for place in doors[0]["IpRanges"]] == [HERE]
    assert key_pairs.KEY_PATH.expanduser().stat().st_mode & 0o77 == 0


def test_all_between_the_machines_is_open_and_only_between_them(cloud: Any) -> None:
    _, account, own = cloud
    mine = group(account, own)
    for rules in (mine["IpPermissions"], mine["IpPermissionsEgress"]):
        inner = [pair["GroupId"] for rule in rules if rule["IpProtocol"] == "-1" for pair in rule["UserIdGroupPairs"]]
        assert inner == [own.security_group]


def test_the_first_login_knows_the_host_key_and_the_boot_key_is_worthless_after_it() -> None:
    data = json.loads(run("resnet50_18min.py")["UserData"].partition("\n")[2])
    assert set(data["ssh_keys"]) == {"ed25519_private", "ed25519_public"} and data["ssh_deletekeys"]
    assert (
        "rm -f ssh_host_*" in HOST_KEY_SCRIPT and "user-data" in HOST_KEY_SCRIPT
    )  # that it does so: tests/simcloud/test_machines.py


def test_a_machine_may_mount_one_file_system_and_nothing_of_ec2(cloud: Any) -> None:
    _, account, own = cloud
    name = account.iam.get_instance_profile(InstanceProfileName=own.profile)["InstanceProfile"]["Roles"][0]["RoleName"]
    assert not account.iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
    documents = [
        account.iam.get_role_policy(RoleName=name, PolicyName=one)["PolicyDocument"]
        for one in account.iam.list_role_policies(RoleName=name)["PolicyNames"]
    ]
    rules = [rule for document in documents for rule in document["Statement"]]
    actions = {
        one for rule in rules for one in ([rule["Action"]] if isinstance(rule["Action"], str) else rule["Action"])
    }
    assert actions <= {
        "elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite", "elasticfilesystem:DescribeMountTargets",
        "ec2:DescribeAvailabilityZones",
    }  # fmt: skip
    mounts = [rule for rule in rules if "elasticfilesystem:ClientMount" in rule["Action"]]
    assert [str(rule["Resource"]).endswith(f"file-system/{own.file_system}") for rule in mounts] == [True]


@pytest.mark.parametrize("recipe", ["resnet50_18min.py", "quickstart.py"])
def test_the_metadata_service_wants_a_token_and_answers_the_machine_alone(recipe: str) -> None:
    said = run(recipe)["MetadataOptions"]
    assert said == {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_disks_and_file_system_are_encrypted_at_rest_and_on_the_way(cloud: Any) -> None:
    _, account, own = cloud
    assert all(disk["Ebs"]["Encrypted"] for disk in run("resnet50_18min.py")["BlockDeviceMappings"])
    [system] = account.efs.describe_file_systems(FileSystemId=own.file_system)["FileSystems"]
    policy = json.loads(account.efs.describe_file_system_policy(FileSystemId=own.file_system)["Policy"])
    refused = [rule for rule in policy["Statement"] if rule["Effect"] == "Deny"]
    assert system["Encrypted"] and "SecureTransport" in json.dumps(refused) and "tls,iam" in SETUP_SCRIPT


def test_credentials_go_nowhere(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    front: AwsFrontend = cloud[0]
    monkeypatch.chdir(ROOT)
    plan = submit.plan(submit.load_recipes(str(ROOT / "recipes/quickstart.py"))[0], backend="aws", machines=2)
    packed, _ = code_archive.pack_code()
    assert plan.rental_plan and SECRET not in json.dumps(
        [plan.spec.to_json(), aws_plan.preview_requests(plan.spec, plan.rental_plan)]
    )
    assert SECRET.encode() not in packed and not any(b".aws/credentials" in path for path in packed.split(b"\0"))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET and front.calls
    assert not instances.describe_region(cloud[1])  # to plan rents nothing
