"""The IAM role of the machines, with one inline policy for each region, and the instance profile that carries it.

A person who may not read roles can still launch: the role is then assumed to exist, and EC2 reports it if it does not.
"""

import json
import logging
from typing import Literal

from infra.aws import tags
from infra.aws.errors import DENIED_CODES
from infra.aws.tags import Resource
from infra.errors import CloudError

from . import policies as stack_policies
from .resources import StackContext, call_if_permitted, require_ours

logger = logging.getLogger(__name__)

ROLE_NAME = stack_policies.ROLE_NAME  # of the instance profile too
ALL_REGIONS_POLICY = "imgnet"  # the name of a policy that an admin has created for all regions
ROLE_UNREADABLE = "role: you have no permission to read it"
ADMIN_HINT = "an admin types once: imgnet-cluster up --region {}, or creates it from: imgnet-cluster check --iam"


def missing_parts(context: StackContext, file_system: str | None, bucket: str | None) -> list[str]:
    """Return a line for each missing part of the role. Raises `CloudError` when the role lacks the stack tag."""
    response = _read_profile(context)
    if response is False:
        return [ROLE_UNREADABLE]
    if not response or not _require_ours(response["InstanceProfile"], "instance profile")["Roles"]:
        return [f"role {ROLE_NAME} and its instance profile"]
    is_allowed = _has_access(context, file_system, bucket)
    return [] if is_allowed or is_allowed is None else [f"rights of role {ROLE_NAME} in {context.account.region}"]


def ensure(context: StackContext) -> None:
    """Create the role and its instance profile if missing.

    Raises `CloudError`, which says what an admin must do when you lack the permission.
    """
    iam = context.account.iam
    response = _read_profile(context)
    if response is False:
        logger.info(f"{ROLE_UNREADABLE}; assuming that it exists")
        return
    if response and _require_ours(response["InstanceProfile"], "instance profile")["Roles"]:
        return
    try:
        _ensure_role(context)
        if not response:
            context.create(
                "instance profile",
                iam.create_instance_profile,
                InstanceProfileName=ROLE_NAME,
                Path="/",
                Tags=tags.to_aws_tags(context.resource_tags()),
            )
        _require_ours(_get_profile(context), "instance profile")
        _add_role_to_profile(context)
    except CloudError as error:
        raise _admin_error(error, context, "does not exist, and you may not create it") from error


def grant_access(context: StackContext, file_system: str, bucket: str | None) -> None:
    """Allow the role to use a file system, and a bucket if named. Raises `CloudError`."""
    if _has_access(context, file_system, bucket) is False:
        try:
            context.create(
                f"rights of role {ROLE_NAME}",
                context.account.iam.put_role_policy,
                RoleName=ROLE_NAME,
                PolicyName=_policy_name(context),
                PolicyDocument=json.dumps(_expected_policy(context, file_system, bucket)),
            )
        except CloudError as error:
            raise _admin_error(error, context, f"may not use {file_system}, and you may not change that") from error


def remove(context: StackContext) -> None:
    """Delete this region's policy, and the role and its profile when no other region has a policy."""
    iam = context.account.iam
    policy_list = call_if_permitted("role", iam.list_role_policies, RoleName=ROLE_NAME)
    role = call_if_permitted("role", iam.get_role, RoleName=ROLE_NAME)
    profile = _read_profile(context)
    if policy_list is False or role is False or profile is False:
        context.leftovers.append(f"role {ROLE_NAME} (free) stays: you have no permission to read it")
        return
    role_is_ours = role is not None and tags.is_ours(role["Role"])
    policy_names = policy_list["PolicyNames"] if policy_list and role_is_ours else []
    own_policy = _policy_name(context)
    if own_policy in policy_names:
        context.delete(f"rights of role {ROLE_NAME}", iam.delete_role_policy, RoleName=ROLE_NAME, PolicyName=own_policy)
    if any(name != own_policy for name in policy_names):
        return  # other regions use the role
    if profile and tags.is_ours(profile["InstanceProfile"]):
        for profile_role in profile["InstanceProfile"]["Roles"]:
            context.delete(
                "role in the instance profile",
                iam.remove_role_from_instance_profile,
                InstanceProfileName=ROLE_NAME,
                RoleName=profile_role["RoleName"],
            )
        context.delete(
            f"instance profile {ROLE_NAME} (free)", iam.delete_instance_profile, InstanceProfileName=ROLE_NAME
        )
    if role_is_ours:
        context.delete(f"role {ROLE_NAME} (free)", iam.delete_role, RoleName=ROLE_NAME)


# --- the parts -------------------------------------------------------------------------------------------------------


def _require_ours(resource: Resource, kind: str) -> Resource:
    """Return `resource`, a role or a profile. Raises `CloudError` when it lacks the stack tag."""
    return require_ours(resource, f"{kind} {ROLE_NAME}", "remove it, or give it this tag with the value imgnet")


def _read_profile(context: StackContext) -> Resource | Literal[False] | None:
    """Return AWS's description of the instance profile; None if there is none, False if reading it is not permitted."""
    get_profile = context.account.iam.get_instance_profile
    return call_if_permitted("the machines' role", get_profile, InstanceProfileName=ROLE_NAME)


def _get_profile(context: StackContext) -> Resource:
    """Return the instance profile; an empty one with the stack tag while AWS does not show it yet."""
    response = _read_profile(context)
    if response:
        return dict(response["InstanceProfile"])
    return {"Tags": tags.to_aws_tags(context.resource_tags()), "Roles": []}


def _ensure_role(context: StackContext) -> None:
    """Create the role if missing. Raises `CloudError` when a role of its name lacks the stack tag."""
    iam = context.account.iam
    response = call_if_permitted("role", iam.get_role, RoleName=ROLE_NAME)
    if not response:
        logger.info(f"creating role {ROLE_NAME}")
        created = context.create(
            "role",
            iam.create_role,
            RoleName=ROLE_NAME,
            AssumeRolePolicyDocument=json.dumps(stack_policies.trust_policy()),
            Tags=tags.to_aws_tags(context.resource_tags()),
        )
        response = created or call_if_permitted("role", iam.get_role, RoleName=ROLE_NAME)
    if response:
        _require_ours(response["Role"], "role")


def _add_role_to_profile(context: StackContext) -> None:
    try:
        context.create(
            "role in the instance profile",
            context.account.iam.add_role_to_instance_profile,
            InstanceProfileName=ROLE_NAME,
            RoleName=ROLE_NAME,
        )
    except CloudError:
        # A profile holds one role at most. The call also fails when another user has just added the role.
        if [role["RoleName"] for role in _get_profile(context)["Roles"]] != [ROLE_NAME]:
            raise


def _policy_name(context: StackContext) -> str:
    return f"{ALL_REGIONS_POLICY}-{context.account.region}"


def _expected_policy(context: StackContext, file_system: str, bucket: str | None) -> stack_policies.Policy:
    return stack_policies.machine_policy(context.account.identity[0], context.account.region, file_system, bucket)


def _has_access(context: StackContext, file_system: str | None, bucket: str | None) -> bool | None:
    """Whether the role may use the file system and the bucket; None when you may not read its policies."""
    iam = context.account.iam
    response = call_if_permitted(
        "rights of the role", iam.get_role_policy, RoleName=ROLE_NAME, PolicyName=_policy_name(context)
    )
    if file_system and response and response["PolicyDocument"] == _expected_policy(context, file_system, bucket):
        return True
    policy_list = call_if_permitted("rights of the role", iam.list_role_policies, RoleName=ROLE_NAME)
    if response is False or policy_list is False:
        return None
    return policy_list is not None and ALL_REGIONS_POLICY in policy_list["PolicyNames"]


def _admin_error(error: CloudError, context: StackContext, problem: str) -> CloudError:
    """Return the error, replaced by what an admin must do when it is a missing permission."""
    if error.code not in DENIED_CODES:
        return error
    return CloudError(f"role {ROLE_NAME} {problem}; {ADMIN_HINT.format(context.account.region)}", error.code)
