"""What each machine of a job did when, and the job's own clock. Read from the agents' logs at home."""

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from cluster.state.run_folder import Folders
from cluster.state.timeline import OVER, states

AWAY = ("gone", "left")
KINDS = {  # of an agent's states, as they are drawn
    "setup": "getting ready", "fetching": "getting ready", "indexing": "getting ready", "warming": "getting ready",
    "starting": "getting ready", "joining": "getting ready", "training": "training", "validating": "validating",
    "waiting": "waiting", "saved": "waiting", "failed": "waiting", "stopping": "waiting",
}  # fmt: skip
Span = tuple[str, float, float]  # kind, begin and end in seconds of the wall clock
Lives = dict[str, list[Span]]


def lives(folders: Folders, names: Sequence[str]) -> Lives:
    """Return the spans of each machine; "lost" from when it was gone until it came back."""
    return {name: list(_life(folders, name)) for name in names}


def _life(folders: Folders, name: str) -> Iterable[Span]:
    for (state, begin), (following, end) in pairwise(states(folders, name)):
        cut = following == "setup" and state not in OVER  # by another agent, and nobody knows when the first one ended
        kind = "lost" if state in AWAY or cut else "" if state in OVER else KINDS.get(state, "waiting")
        if kind and end > begin:
            yield kind, begin, end


class Clock:
    """Seconds for which a job was at work until a moment: the time between two launches is left out."""

    def __init__(self, found: Mapping[str, Sequence[Span]], first: float | None = None) -> None:
        """Of these lives; without any the clock simply goes on from `first`."""
        merged: list[list[float]] = []
        for begin, end in sorted((one[1], one[2]) for some in found.values() for one in some if one[0] != "lost"):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.spans = merged or [[first or 0.0, max(first or 0.0, time.time())]]
        self.before = [0.0, *accumulate(end - begin for begin, end in self.spans)]

    def at(self, moment: float) -> float:
        """Return the seconds at work until a moment of the wall clock."""
        place = bisect_right(self.spans, moment, key=lambda one: one[0]) - 1
        if place < 0:
            return 0.0
        begin, end = self.spans[place]
        return self.before[place] + min(moment, end) - begin

    @property
    def first(self) -> float:
        """The moment at which the work began."""
        return self.spans[0][0]


def losses(timeline: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Span]]) -> list[tuple[str, float]]:
    """Return (machine, moment) of each loss: who is not in the next attempt, when it was last alive."""
    lost = []
    for one, following in pairwise(timeline):
        if not following["machines"]:  # by which the job ended
            continue
        for name in one["machines"]:
            if name not in following["machines"]:
                before = [end for kind, _, end in found.get(name, ()) if kind != "lost" and end <= following["at"] + 1]
                lost.append((name, max(before, default=following["at"])))
    return lost


def until_the_end(found: Lives, timeline: Sequence[Mapping[str, Any]]) -> Lives:
    """Return the lives with "lost" to the job's end for machines that the last attempt goes on without."""
    members: list[str] = next((one["machines"] for one in reversed(timeline) if one["machines"]), [])
    once = {name for one in timeline for name in one["machines"]}
    end = max((one[2] for some in found.values() for one in some), default=0.0)
    gone = [name for name, some in found.items() if some and name in once - set(members) and some[-1][2] < end]
    return found | {name: [*found[name], ("lost", found[name][-1][2], end)] for name in gone}
