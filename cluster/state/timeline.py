"""History of a job: its attempts, their members, times, reasons, and what each change of attempt cost. Only reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from train.metrics.records import MetricsRow
from train.metrics.step_search import StepEnds, first_and_last_step, last_step_until
from train.recipe.target import CLOCK_JUMPED
from train.tools.agent_protocol import metrics_file
from train.tools.text_files import read_json_lines

from .heartbeats import StateChange, read_status
from .run_folder import RunFolder
from .states import AttemptReason, MachineState, SetupStep

# An agent in one of these states has ended.
FINAL_AGENT_STATES = (MachineState.DONE, MachineState.STOPPED, MachineState.LOST, MachineState.LEFT)


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt in the history of a job.

    `at` is when the attempt was agreed on (seconds since 1970, by the wall clock of the machine that proposed it).
    `machines` are the names of its members; the row of the job's end has none. `first_step` is the step from which it
    went on; that of a command follows from what it tells, and is None where it tells too little. `pause` is the time in
    seconds from the last step before the attempt to its own first step. `steps_lost` is the number of steps that were
    done again. Both are None before they are known, and for the first attempt; `pause` also where the clocks
    contradict. With `in_place` trainers of the attempt before kept their state.
    """

    attempt: int
    at: float
    machines: tuple[str, ...]
    reason: str
    first_step: int | None
    last_step: int | None = None
    pause: float | None = None
    steps_lost: int | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Timeline:
    """The attempts of a job, and what the changes of attempt cost.

    `lost` has begin and end (seconds since 1970) of each time in which steps were done again and, within a launch, of
    the pause before. The trainers do not know these times: their own clock goes on from the checkpoint that they were
    given. `useful_seconds` are those between the steps that count, with their validations.
    """

    rows: list[AttemptRow]
    lost: list[tuple[float, float]]
    useful_seconds: float

    @property
    def lost_seconds(self) -> float:
        """The seconds that changes of attempt cost."""
        return sum(end - begin for begin, end in self.lost)

    @property
    def goodput(self) -> float | None:
        """The share of the time from the first step to the last that was not lost; None without two steps."""
        all_seconds = self.useful_seconds + self.lost_seconds
        return self.useful_seconds / all_seconds if all_seconds else None


def read_timeline(run_folder: RunFolder, is_command: bool = False) -> Timeline:
    """Return the timeline of a job."""
    rows: list[AttemptRow] = []
    lost: list[tuple[float, float]] = []
    kept: list[KeptSteps] = []
    moved = moved_launches(run_folder)
    previous_launch = ""
    last_trained_launch = ""  # of the user
    last_step_time: float | None = None  # of the last step so far, made in that launch
    # The steps that are done: after an attempt without a step, those of the checkpoint it resumed from.
    position: int | None = 0
    for attempt in run_folder.attempts.all():
        path = metrics_file(run_folder.path, attempt.number)
        ends = first_and_last_step(path)
        first_step: int | None = attempt.first_step
        if is_command:  # not known of one that has told no step, or that counts its steps from 0 again in each epoch
            first_step = ends.first.step - 1 if ends and ends.last.images else None
        user_launch = moved.get(attempt.launch_id, attempt.launch_id)
        goes_on = user_launch == last_trained_launch  # without a stop and a resume in between
        row = AttemptRow(
            attempt=attempt.number,
            at=attempt.time,
            machines=attempt.machine_names,
            reason=attempt.reason,
            first_step=None if is_command and not rows and first_step else first_step,  # of a fresh one not yet known
            last_step=ends.last.step if ends else None,
            in_place=attempt.live_step is not None,
        )
        if last_step_time is not None and attempt.members:
            if position is not None and first_step is not None:
                row = replace(row, steps_lost=max(0, position - first_step))
            if ends and goes_on:
                pause = ends.first.time - last_step_time
                with_jump = "; ".join(filter(None, (row.reason, CLOCK_JUMPED)))
                row = replace(row, pause=pause) if pause >= 0 else replace(row, reason=with_jump)
        if attempt.launch_id in moved and attempt.launch_id != previous_launch:
            row = replace(row, reason=AttemptReason.MOVED)
        elif rows and row.reason == AttemptReason.START:
            row = replace(row, reason=AttemptReason.RESUME)
        if attempt.members and first_step is not None:
            position = first_step
        if ends:
            lost += _drop_repeated_steps(kept, first_step, ends.first.time if goes_on else None)
            kept.append(KeptSteps(path, ends, ends.last.time))
            position, last_step_time = None if first_step is None else ends.last.step, ends.last.time
            last_trained_launch = user_launch
        previous_launch = attempt.launch_id
        rows.append(row)
    return Timeline(rows, lost, sum(each.until - each.ends.first.time for each in kept))


class KeptSteps(NamedTuple):
    """An attempt of which steps count, and until when."""

    path: Path
    ends: StepEnds
    until: float


def _drop_repeated_steps(
    kept: list[KeptSteps], first_step: int | None, pause_end: float | None
) -> Iterator[tuple[float, float]]:
    """Drop from `kept` the steps from `first_step` on, which the next attempt does again; yield the times they took.

    `pause_end` is the first step of the next attempt if it is of the same launch: the pause before it is lost too.
    """
    while kept:
        path, ends, until = kept.pop()
        last_kept: MetricsRow | None = ends.last
        if first_step is not None and ends.last.images:
            last_kept = last_step_until(path, first_step)
        begin, end = (last_kept or ends.first).time, pause_end or until
        if end > begin:  # the clocks of two machines may differ
            yield begin, end
        pause_end = None
        if last_kept:  # else no step of it counts any more: the checkpoint is of an earlier attempt
            kept.append(KeptSteps(path, ends, min(begin, until)))
            return


def describe_members(names: Sequence[str]) -> str:
    """Return machines as text: "machine 0", "machines 0-7, 9"; "" for none. A bare "0" could be taken for a count."""
    ranges: list[list[str]] = []
    for name in names:
        if ranges and name.isdecimal() and ranges[-1][-1].isdecimal() and int(name) == int(ranges[-1][-1]) + 1:
            ranges[-1] = [ranges[-1][0], name]
        else:
            ranges.append([name])
    return f"machine{'s' * (len(names) > 1)} {', '.join('-'.join(ends) for ends in ranges)}" if ranges else ""


def moved_launches(run_folder: RunFolder) -> dict[str, str]:
    """Return launches that no user asked for, after the loss of all rented machines, with those they continue."""
    user_launch_ids: dict[str, str] = {}
    user_launch_id = ""
    for row in read_json_lines(run_folder.journal_path, "what", "launch_id"):
        if row["what"] == "LaunchMoved":
            user_launch_ids[str(row["launch_id"])] = user_launch_id
        else:
            user_launch_id = str(row["launch_id"])
    return user_launch_ids


def state_changes(run_folder: RunFolder, machine: str) -> list[tuple[MachineState, float]]:
    """Return the states of a machine's agents, and when each began.

    A last state that is not final is followed by LOST at the last heartbeat, which is recent if the agent lives.
    """
    changes = [(change.state, change.time) for change in run_folder.state_log(machine)]
    if changes and changes[-1][0] not in (*FINAL_AGENT_STATES, MachineState.FAILED):
        status = read_status(run_folder.status_path(machine))
        changes.append((MachineState.LOST, max(changes[-1][1], status.time if status else 0.0)))
    return changes


def state_spans(run_folder: RunFolder, machine: str) -> Iterator[tuple[MachineState, float, float]]:
    """Yield the states of a machine's agents, each with its begin and end; LOST while the machine was gone.

    A state before a new agent's start is LOST too: the old one died silently. The time after an end is left out.
    """
    for (state, begin), (next_state, end) in pairwise(state_changes(run_folder, machine)):
        if state in (MachineState.DONE, MachineState.STOPPED) or end <= begin:
            continue
        is_lost = next_state == MachineState.SETUP or state in FINAL_AGENT_STATES
        yield MachineState.LOST if is_lost else state, begin, end


def startup_seconds(run_folder: RunFolder, machine: str, since: float = 0.0) -> dict[str, float]:
    """Return the seconds of each step of the start of the first agent after `since` (Unix time); {} until it trains."""
    seconds: dict[str, float] = {}
    previous: StateChange | None = None
    for change in run_folder.state_log(machine):
        if change.time < since:
            continue
        if previous:
            is_standby = previous.state == MachineState.WARMING and SetupStep.STARTING not in seconds
            name = str(SetupStep.STANDBY if is_standby else previous.state)
            seconds[name] = round(seconds.get(name, 0.0) + max(0.0, change.time - previous.time), 3)
        if change.state == MachineState.TRAINING:
            return seconds
        previous = change
    return {}
