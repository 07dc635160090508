"""The tags that all we make bears, set in the very call that makes it. They are the truth; a journal is only intent."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

STACK, JOB, MACHINE, OWNER, LAUNCH, EXPIRES, NAME = (
    "imgnet:stack", "imgnet:job", "imgnet:machine", "imgnet:owner", "imgnet:launch", "imgnet:expires", "Name",
)  # fmt: skip
STACK_VALUE = "imgnet"  # the value of STACK: one stack for each region

Tags = Mapping[str, str]


def to_aws_tags(tags: Tags) -> list[dict[str, str]]:
    """Return tags as AWS wants them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def read_tags(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of what AWS has described."""
    return {one["Key"]: one["Value"] for one in resource.get("Tags") or resource.get("TagSet") or []}


def tag_specifications(resource_types: Iterable[str], tags: Tags) -> list[dict[str, Any]]:
    """Return the TagSpecifications of a creating call, for each kind of thing that it makes."""
    return [{"ResourceType": kind, "Tags": to_aws_tags(tags)} for kind in resource_types]


def make_filters(tags: Tags, **extra_filters: Sequence[str]) -> list[dict[str, Any]]:
    """Return Filters for what bears these tags; `more` are other filters, with _ for -."""
    found = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
    return found + [{"Name": name.replace("_", "-"), "Values": list(values)} for name, values in extra_filters.items()]


def is_ours(resource: Mapping[str, Any]) -> bool:
    """Whether something bears our tag: what does not is somebody else's, whatever its name."""
    return read_tags(resource).get(STACK) == STACK_VALUE


def format_time(time: float) -> str:
    """Return a moment as a tag says it: 2026-11-21T20:00:00Z."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float | None:
    """Return the seconds since 1970 that `stamp` wrote, None when it is no such text."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
