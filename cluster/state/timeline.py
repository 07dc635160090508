"""History of a job: its attempts, their members, times, reasons, and what each change of attempt cost. Only reads."""

from pathlib import Path
from typing import Any

from train.metrics.records import StepRow, read_metrics_file
from train.tools.agent_protocol import metrics_file
from train.tools.filesystem import read_json, read_json_lines

from . import attempts
from .run_folder import RunFolder

FINAL_AGENT_STATES = ("done", "stopped", "gone", "left")  # an agent in one of these states has ended
STARTUP_STEP_BY_STATE = {  # what status and report call the seconds that an agent spent in a state before training
    "setup": "data",
    "fetching": "fetch",
    "starting": "rendezvous",
    "joining": "group",
    "warming": "first step",
    "waiting": "others",
}


def attempt_rows(run_path: Path, shared: Path) -> list[dict[str, Any]]:
    """Return a row for each attempt.

    `at` is when the attempt was agreed on (seconds since 1970, by the wall clock of the machine that proposed it).
    `pause` is the time in seconds from the last step before the attempt to its own first step. `steps_lost` is the
    number of steps that were done again. Both are None before they are known, and for the first attempt.
    """
    rows: list[dict[str, Any]] = []
    moved_launches = moved_launch_ids(run_path)
    previous_launch = ""
    last_trained_launch = ""
    last_step: tuple[int, float] | None = None  # number and time of the last step so far, made in that launch
    for attempt in attempts.history(shared):
        step_times = _read_step_times(run_path, attempt.number)
        row: dict[str, Any] = {
            "attempt": attempt.number,
            "at": attempt.time,
            "machines": list(attempt.machine_names),
            "reason": attempt.reason,
            "first_step": attempt.first_step,
            "last_step": step_times[-1][0] if step_times else None,
            "pause": None,
            "steps_lost": None,
        }
        if last_step and attempt.members:
            row["steps_lost"] = max(0, last_step[0] - attempt.first_step)
            if step_times and attempt.launch_id in (last_trained_launch, *moved_launches):
                row["pause"] = step_times[0][1] - last_step[1]
        if attempt.launch_id in moved_launches and attempt.launch_id != previous_launch:
            row["reason"] = "all machines were lost; new ones were rented"
        if step_times:
            last_step = step_times[-1]
            last_trained_launch = attempt.launch_id
        previous_launch = attempt.launch_id
        rows.append(row)
    return rows


def moved_launch_ids(run_path: Path) -> list[str]:
    """Return the IDs of launches that no user asked for: all rented machines were lost, and new ones took over."""
    rows = read_json_lines(run_path / "cloud.jsonl", "what", "launch_id")
    return [str(row["launch_id"]) for row in rows if row["what"] == "move"]


def lost_intervals(run_path: Path, shared: Path) -> list[tuple[float, float]]:
    """Return begin and end (seconds since 1970) of each time that a change of attempt cost.

    Such a time holds the steps that were done again and, within a launch, the pause before them. The trainers do not
    know these times: their own clock goes on from the checkpoint that they were given.
    """
    intervals: list[tuple[float, float]] = []
    previous_steps: list[tuple[int, float]] = []
    last_trained_launch = ""
    moved_launches = moved_launch_ids(run_path)
    for attempt in attempts.history(shared):
        step_times = _read_step_times(run_path, attempt.number) if attempt.members else []
        if previous_steps and step_times:
            times_before_save = [time for step, time in previous_steps if step <= attempt.first_step]
            begin = max(times_before_save, default=previous_steps[0][1])
            is_same_launch = attempt.launch_id in (last_trained_launch, *moved_launches)
            intervals.append((begin, step_times[0][1] if is_same_launch else previous_steps[-1][1]))
        if step_times:
            previous_steps = step_times
            last_trained_launch = attempt.launch_id
    return intervals


def lost_seconds(run_path: Path, shared: Path) -> float:
    """Return the seconds that changes of attempt cost."""
    return sum(end - begin for begin, end in lost_intervals(run_path, shared))


def _read_step_times(run_path: Path, attempt: int) -> list[tuple[int, float]]:
    """Return (step, time) as rank 0 of an attempt logged them: its first step, then about one step per second."""
    return [(row.step, row.time) for row in read_metrics_file(metrics_file(run_path, attempt), StepRow)]


def _state_log_path(run_path: Path, machine: str) -> Path:
    return run_path / "logs" / f"agent-{machine}.jsonl"


def state_changes(run_folder: RunFolder, machine: str) -> list[tuple[str, float]]:
    """Return the states of a machine's agents, and when each began.

    When the last state is not final, it is followed by "gone" at the agent's last heartbeat: the agent was killed and
    not yet replaced, or it lives and its last heartbeat is recent.
    """
    rows = read_json_lines(_state_log_path(run_folder.path, machine), "time", "state")
    changes = [(str(row["state"]), float(row["time"])) for row in rows if isinstance(row["time"], int | float)]
    if changes and changes[-1][0] not in (*FINAL_AGENT_STATES, "failed"):
        status = read_json(run_folder.status_path(machine))
        heartbeat = status.get("time") if isinstance(status, dict) else None
        heartbeat_time = float(heartbeat) if isinstance(heartbeat, int | float) else 0.0
        changes.append(("gone", max(changes[-1][1], heartbeat_time)))
    return changes


def startup_seconds(run_path: Path, machine: str) -> dict[str, float]:
    """Return the seconds that a machine's first agent took for each step of its start, up to its first training step.

    Returns {} until training has begun.
    """
    seconds: dict[str, float] = {}
    previous: tuple[str, float] | None = None
    for row in read_json_lines(_state_log_path(run_path, machine), "time", "state"):
        state, begin = str(row["state"]), float(row["time"])
        if previous:
            previous_state, previous_begin = previous
            are_trainers_started = "rendezvous" in seconds or previous_state == "starting"
            if previous_state == "warming" and not are_trainers_started:
                name = "standby"
            else:
                name = STARTUP_STEP_BY_STATE.get(previous_state, previous_state)
            seconds[name] = round(seconds.get(name, 0.0) + max(0.0, begin - previous_begin), 3)
        if state == "training":
            return seconds
        previous = state, begin
    return {}
