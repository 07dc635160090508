"""What each machine of a job did when, and the job's own clock. Read from the agents' logs at home."""

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from cluster.state.run_folder import RunFolder
from cluster.state.timeline import FINAL_AGENT_STATES, state_changes

ABSENT_STATES = ("gone", "left")
ACTIVITY_BY_STATE = {  # of an agent's states, as they are drawn
    "setup": "getting ready", "fetching": "getting ready", "indexing": "getting ready", "warming": "getting ready",
    "starting": "getting ready", "joining": "getting ready", "training": "training", "validating": "validating",
    "waiting": "waiting", "saved": "waiting", "failed": "waiting", "stopping": "waiting",
}  # fmt: skip
ActivitySpan = tuple[str, float, float]  # kind, begin and end in seconds of the wall clock
SpansByMachine = dict[str, list[ActivitySpan]]


def machine_activity(folders: RunFolder, names: Sequence[str]) -> SpansByMachine:
    """Return the spans of each machine; "lost" from when it was gone until it came back."""
    return {name: list(_machine_spans(folders, name)) for name in names}


def _machine_spans(folders: RunFolder, name: str) -> Iterable[ActivitySpan]:
    for (state, begin), (following, end) in pairwise(state_changes(folders, name)):
        cut = (
            following == "setup" and state not in FINAL_AGENT_STATES
        )  # by another agent, and nobody knows when the first one ended
        kind = (
            "lost"
            if state in ABSENT_STATES or cut
            else ""
            if state in FINAL_AGENT_STATES
            else ACTIVITY_BY_STATE.get(state, "waiting")
        )
        if kind and end > begin:
            yield kind, begin, end


class WorkClock:
    """Seconds for which a job was at work until a moment: the time between two launches is left out."""

    def __init__(self, spans_by_machine: Mapping[str, Sequence[ActivitySpan]], start_time: float | None = None) -> None:
        """Of these lives; without any the clock simply goes on from `first`."""
        merged: list[list[float]] = []
        for begin, end in sorted(
            (one[1], one[2]) for some in spans_by_machine.values() for one in some if one[0] != "lost"
        ):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.busy_intervals = merged or [[start_time or 0.0, max(start_time or 0.0, time.time())]]
        self.seconds_before_interval = [0.0, *accumulate(end - begin for begin, end in self.busy_intervals)]

    def seconds_at(self, timestamp: float) -> float:
        """Return the seconds at work until a moment of the wall clock."""
        place = bisect_right(self.busy_intervals, timestamp, key=lambda one: one[0]) - 1
        if place < 0:
            return 0.0
        begin, end = self.busy_intervals[place]
        return self.seconds_before_interval[place] + min(timestamp, end) - begin

    @property
    def start_time(self) -> float:
        """The moment at which the work began."""
        return self.busy_intervals[0][0]


def machine_losses(
    timeline: Sequence[Mapping[str, Any]], spans_by_machine: Mapping[str, Sequence[ActivitySpan]]
) -> list[tuple[str, float]]:
    """Return (machine, moment) of each loss: who is not in the next attempt, when it was last alive."""
    lost = []
    for one, following in pairwise(timeline):
        if not following["machines"]:  # by which the job ended
            continue
        for name in one["machines"]:
            if name not in following["machines"]:
                before = [
                    end
                    for kind, _, end in spans_by_machine.get(name, ())
                    if kind != "lost" and end <= following["at"] + 1
                ]
                lost.append((name, max(before, default=following["at"])))
    return lost


def extend_losses_to_job_end(spans_by_machine: SpansByMachine, timeline: Sequence[Mapping[str, Any]]) -> SpansByMachine:
    """Return the lives with "lost" to the job's end for machines that the last attempt goes on without."""
    members: list[str] = next((one["machines"] for one in reversed(timeline) if one["machines"]), [])
    once = {name for one in timeline for name in one["machines"]}
    end = max((one[2] for some in spans_by_machine.values() for one in some), default=0.0)
    gone = [
        name for name, some in spans_by_machine.items() if some and name in once - set(members) and some[-1][2] < end
    ]
    return spans_by_machine | {
        name: [*spans_by_machine[name], ("lost", spans_by_machine[name][-1][2], end)] for name in gone
    }
