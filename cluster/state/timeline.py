"""What happened to a job: its attempts, who was in them, when, why, and what each change cost. Reads only."""

from pathlib import Path
from typing import Any

from train.tools.filesystem import read_json, read_json_lines

from . import attempts
from .run_folder import RunFolder

FINAL_AGENT_STATES = ("done", "stopped", "gone", "left")  # of an agent
STARTUP_STEP_BY_STATE = {
    "setup": "data", "fetching": "fetch", "starting": "rendezvous", "joining": "group", "warming": "first step",
    "waiting": "others",
}  # fmt: skip


def attempt_rows(run_path: Path, shared: Path) -> list[dict[str, Any]]:
    """Return a row for each attempt.

    `at` is when it was agreed on (seconds of the wall clock of the machine that proposed it). `pause` is the time in
    seconds from the last step before it to its own first, `steps_lost` how many steps were done again; None before
    they are known, and for the first attempt.
    """
    rows: list[dict[str, Any]] = []
    launch, trained, moved = "", "", moved_launch_ids(run_path)
    last: tuple[int, float] | None = None  # step and time of the last step so far, which the launch `trained` made
    for one in attempts.history(shared):
        steps = _read_step_times(run_path, one.number)
        row: dict[str, Any] = {
            "attempt": one.number, "at": one.time, "machines": list(one.machine_names), "reason": one.reason,
            "first_step": one.first_step, "last_step": steps[-1][0] if steps else None, "pause": None,
            "steps_lost": None,
        }  # fmt: skip
        if last and one.members:
            row["steps_lost"] = max(0, last[0] - one.first_step)
            row["pause"] = steps[0][1] - last[1] if steps and one.launch_id in (trained, *moved) else None
        if one.launch_id in moved and one.launch_id != launch:
            row["reason"] = "others were rented in place of all"
        last, trained = (steps[-1], one.launch_id) if steps else (last, trained)
        launch = one.launch_id
        rows.append(row)
    return rows


def moved_launch_ids(run_path: Path) -> list[str]:
    """Return the marks of launches that nobody asked for: all rented machines were lost, and others took over."""
    return [
        str(row["mark"]) for row in read_json_lines(run_path / "cloud.jsonl", "what", "mark") if row["what"] == "move"
    ]


def lost_intervals(run_path: Path, shared: Path) -> list[tuple[float, float]]:
    """Return the begin and end of each time that a change of attempt cost: steps done again, and the pauses within a
    launch. Seconds since 1970.

    The trainers do not know them: their clock goes on from the save that they were given.
    """
    found, before, trained = list[tuple[float, float]](), list[tuple[int, float]](), ""
    moved = moved_launch_ids(run_path)
    for one in attempts.history(shared):
        steps = _read_step_times(run_path, one.number) if one.members else []
        if before and steps:
            saved = max((at for step, at in before if step <= one.first_step), default=before[0][1])
            found.append((saved, steps[0][1] if one.launch_id in (trained, *moved) else before[-1][1]))
        before, trained = (steps, one.launch_id) if steps else (before, trained)
    return found


def lost_seconds(run_path: Path, shared: Path) -> float:
    """Return the seconds that changes of attempt cost."""
    return sum(end - begin for begin, end in lost_intervals(run_path, shared))


def _read_step_times(run_path: Path, attempt: int) -> list[tuple[int, float]]:
    """The (step, time) that the first trainer of an attempt noted, about one a second, the first step among them."""
    rows = read_json_lines(run_path / "metrics" / f"{attempt:06d}.jsonl", "kind", "step", "time")
    return [(int(row["step"]), float(row["time"])) for row in rows if row["kind"] == "train"]


def state_changes(run_folder: RunFolder, machine: str) -> list[tuple[str, float]]:
    """Return the states of a machine's agents and when each began. A last one that is no end is followed by "gone", at
    the agent's last beat: it was killed and nobody has come after it, or it lives, and that is now.
    """
    lines = read_json_lines(run_folder.path / "logs" / f"agent-{machine}.jsonl", "time", "state")
    rows = [(str(row["state"]), float(row["time"])) for row in lines if isinstance(row["time"], int | float)]
    if rows and rows[-1][0] not in (*FINAL_AGENT_STATES, "failed"):
        said = read_json(run_folder.status_path(machine))
        beat = said.get("time") if isinstance(said, dict) else None
        rows.append(("gone", max(rows[-1][1], float(beat) if isinstance(beat, int | float) else 0.0)))
    return rows


def startup_seconds(run_path: Path, machine: str) -> dict[str, float]:
    """Return the seconds that a machine's first agent took for each state up to its first training step."""
    parts: dict[str, float] = {}
    before: tuple[str, float] | None = None
    for row in read_json_lines(run_path / "logs" / f"agent-{machine}.jsonl", "time", "state"):
        state, now = str(row["state"]), float(row["time"])
        if before:
            started = "rendezvous" in parts or before[0] == "starting"
            name = (
                "standby" if before[0] == "warming" and not started else STARTUP_STEP_BY_STATE.get(before[0], before[0])
            )
            parts[name] = round(parts.get(name, 0.0) + max(0.0, now - before[1]), 3)
        if state == "training":
            return parts
        before = state, now
    return {}
