"""What the machines may do: one role for all regions, with a policy for each, and the instance profile that carries it.

Who may not look at roles can still launch: then the role is taken as there, and EC2 says so if it is not.
"""

import json

from infra.aws import tags
from infra.aws.errors import DENIED_CODES, CloudError

from . import policies as stack_policies
from .resources import Resource, StackContext, call_if_permitted, is_same_policy, not_ours_error

ROLE_NAME = stack_policies.ROLE_NAME  # of the instance profile too
ALL_REGIONS_POLICY = "imgnet"  # the name of a policy that an admin has made for all regions
ROLE_UNREADABLE = "role: cannot be looked at"
ADMIN_HINT = "an admin types once: imgnet-cluster up --region {}, or makes it from: imgnet-cluster check --iam"


def missing_parts(context: StackContext, file_system: str | None, bucket: str | None) -> list[str]:
    """Return what is missing of the role, a short line each. Raises `CloudError` when it is not ours."""
    profile = call_if_permitted(
        "the machines' role", context.account.iam.get_instance_profile, InstanceProfileName=ROLE_NAME
    )
    if profile is False:
        return [ROLE_UNREADABLE]
    if not profile or not _require_ours(profile["InstanceProfile"], "instance profile")["Roles"]:
        return [f"role {ROLE_NAME} and its instance profile"]
    allowed = _has_access(context, file_system, bucket)
    return [] if allowed or allowed is None else [f"rights of role {ROLE_NAME} in {context.account.region}"]


def ensure(context: StackContext) -> None:
    """Make the role and its instance profile. Raises `CloudError`: with what an admin must do, where that is it."""
    iam, new = context.account.iam, {"Path": "/", "Tags": tags.to_aws_tags(context.resource_tags())}
    profile = call_if_permitted("the machines' role", iam.get_instance_profile, InstanceProfileName=ROLE_NAME)
    if profile is False:
        return context.log(f"{ROLE_UNREADABLE}, taken as there")
    if profile and _require_ours(profile["InstanceProfile"], "instance profile")["Roles"]:
        return None
    try:
        _ensure_role(context)
        if not profile:
            context.create("instance profile", iam.create_instance_profile, InstanceProfileName=ROLE_NAME, **new)
        _require_ours(_get_profile(context), "instance profile")
        _add_role_to_profile(context)
    except CloudError as error:
        raise _admin_error(error, context, "is not there, and you may not make it") from error
    return None


def grant_access(context: StackContext, file_system: str, bucket: str | None) -> None:
    """Let the role use a file system, and a bucket. Raises `CloudError`."""
    if _has_access(context, file_system, bucket) is False:
        document = json.dumps(_expected_policy(context, file_system, bucket))
        words = {"RoleName": ROLE_NAME, "PolicyName": _policy_name(context), "PolicyDocument": document}
        try:
            context.create(f"rights of role {ROLE_NAME}", context.account.iam.put_role_policy, **words)
        except CloudError as error:
            raise _admin_error(error, context, f"may not use {file_system}, and you may not change that") from error


def remove(context: StackContext) -> None:
    """Take this region's rights away, and the role with the last of them."""
    iam = context.account.iam
    names = call_if_permitted("role", iam.list_role_policies, RoleName=ROLE_NAME)
    role = call_if_permitted("role", iam.get_role, RoleName=ROLE_NAME)
    profile = call_if_permitted("role", iam.get_instance_profile, InstanceProfileName=ROLE_NAME)
    if False in (names, role, profile):
        return context.leftovers.append(f"role {ROLE_NAME} (free) is not looked at: you may not")
    mine = bool(role) and tags.is_ours(role["Role"])
    policies = names["PolicyNames"] if names and mine else []
    if _policy_name(context) in policies:
        context.delete(
            f"rights of role {ROLE_NAME}", iam.delete_role_policy, RoleName=ROLE_NAME, PolicyName=_policy_name(context)
        )
    if [one for one in policies if one != _policy_name(context)]:
        return None  # other regions use it
    if profile and tags.is_ours(profile["InstanceProfile"]):
        for one in profile["InstanceProfile"]["Roles"]:
            words = {"InstanceProfileName": ROLE_NAME, "RoleName": one["RoleName"]}
            context.delete("role in the instance profile", iam.remove_role_from_instance_profile, **words)
        context.delete(
            f"instance profile {ROLE_NAME} (free)", iam.delete_instance_profile, InstanceProfileName=ROLE_NAME
        )
    if mine:
        context.delete(f"role {ROLE_NAME} (free)", iam.delete_role, RoleName=ROLE_NAME)
    return None


# --- the parts -------------------------------------------------------------------------------------------------------


def _require_ours(resource: Resource, kind: str) -> Resource:
    if not tags.is_ours(resource):
        raise not_ours_error(f"{kind} {ROLE_NAME}", "remove it, or give it this tag with the value imgnet")
    return resource


def _get_profile(context: StackContext) -> Resource:
    found = call_if_permitted(
        "instance profile", context.account.iam.get_instance_profile, InstanceProfileName=ROLE_NAME
    )
    return dict(found["InstanceProfile"]) if found else {"Tags": tags.to_aws_tags(context.resource_tags()), "Roles": []}


def _ensure_role(context: StackContext) -> None:
    """Make the role, unless there is one of ours."""
    iam = context.account.iam
    found = call_if_permitted("role", iam.get_role, RoleName=ROLE_NAME)
    if not found:
        context.log(f"making role {ROLE_NAME}")
        trust = json.dumps(stack_policies.trust_policy())
        words = {
            "RoleName": ROLE_NAME,
            "AssumeRolePolicyDocument": trust,
            "Tags": tags.to_aws_tags(context.resource_tags()),
        }
        found = context.create("role", iam.create_role, **words) or call_if_permitted(
            "role", iam.get_role, RoleName=ROLE_NAME
        )
    if found:
        _require_ours(found["Role"], "role")


def _add_role_to_profile(context: StackContext) -> None:
    words = {"InstanceProfileName": ROLE_NAME, "RoleName": ROLE_NAME}
    try:
        context.create("role in the instance profile", context.account.iam.add_role_to_instance_profile, **words)
    except CloudError:  # it holds one role at most: perhaps somebody else has just put it there
        if [one["RoleName"] for one in _get_profile(context)["Roles"]] != [ROLE_NAME]:
            raise


def _policy_name(context: StackContext) -> str:
    return f"{ALL_REGIONS_POLICY}-{context.account.region}"


def _expected_policy(context: StackContext, file_system: str, bucket: str | None) -> Resource:
    return stack_policies.machine_policy(context.account.identity[0], context.account.region, file_system, bucket)


def _has_access(context: StackContext, file_system: str | None, bucket: str | None) -> bool | None:
    """Whether the role may use them; None when that cannot be looked at."""
    iam, words = context.account.iam, {"RoleName": ROLE_NAME, "PolicyName": _policy_name(context)}
    found = call_if_permitted("rights of the role", iam.get_role_policy, **words)
    if (
        file_system
        and found
        and is_same_policy(found["PolicyDocument"], _expected_policy(context, file_system, bucket))
    ):
        return True
    names = call_if_permitted("rights of the role", iam.list_role_policies, RoleName=ROLE_NAME)
    if False in (found, names):
        return None
    return bool(names) and ALL_REGIONS_POLICY in names["PolicyNames"]


def _admin_error(error: CloudError, context: StackContext, problem: str) -> CloudError:
    if error.code not in DENIED_CODES:
        return error
    return CloudError(f"role {ROLE_NAME} {problem}; {ADMIN_HINT.format(context.account.region)}", error.code)
