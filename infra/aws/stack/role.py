"""What the machines may do: one role for all regions, with a policy for each, and the instance profile that carries it.

Who may not look at roles can still launch: then the role is taken as there, and EC2 says so if it is not.
"""

import json

from infra.aws import tags
from infra.aws.errors import DENIED, CloudError

from . import policies as stack_policies
from .resources import Thing, Work, not_ours, permitted, same

ROLE = stack_policies.ROLE  # of the instance profile too
EVERYWHERE = "imgnet"  # the name of a policy that an admin has made for all regions
UNSEEN = "role: cannot be looked at"
ADMIN = "an admin types once: imgnet-cluster up --region {}, or makes it from: imgnet-cluster check --iam"


def missing(work: Work, file_system: str | None, bucket: str | None) -> list[str]:
    """Return what is missing of the role, a short line each. Raises `CloudError` when it is not ours."""
    profile = permitted("the machines' role", work.account.iam.get_instance_profile, InstanceProfileName=ROLE)
    if profile is False:
        return [UNSEEN]
    if not profile or not _ours(profile["InstanceProfile"], "instance profile")["Roles"]:
        return [f"role {ROLE} and its instance profile"]
    allowed = _allowed(work, file_system, bucket)
    return [] if allowed or allowed is None else [f"rights of role {ROLE} in {work.account.region}"]


def ensure(work: Work) -> None:
    """Make the role and its instance profile. Raises `CloudError`: with what an admin must do, where that is it."""
    iam, new = work.account.iam, {"Path": "/", "Tags": tags.pairs(work.tags())}
    profile = permitted("the machines' role", iam.get_instance_profile, InstanceProfileName=ROLE)
    if profile is False:
        return work.say(f"{UNSEEN}, taken as there")
    if profile and _ours(profile["InstanceProfile"], "instance profile")["Roles"]:
        return None
    try:
        _role(work)
        if not profile:
            work.make("instance profile", iam.create_instance_profile, InstanceProfileName=ROLE, **new)
        _ours(_profile(work), "instance profile")
        _join(work)
    except CloudError as error:
        raise _for_admin(error, work, "is not there, and you may not make it") from error
    return None


def allow(work: Work, file_system: str, bucket: str | None) -> None:
    """Let the role use a file system, and a bucket. Raises `CloudError`."""
    if _allowed(work, file_system, bucket) is False:
        document = json.dumps(_wanted(work, file_system, bucket))
        words = {"RoleName": ROLE, "PolicyName": _name(work), "PolicyDocument": document}
        try:
            work.make(f"rights of role {ROLE}", work.account.iam.put_role_policy, **words)
        except CloudError as error:
            raise _for_admin(error, work, f"may not use {file_system}, and you may not change that") from error


def remove(work: Work) -> None:
    """Take this region's rights away, and the role with the last of them."""
    iam = work.account.iam
    names = permitted("role", iam.list_role_policies, RoleName=ROLE)
    role = permitted("role", iam.get_role, RoleName=ROLE)
    profile = permitted("role", iam.get_instance_profile, InstanceProfileName=ROLE)
    if False in (names, role, profile):
        return work.left.append(f"role {ROLE} (free) is not looked at: you may not")
    mine = bool(role) and tags.ours(role["Role"])
    policies = names["PolicyNames"] if names and mine else []
    if _name(work) in policies:
        work.drop(f"rights of role {ROLE}", iam.delete_role_policy, RoleName=ROLE, PolicyName=_name(work))
    if [one for one in policies if one != _name(work)]:
        return None  # other regions use it
    if profile and tags.ours(profile["InstanceProfile"]):
        for one in profile["InstanceProfile"]["Roles"]:
            words = {"InstanceProfileName": ROLE, "RoleName": one["RoleName"]}
            work.drop("role in the instance profile", iam.remove_role_from_instance_profile, **words)
        work.drop(f"instance profile {ROLE} (free)", iam.delete_instance_profile, InstanceProfileName=ROLE)
    if mine:
        work.drop(f"role {ROLE} (free)", iam.delete_role, RoleName=ROLE)
    return None


# --- the parts -------------------------------------------------------------------------------------------------------


def _ours(one: Thing, kind: str) -> Thing:
    if not tags.ours(one):
        raise not_ours(f"{kind} {ROLE}", "remove it, or give it this tag with the value imgnet")
    return one


def _profile(work: Work) -> Thing:
    found = permitted("instance profile", work.account.iam.get_instance_profile, InstanceProfileName=ROLE)
    return dict(found["InstanceProfile"]) if found else {"Tags": tags.pairs(work.tags()), "Roles": []}


def _role(work: Work) -> None:
    """Make the role, unless there is one of ours."""
    iam = work.account.iam
    found = permitted("role", iam.get_role, RoleName=ROLE)
    if not found:
        work.say(f"making role {ROLE}")
        trust = json.dumps(stack_policies.for_trust())
        words = {"RoleName": ROLE, "AssumeRolePolicyDocument": trust, "Tags": tags.pairs(work.tags())}
        found = work.make("role", iam.create_role, **words) or permitted("role", iam.get_role, RoleName=ROLE)
    if found:
        _ours(found["Role"], "role")


def _join(work: Work) -> None:
    words = {"InstanceProfileName": ROLE, "RoleName": ROLE}
    try:
        work.make("role in the instance profile", work.account.iam.add_role_to_instance_profile, **words)
    except CloudError:  # it holds one role at most: perhaps somebody else has just put it there
        if [one["RoleName"] for one in _profile(work)["Roles"]] != [ROLE]:
            raise


def _name(work: Work) -> str:
    return f"{EVERYWHERE}-{work.account.region}"


def _wanted(work: Work, file_system: str, bucket: str | None) -> Thing:
    return stack_policies.for_machines(work.account.identity[0], work.account.region, file_system, bucket)


def _allowed(work: Work, file_system: str | None, bucket: str | None) -> bool | None:
    """Whether the role may use them; None when that cannot be looked at."""
    iam, words = work.account.iam, {"RoleName": ROLE, "PolicyName": _name(work)}
    found = permitted("rights of the role", iam.get_role_policy, **words)
    if file_system and found and same(found["PolicyDocument"], _wanted(work, file_system, bucket)):
        return True
    names = permitted("rights of the role", iam.list_role_policies, RoleName=ROLE)
    if False in (found, names):
        return None
    return bool(names) and EVERYWHERE in names["PolicyNames"]


def _for_admin(error: CloudError, work: Work, what: str) -> CloudError:
    if error.code not in DENIED:
        return error
    return CloudError(f"role {ROLE} {what}; {ADMIN.format(work.account.region)}", error.code)
