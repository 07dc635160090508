"""Idempotent create and delete helpers for the resources of a stack.

They are safe against a second person who does the same at the same time, a lost response, and a crash. Most stack
resources cannot be created with a client token. For those with a unique name, AWS reports a duplicate, and the caller
checks whose resource it is. Resources without a name (VPC, internet gateway, route table) are agreed on: a process
that created one, or that sees only unused ones, waits `SETTLE_SECONDS` and lists them again. Then all processes see
the same list, choose the same resource, and delete the unused others.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from infra.aws import tags as aws_tags
from infra.aws.client import Account, call, call_with_retry
from infra.aws.error_codes import KIND_BY_CODE, ErrorKind
from infra.aws.journal import Journal
from infra.aws.journal_events import StackChange
from infra.aws.tags import Resource
from infra.errors import CloudError

logger = logging.getLogger(__name__)

RESOURCE_NAME = "imgnet"  # of every resource that has a name
SETTLE_SECONDS = 3.0  # longer than two processes that both saw no resource need to create theirs
RESOURCE_VISIBILITY_SECONDS = 60.0  # how long AWS may take to show a new resource
RESOURCE_IN_USE_SECONDS = 300.0  # how long a resource that is to be deleted may stay in use
RESOURCE_POLL_SECONDS = 2.0
ALREADY_EXISTS_KINDS = (ErrorKind.ALREADY_EXISTS,)
NOT_FOUND_KINDS = (ErrorKind.NOT_FOUND, ErrorKind.NOT_VISIBLE_YET)
Response = TypeVar("Response")


@dataclass(frozen=True)
class StackContext:
    """What all operations on a stack share: account, journal of intents, list of leftovers."""

    account: Account
    journal: Journal | None = None
    user_tags: aws_tags.Tags = field(default_factory=dict)  # of new resources, beside ours
    leftovers: list[str] = field(default_factory=list)  # a line for each resource that could not be deleted

    def resource_tags(self) -> dict[str, str]:
        """Return the tags of a new resource."""
        return {
            **self.user_tags,
            aws_tags.STACK: aws_tags.STACK_VALUE,
            aws_tags.OWNER: self.account.owner,
            aws_tags.NAME: RESOURCE_NAME,
        }

    def tag_specifications(self, resource_type: str) -> list[Resource]:
        """Return the TagSpecifications of a call that creates one resource."""
        return aws_tags.tag_specifications([resource_type], self.resource_tags())

    def create(self, label: str, function: Callable[..., Response], /, **params: object) -> Response | None:
        """Create or change a resource; return None when it exists already.

        Raises `CloudError`; `OSError` when the journal cannot be written.
        """
        self._record_intent(f"make {label}", params)
        return ignore_errors(
            ALREADY_EXISTS_KINDS,
            call_with_retry,
            label,
            function,
            retry_on=NOT_FOUND_KINDS,  # the resource that contains this one was created just now
            timeout_seconds=RESOURCE_VISIBILITY_SECONDS,
            **params,
        )

    def delete(self, label: str, function: Callable[..., object], /, **params: object) -> bool:
        """Delete a resource, waiting while it is in use. On failure add a line to `leftovers` and return False."""
        self._record_intent(f"remove {label}", params)
        logger.info(f"deleting {label}")
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
        resource_type: str,
        list_existing: Callable[[], list[Resource]],
        create_function: Callable[..., object],
        delete_function: Callable[..., object],
        *,
        id_key: str,
        is_used: Callable[[Resource], bool],
        **params: object,
    ) -> Resource:
        """Return the one resource of a kind that all processes use, and delete unused others.

        Used resources come first, then the order of IDs decides. Creates a resource by `params` when there is none.
        Raises `CloudError` when AWS does not show the new resource.
        """

        def list_sorted() -> list[Resource]:
            return sorted(list_existing(), key=lambda resource: (not is_used(resource), resource[id_key]))

        resources = list_sorted()
        if not resources:
            logger.info(f"creating {label}")
            self.create(label, create_function, TagSpecifications=self.tag_specifications(resource_type), **params)
        if not resources or not is_used(resources[0]):
            time.sleep(SETTLE_SECONDS)
            resources = wait_for(
                list_sorted, f"{label} was created, but AWS does not show it", RESOURCE_VISIBILITY_SECONDS
            )
        for spare in resources[1:]:
            if not is_used(spare):
                self.delete(label, delete_function, **{id_key: spare[id_key]})
        return resources[0]

    def _record_intent(self, intent: str, params: Mapping[str, object]) -> None:
        if self.journal:
            names = {
                name: str(value) for name, value in params.items() if name.endswith(("Id", "Name", "Token", "Bucket"))
            }
            self.journal.write(StackChange(intent=intent, region=self.account.region, names=names))


def ignore_errors(
    ignored_kinds: tuple[ErrorKind, ...], function: Callable[..., Response], *args: object, **params: object
) -> Response | None:
    """Call a function, and return None on an error of the ignored kinds. Raises `CloudError` for all others."""
    try:
        return function(*args, **params)
    except CloudError as error:
        if KIND_BY_CODE.get(error.code) in ignored_kinds:
            return None
        raise


def find(action: str, function: Callable[..., Response], **params: object) -> Response | None:
    """Return the response of a describing function, None when the resource does not exist. Raises `CloudError`."""
    return ignore_errors(NOT_FOUND_KINDS, call, action, function, **params)


def wait_for(
    condition: Callable[[], Response | None],
    timeout_message: str,
    timeout_seconds: float = RESOURCE_IN_USE_SECONDS,
    pause: Callable[[float], None] | None = None,
) -> Response:
    """Return the value of `condition` as soon as it is true, and log that it is waited for.

    Raises `CloudError` after `timeout_seconds`, and what `pause` raises, which sleeps.
    """
    deadline = time.monotonic() + timeout_seconds
    is_waiting = False
    while not (value := condition()):
        if not is_waiting:
            is_waiting = True
            logger.info(f"{timeout_message}: waiting at most {timeout_seconds:.0f} s")
        if time.monotonic() > deadline:
            raise CloudError(f"{timeout_message} (after {timeout_seconds:g} s); run the same command again to go on")
        (pause or time.sleep)(RESOURCE_POLL_SECONDS)
    return value


def require_ours(resource: Resource, label: str, next_step: str) -> Resource:
    """Return a resource with the stack's name. Raises `CloudError` for one without its tag, which is never touched."""
    if not aws_tags.is_ours(resource):
        raise CloudError(f"{label} does not belong to imgnet-cluster: it has no tag {aws_tags.STACK}; {next_step}")
    return resource
