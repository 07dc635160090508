"""The permissions of the caller: each call of EC2 and EFS is checked against the cloud's `policy`, as IAM does it.

A call with tags needs the service's tag action too, and a launch with a role iam:PassRole. A launch without a subnet or
a security group uses the default ones, which have no tags of ours. In other calls, resources that exist count as ours.
"""

from collections.abc import Iterator
from typing import Any

from moto.iam.models import iam_backends
from support.iam import is_allowed
from support.simcloud.cloud import ACCOUNT, AwsError, SimulatedAws
from support.simcloud.run_instances import LaunchRequest

from infra.aws import tags

SERVICES = {"ec2": "ec2", "efs": "elasticfilesystem"}
TAG_OPERATIONS = ("CreateTags", "TagResource")
Tags = dict[str, str]
Authorization = tuple[str, str, dict[str, str]]  # action, resource (ARN), context


def find_denial(response: Any, operation: str) -> AwsError | None:
    """Return AWS's error for a call that the policy of the cloud does not allow, None for one that it allows."""
    policy = SimulatedAws.current.policy
    if policy is None:
        return None
    service = SERVICES[response.boto3_service_name]
    is_launch = (service, operation) == ("ec2", "RunInstances")
    required = _launch_authorizations(response) if is_launch else _authorizations(response, service, operation)
    for action, resource, context in required:
        if not is_allowed(policy, action, resource, context):
            code = "UnauthorizedOperation" if service == "ec2" else "AccessDeniedException"
            return AwsError(code, f"You are not authorized to perform {action} on {resource} with {context}.")
    return None


def _authorizations(response: Any, service: str, operation: str) -> Iterator[Authorization]:
    arn = f"arn:aws:{service}:{response.region}:{ACCOUNT}:vpc/any"
    new_tags = _new_tags(response)
    yield f"{service}:{operation}", arn, {**_request_context(new_tags), **_resource_context(tags.STACK_VALUE)}
    if new_tags and operation not in TAG_OPERATIONS:
        yield _tag_authorization(service, operation, arn, new_tags)


def _new_tags(response: Any) -> Tags:
    specifications = response._get_param("TagSpecifications", []) or response._get_param("TagSpecification", []) or []
    pairs = [pair for specification in specifications for pair in specification.get("Tags", [])]
    return {pair["Key"]: pair["Value"] for pair in pairs or response._get_param("Tags", []) or []}


def _launch_authorizations(response: Any) -> Iterator[Authorization]:
    request = LaunchRequest(response)
    arn = f"arn:aws:ec2:{request.region}:{ACCOUNT}:"
    yield "ec2:RunInstances", f"arn:aws:ec2:{request.region}::image/{request.image}", {}
    tokens = str(response._get_param("MetadataOptions.HttpTokens"))
    new_kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] * (request.market == "spot"))]
    for kind in new_kinds:
        context = {**_request_context(request.tags.get(kind, {})), "ec2:MetadataHttpTokens": tokens}
        yield "ec2:RunInstances", f"{arn}{kind}/*", context
    for kind, stack_tag in _existing_resources(request):
        yield "ec2:RunInstances", f"{arn}{kind}/any", _resource_context(stack_tag)
    if request.reservation:
        yield "ec2:RunInstances", f"{arn}capacity-reservation/{request.reservation}", {}
    if request.reservation_group:
        yield "ec2:RunInstances", request.reservation_group, {}
    for kind, kind_tags in request.tags.items():
        yield _tag_authorization("ec2", "RunInstances", f"{arn}{kind}/*", kind_tags)
    profiles = iam_backends[ACCOUNT]["aws"].instance_profiles.values()
    for role in [role for profile in profiles if profile.name == request.profile["Name"] for role in profile.roles]:
        yield "iam:PassRole", role.arn, {"iam:PassedToService": "ec2.amazonaws.com"}


def _existing_resources(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """Yield the kind and the stack tag of each resource that a launch uses: "" for one that is not ours."""
    key = request.backend.key_pairs.get(request.key)
    group = SimulatedAws.current.groups.get((request.region, request.group))
    for kind, ids in (
        ("subnet", request.subnet_ids() or ["the default"]),
        ("security-group", request.security_group_ids() or ["the default"]),
        ("key-pair", [key.id] if key else []),
        ("placement-group", [group.id] if group else []),
    ):
        for id in ids:
            yield kind, str(request.backend.tags.get(id, {}).get(tags.STACK, ""))


def _request_context(new_tags: Tags) -> dict[str, str]:
    return {f"aws:RequestTag/{key}": value for key, value in new_tags.items()}


def _resource_context(stack_tag: str) -> dict[str, str]:
    return {f"aws:ResourceTag/{tags.STACK}": stack_tag} if stack_tag else {}


def _tag_authorization(service: str, operation: str, arn: str, new_tags: Tags) -> Authorization:
    action = {"ec2": "ec2:CreateTags", "elasticfilesystem": "elasticfilesystem:TagResource"}[service]
    return action, arn, {**_request_context(new_tags), f"{service}:CreateAction": operation}
