"""The security table of docs/aws.md: what is open, to whom, and how it is protected."""

import json
import os
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
from infra.aws.stack import key_pairs, policies, stack

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


def test_machines_are_open_to_one_address_by_ssh_and_to_each_other(cloud: Any) -> None:
    _, account, own_stack = cloud
    [group] = account.ec2.describe_security_groups(GroupIds=[own_stack.security_group])["SecurityGroups"]
    opened = {
        (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"), source.get("CidrIp") or source.get("GroupId"))
        for rule in group["IpPermissions"]
        for kind in ("IpRanges", "Ipv6Ranges", "PrefixListIds", "UserIdGroupPairs")
        for source in rule.get(kind, [])
    }
    assert opened == {("tcp", 22, 22, HERE), ("-1", None, None, own_stack.security_group)}
    assert key_pairs.KEY_PATH.expanduser().stat().st_mode & 0o77 == 0


def test_login_for_a_minute_is_allowed_to_the_user_for_our_machines_only() -> None:
    action, machine = "ec2-instance-connect:SendSSHPublicKey", "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
    user = policies.user_policy("123456789012", "us-east-1")
    ours = {f"aws:ResourceTag/{tags.STACK}": tags.STACK_VALUE}
    assert is_allowed(user, action, machine, ours) and not is_allowed(user, action, machine, {})
    assert not is_allowed(policies.machine_policy(file_system="fs-1", bucket="ours"), action, machine, ours)


def test_machines_have_encrypted_disks_a_metadata_service_of_one_hop_and_replace_their_host_keys() -> None:
    """Machines with GPUs and without. tests/infra compares the other parts of the request, and the stack."""
    for name in ("resnet50_18min", "quickstart"):
        [recipe] = submit.load_recipes(str(ROOT / f"recipes/{name}.py"))
        rental_plan = submit.plan(recipe, make_launch_options(backend="aws"), offline=True).rental_plan
        assert rental_plan
        request = cast("dict[str, Any]", dict(rental_plan.requests)["ec2:RunInstances"])
        assert all(disk["Ebs"]["Encrypted"] for disk in request["BlockDeviceMappings"])
        metadata = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert request["MetadataOptions"] == metadata
        assert json.loads(request["UserData"].partition("\n")[2])["ssh_deletekeys"]


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
