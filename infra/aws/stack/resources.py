"""To make and to end what belongs to a stack, so that a second person, a lost answer or a crash does no harm.

Most of it cannot be made with a client token. What has a name of its own is made and, when AWS says that it is there,
looked at. What has none (a network, a gateway, a route table) is agreed on: whoever has made one, or sees one that is
not in use, waits a little and looks again; then all see the same ones, take the same, and remove the rest.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call, call_with_retry
from infra.aws.errors import DENIED_CODES, KIND_BY_CODE, CloudError, ErrorKind
from infra.aws.journal import Journal

RESOURCE_NAME = "imgnet"  # of all that has a name
SETTLE_SECONDS = 3.0  # seconds; longer than any two who both saw nothing need to make theirs
RESOURCE_VISIBILITY_SECONDS = 60.0  # how long AWS may take to show what it has made
RESOURCE_IN_USE_SECONDS = 300.0  # how long something may stay in use that is to end
RESOURCE_POLL_SECONDS = 2.0
ALREADY_EXISTS_KINDS, NOT_FOUND_KINDS = (ErrorKind.ALREADY_EXISTS,), (ErrorKind.NOT_FOUND, ErrorKind.NOT_VISIBLE_YET)
Response = TypeVar("Response")
Resource = dict[str, Any]


def discard(line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class StackContext:
    """What all steps on a stack share: the account, who is told, where intents are written."""

    account: Account
    log: Callable[[str], None] = discard
    journal: Journal | None = None
    leftovers: list[str] = field(default_factory=list)  # what could not be ended, a line each

    def resource_tags(self, **extra_tags: str) -> dict[str, str]:
        """Return the tags of what is made now."""
        return {
            aws_tags.STACK: aws_tags.STACK_VALUE,
            aws_tags.OWNER: self.account.owner,
            aws_tags.NAME: RESOURCE_NAME,
            **extra_tags,
        }

    def tag_specifications(self, resource_type: str) -> list[Resource]:
        """Return the TagSpecifications of a call that makes one thing."""
        return aws_tags.tag_specifications([resource_type], self.resource_tags())

    def create(self, label: str, function: Callable[..., Response], /, **params: Any) -> Response | None:
        """Make or change something; None when it is there already. Raises `CloudError`, `OSError` of the journal."""
        self._record_intent(f"make {label}", params)
        again = (ErrorKind.NOT_VISIBLE_YET, ErrorKind.NOT_FOUND)  # what it stands in was made just now
        return ignore_errors(
            ALREADY_EXISTS_KINDS,
            call_with_retry,
            label,
            function,
            retry_on=again,
            timeout_seconds=RESOURCE_VISIBILITY_SECONDS,
            **params,
        )

    def delete(self, label: str, function: Callable[..., Any], /, **params: Any) -> bool:
        """End something, waiting while it is in use. False: it stays, and a line in `left` says why."""
        self._record_intent(f"remove {label}", params)
        try:
            ignore_errors(
                NOT_FOUND_KINDS,
                call_with_retry,
                label,
                function,
                retry_on=(ErrorKind.IN_USE,),
                timeout_seconds=RESOURCE_IN_USE_SECONDS,
                **params,
            )
        except CloudError as error:
            self.leftovers.append(f"{label} stays: {str(error).removeprefix(f'{label}: ')}")
            return False
        return True

    def ensure_single(
        self,
        label: str,
        list_existing: Callable[[], list[Resource]],
        create: Callable[[], Any],
        delete: Callable[[Resource], Any],
        *,
        id_key: str,
        is_used: Callable[[Resource], bool],
    ) -> Resource:
        """Return the one thing of a kind that all take: the one in use, else the first by id. Removes idle others."""

        def sorted_look() -> list[Resource]:
            return sorted(list_existing(), key=lambda one: (not is_used(one), one[id_key]))

        found = sorted_look()
        if not found:
            self.log(f"making {label}")
            create()
        if not found or not is_used(found[0]):
            time.sleep(SETTLE_SECONDS)
            found = wait_for(sorted_look, f"{label} was made, and AWS does not show it", RESOURCE_VISIBILITY_SECONDS)
        for spare in found[1:]:
            if not is_used(spare):
                delete(spare)
        return found[0]

    def _record_intent(self, intent: str, params: Mapping[str, Any]) -> None:
        if self.journal:
            facts = {name: value for name, value in params.items() if name.endswith(("Id", "Name", "Token", "Bucket"))}
            self.journal.write(intent, region=self.account.region, **facts)


def ignore_errors(
    ignored_kinds: tuple[ErrorKind, ...], function: Callable[..., Response], *args: Any, **params: Any
) -> Response | None:
    """Call, and return None when AWS answers with one of these. Raises `CloudError` otherwise."""
    try:
        return function(*args, **params)
    except CloudError as error:
        if KIND_BY_CODE.get(error.code) in ignored_kinds:
            return None
        raise


def call_if_permitted(action: str, function: Callable[..., Any], **params: Any) -> Any:
    """Call to look at something: its answer, None when it is not there, False when looking is not permitted."""
    try:
        return ignore_errors(NOT_FOUND_KINDS, call, action, function, **params)
    except CloudError as error:
        if error.code in DENIED_CODES:
            return False
        raise


def wait_for(
    condition: Callable[[], Response | None], timeout_message: str, timeout_seconds: float = RESOURCE_IN_USE_SECONDS
) -> Response:
    """Return what the condition gives as soon as it is true. Raises `CloudError` (`late`) after so many seconds."""
    deadline = time.monotonic() + timeout_seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise CloudError(f"{timeout_message} (after {timeout_seconds:g} s); type it again to go on")
        time.sleep(RESOURCE_POLL_SECONDS)
    return found


def is_same_policy(policy: str | Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two policies say the same, one of them perhaps as text."""
    try:
        return bool((json.loads(policy) if isinstance(policy, str) else policy) == other)
    except ValueError:
        return False


def not_ours_error(label: str, next_step: str) -> CloudError:
    """Return the refusal to touch what has our name and not our tag."""
    return CloudError(f"{label} is not ours: it has no tag {aws_tags.STACK}; {next_step}")
