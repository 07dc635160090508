"""Who ended the machines of a launch: EC2, which takes them away, or somebody who wants no others in their place."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from infra.aws.journal import Journal


def by_hand(journal: Journal, grants: Iterable[Mapping[str, Any]]) -> str:
    """Return how the last machines of a launch were ended, "" when it was EC2 or we ourselves: then others may come.

    From another computer, in the console, or by their own limit: whoever did that does not want others. Those that
    ended last tell, for EC2 may have taken one away before, in whose place none came. `grants` are the launch's lines
    of machines that came.
    """
    released = {id for line in journal.lines("release", "end") for id in line["ids"]}
    last = {one["name"]: one["id"] for line in grants for one in line["machines"]}
    known = {line["id"]: (line["ended"], line["why"]) for line in journal.lines("gone")}
    forgotten = (math.inf, "Client.InstanceInitiatedShutdown")  # an hour or more ago, with nobody to see it
    _, why = max((known.get(id, forgotten) for id in last.values() if id not in released), default=(0.0, ""))
    if not why.startswith("Client."):
        return ""
    if "InstanceInitiated" in why:
        return "its machines were ended by their own limit, or when it was done"
    return "its machines were ended by somebody (down, or the AWS console)"
