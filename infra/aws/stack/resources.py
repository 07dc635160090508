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
from infra.aws.client import Account, call, call_soon
from infra.aws.errors import DENIED, REACTIONS, CloudError, Reaction
from infra.aws.journal import Journal

NAME = "imgnet"  # of all that has a name
SETTLE = 3.0  # seconds; longer than any two who both saw nothing need to make theirs
SEEN_SECONDS = 60.0  # how long AWS may take to show what it has made
BUSY_SECONDS = 300.0  # how long something may stay in use that is to end
EACH = 2.0
THERE, GONE = (Reaction.THERE,), (Reaction.GONE, Reaction.LATER)
Answer = TypeVar("Answer")
Thing = dict[str, Any]


def nobody(line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Work:
    """What all steps on a stack share: the account, who is told, where intents are written."""

    account: Account
    say: Callable[[str], None] = nobody
    journal: Journal | None = None
    left: list[str] = field(default_factory=list)  # what could not be ended, a line each

    def tags(self, **more: str) -> dict[str, str]:
        """Return the tags of what is made now."""
        return {aws_tags.STACK: aws_tags.OURS, aws_tags.OWNER: self.account.owner, aws_tags.NAME: NAME, **more}

    def specifications(self, kind: str) -> list[Thing]:
        """Return the TagSpecifications of a call that makes one thing."""
        return aws_tags.specifications([kind], self.tags())

    def make(self, what: str, function: Callable[..., Answer], /, **words: Any) -> Answer | None:
        """Make or change something; None when it is there already. Raises `CloudError`, `OSError` of the journal."""
        self._intend(f"make {what}", words)
        again = (Reaction.LATER, Reaction.GONE)  # what it stands in was made just now
        return unless(THERE, call_soon, what, function, on=again, seconds=SEEN_SECONDS, **words)

    def drop(self, what: str, function: Callable[..., Any], /, **words: Any) -> bool:
        """End something, waiting while it is in use. False: it stays, and a line in `left` says why."""
        self._intend(f"remove {what}", words)
        try:
            unless(GONE, call_soon, what, function, on=(Reaction.BUSY,), seconds=BUSY_SECONDS, **words)
        except CloudError as error:
            self.left.append(f"{what} stays: {str(error).removeprefix(f'{what}: ')}")
            return False
        return True

    def agree(
        self,
        what: str,
        look: Callable[[], list[Thing]],
        make: Callable[[], Any],
        drop: Callable[[Thing], Any],
        *,
        id: str,
        used: Callable[[Thing], bool],
    ) -> Thing:
        """Return the one thing of a kind that all take: the one in use, else the first by id. Removes idle others."""

        def sorted_look() -> list[Thing]:
            return sorted(look(), key=lambda one: (not used(one), one[id]))

        found = sorted_look()
        if not found:
            self.say(f"making {what}")
            make()
        if not found or not used(found[0]):
            time.sleep(SETTLE)
            found = until(sorted_look, f"{what} was made, and AWS does not show it", SEEN_SECONDS)
        for spare in found[1:]:
            if not used(spare):
                drop(spare)
        return found[0]

    def _intend(self, what: str, words: Mapping[str, Any]) -> None:
        if self.journal:
            facts = {name: value for name, value in words.items() if name.endswith(("Id", "Name", "Token", "Bucket"))}
            self.journal.write(what, region=self.account.region, **facts)


def unless(reactions: tuple[Reaction, ...], function: Callable[..., Answer], *args: Any, **words: Any) -> Answer | None:
    """Call, and return None when AWS answers with one of these. Raises `CloudError` otherwise."""
    try:
        return function(*args, **words)
    except CloudError as error:
        if REACTIONS.get(error.code) in reactions:
            return None
        raise


def permitted(what: str, function: Callable[..., Any], **words: Any) -> Any:
    """Call to look at something: its answer, None when it is not there, False when looking is not permitted."""
    try:
        return unless(GONE, call, what, function, **words)
    except CloudError as error:
        if error.code in DENIED:
            return False
        raise


def until(condition: Callable[[], Answer | None], late: str, seconds: float = BUSY_SECONDS) -> Answer:
    """Return what the condition gives as soon as it is true. Raises `CloudError` (`late`) after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise CloudError(f"{late} (after {seconds:g} s); type it again to go on")
        time.sleep(EACH)
    return found


def same(policy: str | Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two policies say the same, one of them perhaps as text."""
    try:
        return bool((json.loads(policy) if isinstance(policy, str) else policy) == other)
    except ValueError:
        return False


def not_ours(what: str, next: str) -> CloudError:
    """Return the refusal to touch what has our name and not our tag."""
    return CloudError(f"{what} is not ours: it has no tag {aws_tags.STACK}; {next}")
