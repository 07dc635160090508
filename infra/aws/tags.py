"""Tags of every resource that this project creates, set in the creating call.

Tags are the source of truth about what exists. A journal records intents only. A user may add tags to ours (`--tag`),
as organizations demand. Source of the limits: AWS, "Tag your Amazon EC2 resources". EFS and IAM restrict the
characters, and IAM takes no two keys that differ only in case.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

STACK = "imgnet:stack"
JOB = "imgnet:job"
MACHINE = "imgnet:machine"  # the name "3"; "0-15" from the launch of several machines until each has its name
OWNER = "imgnet:owner"
LAUNCH = "imgnet:launch"
EXPIRES = "imgnet:expires"
# A computer with the same credentials adopts a job by these tags. Machines cannot write tags.
BOOT_KEY = "imgnet:boot-key"  # the public host key with which a machine boots
HOST_KEY = "imgnet:host-key"  # the public host key that it has generated since
SSH_FROM = "imgnet:ssh-from"  # the address range of the computer that supervises the job
TERMS = "imgnet:terms"  # what the job may rent and spend, in the form of its backend
NAME = "Name"
STACK_VALUE = "imgnet"  # the value of STACK: one stack for each region
OWN_PREFIX = "imgnet:"
MAX_KEY_CHARACTERS = 128
MAX_VALUE_CHARACTERS = 256
MAX_USER_TAGS = 39  # AWS takes 50; a machine has eleven of ours
FORBIDDEN_CHARACTER = re.compile(r"[^\w .:/=+@-]")

Tags = Mapping[str, str]
Resource = dict[str, Any]  # a resource as AWS describes it or takes it, key by key: boto3 ships no types


def _parse_user_tag(text: str) -> tuple[str, str]:
    """Return key and value of a user's tag KEY=VALUE. Raises `ValueError` for one that AWS would refuse or we use."""
    key, separator, value = text.partition("=")
    problem = ""
    if not separator or not key.strip():
        problem = "it is not of the form KEY=VALUE"
    elif len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS:
        problem = f"AWS takes keys of {MAX_KEY_CHARACTERS} characters, and values of {MAX_VALUE_CHARACTERS}"
    elif key.lower().startswith("aws:"):
        problem = "keys that begin with aws: are AWS's own"
    elif key.lower().startswith(OWN_PREFIX) or key.lower() == NAME.lower():
        problem = f"imgnet-cluster itself sets {NAME}, and keys that begin with {OWN_PREFIX}"
    elif forbidden := FORBIDDEN_CHARACTER.search(text):
        problem = f"AWS takes no {forbidden[0]!r} in tags, only letters, digits, spaces and _ . : / = + - @"
    if problem:
        shown = text if len(text) < 100 else f"{text[:97]}..."
        raise ValueError(f"{shown!r}: {problem}.")
    return key, value


def parse_user_tags(texts: Sequence[str]) -> dict[str, str]:
    """Parse a user's tags, each given as KEY=VALUE. Raises `ValueError` for those that AWS would refuse or we use."""
    user_tags: dict[str, str] = {}
    for key, value in map(_parse_user_tag, texts):
        if key.lower() in (other.lower() for other in user_tags):
            raise ValueError(f"the key {key!r} is given twice; AWS's IAM ignores case in keys.")
        user_tags[key] = value
    if len(user_tags) > MAX_USER_TAGS:
        raise ValueError(f"{len(user_tags)} tags; at most {MAX_USER_TAGS} are possible beside those of imgnet-cluster.")
    return user_tags


def job_tags(uid: str, name: str, owner: str, expires: float, user_tags: Tags) -> dict[str, str]:
    """Return the tags of everything that is rented for a job. `expires` is in seconds since 1970."""
    return {
        **user_tags,
        STACK: STACK_VALUE,
        JOB: uid,
        OWNER: owner,
        EXPIRES: format_time(expires),
        NAME: f"imgnet {name}",
    }


def select_user_tags(tags: Tags) -> dict[str, str]:
    """Return those of a resource's tags that its user gave: neither ours nor AWS's."""
    return {key: value for key, value in tags.items() if key != NAME and not key.startswith((OWN_PREFIX, "aws:"))}


def to_aws_tags(tags: Tags) -> list[dict[str, str]]:
    """Return tags as AWS takes them: a list of Key and Value."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def read_tags(resource: Resource) -> dict[str, str]:
    """Return the tags in AWS's description of a resource."""
    tags: list[dict[str, str]] = resource.get("Tags") or resource.get("TagSet") or []  # S3 calls them TagSet
    return {tag["Key"]: tag["Value"] for tag in tags}


def tag_specifications(resource_types: Iterable[str], tags: Tags) -> list[Resource]:
    """Return the TagSpecifications of a creating call, the same tags for each resource type that it creates."""
    return [{"ResourceType": resource_type, "Tags": to_aws_tags(tags)} for resource_type in resource_types]


def make_filters(tags: Tags, **extra_filters: Sequence[str]) -> list[Resource]:
    """Return the Filters that select resources with these tags.

    `extra_filters` are other filters, written with _ for -: `vpc_id=["vpc-1"]`.
    """
    filters: list[Resource] = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
    for name, values in extra_filters.items():
        filters.append({"Name": name.replace("_", "-"), "Values": list(values)})
    return filters


def is_ours(resource: Resource) -> bool:
    """Whether a resource has the stack tag. Without it another program created the resource, whatever its name."""
    return read_tags(resource).get(STACK) == STACK_VALUE


def format_time(time: float) -> str:
    """Return a time in seconds since 1970 as a tag value: 2026-11-21T20:00:00Z."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float | None:
    """Return the seconds since 1970 of a tag value that `format_time` wrote, None when it is something else."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
