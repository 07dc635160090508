"""IAM policies, compared with every AWS call in infra/."""

import ast
import fnmatch
import json
from functools import cache
from pathlib import Path

import boto3
import pytest
from botocore import xform_name
from support import iam

from infra.aws import tags
from infra.aws.stack import policies

INFRA = Path(policies.__file__).parents[2]
SERVICES = {name: name for name in ("ec2", "iam", "ssm", "s3", "pricing", "cloudwatch")} | {"ec2_no_retry": "ec2"}
SERVICES |= {"efs": "elasticfilesystem", "instance_connect": "ec2-instance-connect", "quotas": "servicequotas"}
MAX_POLICY_CHARACTERS = 6144  # AWS's limit for a managed policy, without white space
BOTO_SERVICE_NAMES = {"servicequotas": "service-quotas", "elasticfilesystem": "efs"}
ACTION_BY_OPERATION = {
    "s3:ListBuckets": "s3:ListAllMyBuckets",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:DeleteObjects": "s3:DeleteObject",
    "s3:HeadObject": "s3:GetObject",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "s3:PutBucketEncryption": "s3:PutEncryptionConfiguration",
    "s3:PutBucketLifecycleConfiguration": "s3:PutLifecycleConfiguration",
}


def allowed_actions(policy: policies.Policy) -> set[str]:
    """Return the names of the actions that a policy allows. A name may end in *."""
    action_fields = [statement["Action"] for statement in policy["Statement"] if statement["Effect"] == "Allow"]
    return {name for actions in action_fields for name in ([actions] if isinstance(actions, str) else actions)}


@cache
def actions_by_method() -> dict[str, set[str]]:
    """Return the IAM actions that each boto3 method name can mean, for the services in use."""
    actions_by_name: dict[str, set[str]] = {}
    session = boto3.session.Session(region_name="us-east-1")
    for service in {*SERVICES.values()}:
        client = session.client(BOTO_SERVICE_NAMES.get(service, service))
        for name in client.meta.service_model.operation_names:
            actions_by_name.setdefault(xform_name(name), set()).add(f"{service}:{name}")
    return actions_by_name


def used_actions(text: str) -> set[str]:
    """Return the actions that a module's source calls, by a client's attribute or by name through a paginator.

    Where the client's service is not clear, all possible actions count.
    """
    actions: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in actions_by_method():
            client = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            possible_actions = actions_by_method()[node.attr]
            service_actions = {action for action in possible_actions if action.startswith(f"{SERVICES.get(client)}:")}
            actions |= service_actions or possible_actions
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in actions_by_method():
            actions |= actions_by_method()[node.value]
    return {ACTION_BY_OPERATION.get(action, action) for action in actions}


@pytest.mark.parametrize("path", sorted(INFRA.rglob("*.py")), ids=lambda path: str(path.relative_to(INFRA)))
def test_policies_allow_every_aws_call_of_infra(path: Path) -> None:
    allowed = allowed_actions(policies.user_policy()) | {*policies.ADMIN_ACTIONS.split()}
    missing = [
        action
        for action in used_actions(path.read_text())
        if not any(fnmatch.fnmatchcase(action, pattern) for pattern in allowed)
    ]
    assert not sorted(missing), f"add to infra/aws/stack/policies.py: {' '.join(sorted(missing))}"


def test_user_policy_allows_the_further_actions_that_aws_authorizes_for_an_action() -> None:
    allowed = allowed_actions(policies.user_policy())
    needed = {name for action in allowed if "*" not in action for name in iam.aws_dependent_actions(action)}
    missing = {name for name in needed if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)}
    assert missing == {"route53:AssociateVPCWithHostedZone"}, "our endpoint has no private DNS"


STACK_REQUEST_TAG = {f"aws:RequestTag/{tags.STACK}": tags.STACK_VALUE}


@pytest.mark.parametrize("service", policies.TAG_ACTIONS)
def test_user_policy_allows_tags_in_a_creating_call_alone(service: str) -> None:
    policy, action = policies.user_policy("123456789012", "us-east-1"), policies.TAG_ACTIONS[service]
    resource, creating = f"arn:aws:{service}:us-east-1:123456789012:thing/new", {f"{service}:CreateAction": "Create"}
    assert iam.is_allowed(policy, action, resource, {**STACK_REQUEST_TAG, **creating})
    assert not iam.is_allowed(policy, action, resource, creating)
    assert not iam.is_allowed(policy, action, resource, STACK_REQUEST_TAG)


def test_aws_knows_the_condition_keys_of_each_statement() -> None:
    """AWS ignores a statement for a resource whose action does not take the condition's key, and says nothing."""
    unknown = set()
    for statement in [*policies.user_policy()["Statement"], *policies.network_policy("vpc-1")["Statement"]]:
        keys = [key for conditions in statement.get("Condition", {}).values() for key in conditions]
        for action in statement["Action"]:
            resource_types = iam.aws_action(action)["resource_types"] if "*" not in action else {}
            for key in keys:
                general_key = key.replace(tags.STACK, "${TagKey}")
                if not any(general_key in iam.aws_condition_keys(action, name) for name in ["", *resource_types]):
                    unknown.add((statement.get("Sid"), action, key))
    assert not unknown


EC2 = "arn:aws:ec2:us-east-1:123456789012:"
IAM = "arn:aws:iam::123456789012:"
OURS = {f"aws:ResourceTag/{tags.STACK}": tags.STACK_VALUE}
LAUNCH = {**STACK_REQUEST_TAG, "ec2:MetadataHttpTokens": "required"}


@pytest.mark.parametrize(("action", "resource", "needed_context"), [
    ("ec2:CreateVpc", f"{EC2}vpc/*", STACK_REQUEST_TAG),
    ("ec2:CreateSubnet", f"{EC2}vpc/vpc-1", OURS),
    ("ec2:RunInstances", f"{EC2}instance/*", LAUNCH),
    ("ec2:RunInstances", f"{EC2}volume/*", STACK_REQUEST_TAG),
    ("ec2:RunInstances", f"{EC2}spot-instances-request/*", STACK_REQUEST_TAG),
    ("ec2:RunInstances", f"{EC2}security-group/sg-1", OURS),
    ("ec2:RunInstances", f"{EC2}placement-group/pg-1", OURS),
    ("ec2:CreateNatGateway", f"{EC2}elastic-ip/eipalloc-1", OURS),
    ("ec2:TerminateInstances", f"{EC2}instance/i-1", OURS),
    ("iam:PassRole", f"{IAM}role/imgnet-machine", {"iam:PassedToService": "ec2.amazonaws.com"}),
    # Reservations and images of others
    ("ec2:RunInstances", f"{EC2}capacity-reservation/cr-1", {}),
    ("ec2:RunInstances", "arn:aws:resource-groups:us-east-1:123456789012:group/mine", {}),
    ("ec2:RunInstances", "arn:aws:ec2:us-east-1::image/ami-1", {}),
])  # fmt: skip
def test_user_policy_allows_a_change_of_what_is_ours_alone(
    action: str, resource: str, needed_context: dict[str, str]
) -> None:
    policy = policies.user_policy("123456789012", "us-east-1")
    assert iam.is_allowed(policy, action, resource, needed_context)
    for key in needed_context:
        assert not iam.is_allowed(policy, action, resource, {**needed_context, key: "another"})
    assert iam.is_allowed(policy, action, resource, {}) is not bool(needed_context)


def test_user_policy_changes_only_resources_with_our_tag_and_has_no_admin_rights() -> None:
    """Each statement that allows a change has the stack tag in its condition, or names the one thing it is about."""
    reading = ("Describe", "Get", "List")
    for statement in policies.user_policy()["Statement"]:
        changes = [name for name in statement["Action"] if not name.partition(":")[2].startswith(reading)]
        is_allowed = statement["Effect"] == "Allow" and statement["Sid"] not in ("RunUntagged", "MountTargets")
        if is_allowed and changes and (statement["Resource"] == "*" or "*/*" in statement["Resource"]):
            assert any(part in json.dumps(statement["Condition"]) for part in ("imgnet:stack", "CreateAction"))
    forbidden = {"*", "iam:*", "ec2:*", "s3:*", *policies.ADMIN_ACTIONS.split()}
    assert not allowed_actions(policies.user_policy()) & forbidden


def test_machine_policy_is_one_file_system_and_two_prefixes() -> None:
    policy = policies.machine_policy("123456789012", "us-east-1", "fs-1", "my-imagenet")
    file_system = "arn:aws:elasticfilesystem:us-east-1:123456789012:file-system/fs-1"
    assert [(statement["Action"], statement["Resource"]) for statement in policy["Statement"]] == [
        (["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"], file_system),
        (["s3:GetObject"], "arn:aws:s3:::my-imagenet/data/*"),
        (["s3:AbortMultipartUpload", "s3:PutObject"], "arn:aws:s3:::my-imagenet/runs/*"),
        (["s3:ListBucket"], "arn:aws:s3:::my-imagenet"),
    ]
    assert not [name for name in allowed_actions(policies.machine_policy()) if name.startswith("s3")]


@pytest.mark.parametrize(
    ("region", "partition"),
    [("ap-southeast-2", "aws"), ("cn-northwest-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")],  # long names
)
def test_policies_name_the_partition_of_their_region_and_are_short_enough_for_iam(region: str, partition: str) -> None:
    longest = policies.user_policy("123456789012", region, "a" * 63)
    assert len(json.dumps(longest, separators=(",", ":"))) <= MAX_POLICY_CHARACTERS
    others = (policies.machine_policy, policies.file_system_policy)
    documents = [longest, *(make("1", region, "fs-1") for make in others)]
    documents += [policies.machine_policy("1", region, "fs-1", "theirs"), policies.dataset_policy("b", "sets", region)]
    documents += [policies.bucket_policy("ours", region), policies.network_policy("vpc-1", region=region)]
    text = json.dumps(documents)
    assert text.count('"arn:') == text.count(f'"arn:{partition}:') > 15


def test_bucket_policy_denies_every_call_without_tls_and_allows_nothing() -> None:
    policy, bucket = policies.bucket_policy("ours", "us-east-1"), "arn:aws:s3:::ours"
    calls = [("s3:ListBucket", bucket), ("s3:GetObject", f"{bucket}/data/x"), ("s3:PutObject", f"{bucket}/runs/x")]
    everything = policies._allow("All", "s3:*", "*")
    allowing: policies.Policy = {**policy, "Statement": [*policy["Statement"], everything]}
    for action, resource in calls:
        assert not iam.is_allowed(allowing, action, resource, {"aws:SecureTransport": "false"})
        assert iam.is_allowed(allowing, action, resource, {"aws:SecureTransport": "true"})
        assert not iam.is_allowed(policy, action, resource, {"aws:SecureTransport": "true"})


def test_dataset_policy_reads_one_prefix_only() -> None:
    policy = policies.dataset_policy("theirs", "sets/imagenet")
    bucket, inside = "arn:aws:s3:::theirs", {"s3:prefix": "sets/imagenet-half/"}
    assert iam.is_allowed(policy, "s3:GetObject", f"{bucket}/sets/imagenet/train/0.bin", {})
    assert not iam.is_allowed(policy, "s3:GetObject", f"{bucket}/sets/other", {})
    assert iam.is_allowed(policy, "s3:ListBucket", bucket, inside)
    assert not iam.is_allowed(policy, "s3:ListBucket", bucket, {"s3:prefix": "sets/other"})
