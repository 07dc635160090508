"""The IAM role of the machines, with one inline policy for each region, and the instance profile that carries it."""

import contextlib
import json
import logging
from collections.abc import Iterator

from infra.aws import tags
from infra.aws.error_codes import DENIED_CODES, OTHER_POLICY
from infra.aws.tags import Resource
from infra.errors import CloudError

from . import policies as stack_policies
from .resources import StackContext, find, require_ours

logger = logging.getLogger(__name__)

ROLE_NAME = stack_policies.ROLE_NAME  # of the instance profile too
ALL_REGIONS_POLICY = "imgnet"  # the name of a policy that an admin has created for all regions
OURS_HINT = "remove it, or give it this tag with the value imgnet"
ADMIN_HINT = (
    "an admin types once: imgnet-cluster up --stack --region {}, or creates it from: imgnet-cluster check --iam"
)


def missing_parts(context: StackContext, file_system: str | None, bucket: str | None) -> list[str]:
    """Return a line for each missing part of the role. Raises `CloudError` when the role lacks the stack tag."""
    profile = _find_profile(context)
    if not profile or not profile["Roles"]:
        return [f"role {ROLE_NAME} and its instance profile"]
    has_access = _has_access(context, file_system, bucket)
    return [] if has_access else [f"rights of role {ROLE_NAME} in {context.account.region}"]


def ensure(context: StackContext) -> None:
    """Create the role and its instance profile if missing.

    Raises `CloudError`, which says what an admin must do when you lack the permission.
    """
    iam = context.account.iam
    profile = _find_profile(context)
    if profile and profile["Roles"]:
        return
    with _refer_to_admin(context, "does not exist, and you may not create it"):
        _ensure_role(context)
        if not profile:
            profile_tags = tags.to_aws_tags(context.resource_tags())
            create_profile = iam.create_instance_profile
            context.create(
                "instance profile", create_profile, InstanceProfileName=ROLE_NAME, Path="/", Tags=profile_tags
            )
            _find_profile(context)  # another program may have created it at the same time
        _add_role_to_profile(context)


def grant_access(context: StackContext, file_system: str, bucket: str | None) -> None:
    """Allow the role to use a file system, and a bucket if named. Raises `CloudError`."""
    if not _has_access(context, file_system, bucket):
        with _refer_to_admin(context, f"may not use {file_system}, and you may not change that"):
            context.create(
                f"rights of role {ROLE_NAME}",
                context.account.iam.put_role_policy,
                RoleName=ROLE_NAME,
                PolicyName=_policy_name(context),
                PolicyDocument=json.dumps(_expected_policy(context, file_system, bucket)),
            )


def remove(context: StackContext) -> None:
    """Delete this region's policy, and the role and its profile when no other region has a policy."""
    iam = context.account.iam
    response = find("role", iam.get_role, RoleName=ROLE_NAME)
    role_is_ours = response is not None and tags.is_ours(response["Role"])
    policy_names = _list_policies(context) if role_is_ours else []
    own_policy = _policy_name(context)
    if own_policy in policy_names:
        context.delete(f"rights of role {ROLE_NAME}", iam.delete_role_policy, RoleName=ROLE_NAME, PolicyName=own_policy)
    if any(name != own_policy for name in policy_names):
        return  # other regions use the role
    response = find("instance profile", iam.get_instance_profile, InstanceProfileName=ROLE_NAME)
    if response and tags.is_ours(response["InstanceProfile"]):
        for profile_role in response["InstanceProfile"]["Roles"]:
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


def _find_profile(context: StackContext) -> Resource | None:
    """Return AWS's description of the instance profile, None if there is none or AWS does not show it yet.

    Raises `CloudError` when it lacks the stack tag.
    """
    response = find("instance profile", context.account.iam.get_instance_profile, InstanceProfileName=ROLE_NAME)
    return require_ours(response["InstanceProfile"], f"instance profile {ROLE_NAME}", OURS_HINT) if response else None


def _list_policies(context: StackContext) -> list[str]:
    """Return the names of the role's policies, none when there is no role."""
    response = find("rights of the role", context.account.iam.list_role_policies, RoleName=ROLE_NAME)
    return list(response["PolicyNames"]) if response else []


def _ensure_role(context: StackContext) -> None:
    """Create the role if missing. Raises `CloudError` when a role of its name lacks the stack tag."""
    iam = context.account.iam
    response = find("role", iam.get_role, RoleName=ROLE_NAME)
    if not response:
        logger.info(f"creating role {ROLE_NAME}")
        created = context.create(
            "role",
            iam.create_role,
            RoleName=ROLE_NAME,
            AssumeRolePolicyDocument=json.dumps(stack_policies.trust_policy()),
            Tags=tags.to_aws_tags(context.resource_tags()),
        )
        response = created or find("role", iam.get_role, RoleName=ROLE_NAME)
    if response:
        require_ours(response["Role"], f"role {ROLE_NAME}", OURS_HINT)


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
        profile = _find_profile(context)
        if not profile or [role["RoleName"] for role in profile["Roles"]] != [ROLE_NAME]:
            raise


def _policy_name(context: StackContext) -> str:
    return f"{ALL_REGIONS_POLICY}-{context.account.region}"


def _expected_policy(context: StackContext, file_system: str, bucket: str | None) -> stack_policies.Policy:
    return stack_policies.machine_policy(context.account.identity[0], context.account.region, file_system, bucket)


def _has_access(context: StackContext, file_system: str | None, bucket: str | None) -> bool:
    """Whether the role may use the file system and the bucket."""
    response = find(
        "rights of the role", context.account.iam.get_role_policy, RoleName=ROLE_NAME, PolicyName=_policy_name(context)
    )
    if file_system and response and response["PolicyDocument"] == _expected_policy(context, file_system, bucket):
        return True
    return ALL_REGIONS_POLICY in _list_policies(context)


@contextlib.contextmanager
def _refer_to_admin(context: StackContext, problem: str) -> Iterator[None]:
    """Raise a missing permission of the block as a `CloudError` that says what an admin must do."""
    try:
        yield
    except CloudError as error:
        if error.code not in DENIED_CODES:
            raise
        reason = f"{error}; " if OTHER_POLICY.search(str(error)) else ""
        hint = ADMIN_HINT.format(context.account.region)
        raise CloudError(f"{reason}role {ROLE_NAME} {problem}; {hint}", error.code) from error
