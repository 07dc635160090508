import ast
import fnmatch
import json
from functools import cache
from pathlib import Path

import boto3
import pytest
from botocore import xform_name

from infra.aws.stack import policies

GOLDEN = Path(__file__).parents[2] / "golden"
INFRA = Path(policies.__file__).parents[2]
SERVICES = {
    "ec2": "ec2", "ec2_no_retry": "ec2", "efs": "elasticfilesystem", "iam": "iam", "ssm": "ssm", "s3": "s3",
    "quotas": "servicequotas", "pricing": "pricing",
}  # fmt: skip
BOTO = {"servicequotas": "service-quotas", "elasticfilesystem": "efs"}
OTHER_NAMES = {
    "s3:ListObjectsV2": "s3:ListBucket", "s3:HeadBucket": "s3:ListBucket", "s3:DeleteObjects": "s3:DeleteObject",
    "s3:HeadObject": "s3:GetObject",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "s3:PutBucketEncryption": "s3:PutEncryptionConfiguration",
}  # fmt: skip


@cache
def operations() -> dict[str, set[str]]:
    """Every operation of the services in use, as Python calls it, with the actions that it may be."""
    found: dict[str, set[str]] = {}
    session = boto3.session.Session(region_name="us-east-1")
    for service in {*SERVICES.values()}:
        client = session.client(BOTO.get(service, service))
        for name in client.meta.service_model.operation_names:
            found.setdefault(xform_name(name), set()).add(f"{service}:{name}")
    return found


def used(text: str) -> set[str]:
    """The actions that a module asks for: by attribute of a client, or by name to a paginator. All it may be."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in operations():
            above = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            some = operations()[node.attr]
            mine = {one for one in some if one.startswith(f"{SERVICES.get(above)}:")}
            found |= mine or some
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in operations():
            found |= operations()[node.value]
    return {OTHER_NAMES.get(one, one) for one in found}


def test_this_test_sees_calls_of_each_kind() -> None:
    text = "call('x', account.ec2.create_vpc)\nec2.delete_vpc()\npages('x', account.efs, 'describe_file_systems', 'K')"
    assert used(text) == {"ec2:CreateVpc", "ec2:DeleteVpc", "elasticfilesystem:DescribeFileSystems"}


@pytest.mark.parametrize("path", sorted(INFRA.rglob("*.py")), ids=lambda path: path.stem)
def test_all_that_we_ask_of_aws_is_in_the_policy_of_a_person_or_is_an_admins(path: Path) -> None:
    allowed = policies.allowed_actions(policies.user_policy()) | {*policies.ADMIN_ACTIONS.split()}
    lacking = [one for one in used(path.read_text()) if not any(fnmatch.fnmatchcase(one, each) for each in allowed)]
    assert not sorted(lacking), (
        f"add to infra/aws/stack/policies.py (LOOK, CREATE, CHANGE, ...): {' '.join(sorted(lacking))}"
    )


def test_the_policy_names_no_action_that_aws_does_not_have() -> None:
    known = {one for some in operations().values() for one in some} | {*OTHER_NAMES.values(), "iam:PassRole"}
    named = policies.allowed_actions(policies.user_policy()) | {*policies.ADMIN_ACTIONS.split()}
    assert not [one for one in named if not fnmatch.filter(known, one)]


def test_the_policy_of_a_person_is_as_written_down_and_fits_a_managed_policy() -> None:
    whole = policies.user_policy("123456789012", "us-east-1")
    assert whole == json.loads((GOLDEN / "cli_policy.json").read_text())
    longest = policies.user_policy("123456789012", "ap-southeast-2", "a" * 63)
    assert len(json.dumps(longest, separators=(",", ":"))) <= policies.MAX_POLICY_CHARACTERS


def test_a_person_changes_only_what_bears_our_tag() -> None:
    """Each statement that allows a change has our tag in its condition, or names the one thing it is about."""
    for one in policies.user_policy()["Statement"]:
        changing = [name for name in one["Action"] if not name.split(":")[1].startswith(("Describe", "Get", "List"))]
        if one["Effect"] == "Deny" or not changing or one["Sid"] in ("RunImage", "MountTargets"):
            continue
        narrow = one["Resource"] != "*" and not any(
            "*/*" in part for part in [one["Resource"]] if isinstance(part, str)
        )
        assert (
            narrow or "imgnet:stack" in json.dumps(one["Condition"]) or "CreateAction" in json.dumps(one["Condition"])
        )


def test_a_person_has_no_power_over_rights_nor_machines_without_imdsv2() -> None:
    whole = policies.user_policy()
    named = policies.allowed_actions(whole)
    assert not [
        name for name in named if name in ("*", "iam:*", "ec2:*", "s3:*") or name in policies.ADMIN_ACTIONS.split()
    ]
    (deny,) = [one for one in whole["Statement"] if one["Effect"] == "Deny"]
    assert deny["Action"] == ["ec2:RunInstances"]
    assert deny["Condition"] == {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}}


def test_a_machine_mounts_one_file_system_and_reads_and_writes_its_prefixes() -> None:
    whole = policies.machine_policy("123456789012", "us-east-1", "fs-1", "my-imagenet")
    files = "arn:aws:elasticfilesystem:us-east-1:123456789012:file-system/fs-1"
    assert {one["Resource"] for one in whole["Statement"] if "elasticfilesystem" in one["Action"][0]} == {files}
    assert policies.allowed_actions(whole) == {
        "elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite", "elasticfilesystem:DescribeMountTargets",
        "s3:GetObject", "s3:PutObject", "s3:ListBucket",
    }  # fmt: skip
    where = {one["Action"][0]: one["Resource"] for one in whole["Statement"]}
    assert where["s3:GetObject"] == "arn:aws:s3:::my-imagenet/data/*"
    assert where["s3:PutObject"] == "arn:aws:s3:::my-imagenet/runs/*"
    assert not [name for name in policies.allowed_actions(policies.machine_policy()) if name.startswith("s3")]


def test_who_reads_a_set_in_another_bucket_reads_nothing_else_there() -> None:
    read, see = policies.dataset_policy("theirs", "sets/imagenet")["Statement"]
    assert (read["Action"], read["Resource"]) == (["s3:GetObject"], "arn:aws:s3:::theirs/sets/imagenet*")
    assert (see["Action"], see["Resource"]) == (["s3:ListBucket"], "arn:aws:s3:::theirs")
    assert see["Condition"] == {"StringLike": {"s3:prefix": ["sets/imagenet*"]}}
