"""What each machine of a job did when, and the job's work clock. Read from the agents' state logs in the run folder."""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from cluster.state import timeline
from cluster.state.run_folder import Run, RunFolder
from cluster.state.states import MachineState, SetupStep

ActivitySpan = tuple[MachineState, float, float]  # with begin and end in seconds
SpansByMachine = Mapping[str, Sequence[ActivitySpan]]


def drawn_state(state: MachineState) -> MachineState:
    """Return the state as which the chart of machines shows a state: what comes before the training is SETUP."""
    if state in (MachineState.TRAINING, MachineState.VALIDATING, MachineState.LOST):
        return state
    is_starting = state != MachineState.WAITING and str(state) in {*map(str, SetupStep)}
    return MachineState.SETUP if is_starting else MachineState.WAITING


def machine_activity(run: Run, attempts: Sequence[timeline.AttemptRow]) -> SpansByMachine:
    """Return the activity of each machine. Seconds are of the wall clock.

    A machine is LOST from when it was gone until it came back, or until the job's end if it is not in the last attempt.
    """
    spans_by_machine = {
        name: [(drawn_state(state), begin, end) for state, begin, end in timeline.state_spans(run.folder, name)]
        for name in run.spec.machine_names
    }
    memberships = [row.machines for row in attempts if row.machines]
    job_end = max((end for spans in spans_by_machine.values() for *_, end in spans), default=0.0)
    for name, spans in spans_by_machine.items():
        was_member = any(name in names for names in memberships)
        if spans and was_member and name not in memberships[-1] and spans[-1][2] < job_end:
            spans.append((MachineState.LOST, spans[-1][2], job_end))
    return spans_by_machine


class WorkClock:
    """Clock of the time in which a job was at work: the time between a stop and a resume is left out."""

    def __init__(self, spans_by_machine: SpansByMachine, start_time: float = 0.0) -> None:
        """Count the time in which at least one machine has an activity other than LOST.

        Without any activity, the clock runs from `start_time` until now.
        """
        active_spans = sorted(
            (begin, end)
            for spans in spans_by_machine.values()
            for state, begin, end in spans
            if state != MachineState.LOST
        )
        intervals: list[list[float]] = []
        for begin, end in active_spans:
            if intervals and begin <= intervals[-1][1]:
                intervals[-1][1] = max(intervals[-1][1], end)
            else:
                intervals.append([begin, end])
        self.busy_intervals = intervals or [[start_time, max(start_time, time.time())]]
        self.seconds_before_interval = [0.0, *accumulate(end - begin for begin, end in self.busy_intervals)]

    def seconds_at(self, timestamp: float) -> float:
        """Return the seconds at work until a moment of the wall clock."""
        index = bisect_right(self.busy_intervals, timestamp, key=lambda interval: interval[0]) - 1
        if index < 0:
            return 0.0
        begin, end = self.busy_intervals[index]
        return self.seconds_before_interval[index] + min(timestamp, end) - begin

    @property
    def start_time(self) -> float:
        """The moment at which the work began."""
        return self.busy_intervals[0][0]


def machine_losses(run_folder: RunFolder, spans_by_machine: SpansByMachine) -> list[tuple[str, float]]:
    """Return (machine, moment) of each loss: of an agent without which the next attempt of the launch goes on.

    A new agent may have the place of the lost one already. The moment is when the machine was last alive, or else when
    the next attempt was agreed on.
    """
    moved = timeline.moved_launches(run_folder)
    attempts = [attempt for attempt in run_folder.attempts.all() if attempt.members]
    losses = []
    for attempt, next_attempt in pairwise(attempts):
        launch_id, next_launch_id = (moved.get(each.launch_id, each.launch_id) for each in (attempt, next_attempt))
        for member, name in zip(attempt.members, attempt.machine_names, strict=True):
            if next_launch_id == launch_id and member not in next_attempt.members:
                moments = [
                    begin
                    for state, begin, _ in spans_by_machine.get(name, ())
                    if state == MachineState.LOST and attempt.time - 1 <= begin <= next_attempt.time + 1
                ]
                losses.append((name, moments[-1] if moments else next_attempt.time))
    return losses
