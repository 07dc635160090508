"""Derives the state of a job from its files. Only reads; result.py writes the result when the job has ended."""

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from train.metrics.records import RowT, read_metrics_file
from train.metrics.time_table import TimeTable
from train.recipe import target
from train.tools.filesystem import read_json
from train.tools.records import decode, encode

from . import attempts, cloud_activity, timeline
from .run_folder import RunFolder
from .spec import JobSpec

# States of a machine in which the job does not run: not yet, or not any more.
INACTIVE_STATES = ("setup", "failed", "stopped")
# States of a machine. A job counts as being in the last of its machines' states in this order.
STATES_BY_PROGRESS = (
    "setup",
    "fetching",
    "warming",
    "waiting",
    "failed",
    "saved",
    "starting",
    "indexing",
    "joining",
    "stopping",
    "validating",
    "training",
)
# Phases of an agent. A machine in an earlier phase of this tuple knows more about the job.
PHASES_BEST_INFORMED_FIRST = ("running", "saved", "failed", "spare", "warming", "ended")
FULL_DISK_BYTES = 1e6  # a disk with less free space than this is full


def read_agent_status(run_folder: RunFolder, machine: str = "0") -> dict[str, Any]:
    """Return the last status of a machine's agent in the last launch, {} before its first."""
    status = read_json(run_folder.status_path(machine))
    return status if isinstance(status, dict) and status.get("launch", "") == run_folder.launch_id else {}


def agents_start_time(run_folder: RunFolder, spec: JobSpec) -> float:
    """Return when the agents of the last launch were started: at the launch, or when their machines were set up."""
    launch_path = run_folder.launch_path
    launch_time = launch_path.stat().st_mtime if launch_path.exists() else spec.created
    setup_progress = read_json(run_folder.path / "machines.json") or {}
    is_of_this_launch = setup_progress.get("launch") == run_folder.launch_id
    return max(launch_time, setup_progress.get("finished", 0.0) if is_of_this_launch else 0.0)


def machine_statuses(run_folder: RunFolder, spec: JobSpec) -> dict[str, dict[str, Any]]:
    """Return the last status of each machine in the last launch, without machines that have not written one."""
    statuses = {name: read_agent_status(run_folder, name) for name in spec.machine_names}
    return {name: status for name, status in statuses.items() if status}


def best_informed_status(run_folder: RunFolder, spec: JobSpec) -> dict[str, Any]:
    """Return the status of the machine that knows most about the job, {} before the first status.

    A machine that is done comes first, then the machine of the newest attempt, then the order of
    `PHASES_BEST_INFORMED_FIRST`.
    """

    def sort_key(status: Mapping[str, Any]) -> tuple[bool, int, int]:
        phase = status.get("phase")
        phase_rank = PHASES_BEST_INFORMED_FIRST.index(phase) if phase in PHASES_BEST_INFORMED_FIRST else 0
        return status.get("state") != "done", -int(status.get("attempt", 0)), phase_rank

    return min(machine_statuses(run_folder, spec).values(), key=sort_key, default={})


def job_status(run_folder: RunFolder, spec: JobSpec, result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the job's state and numbers as plain data. `result` is its result, None while it has not ended."""
    agent_status = best_informed_status(run_folder, spec)
    newest = attempts.newest_attempt(run_folder.shared)
    progress_keys = ("step", "steps", "epoch", "epochs", "images_per_second", "lr", "top1", "top5")
    where = reported_time_table(agent_status)
    status = {
        "job": spec.name,
        "recipe": spec.recipe.name,
        "backend": spec.backend,
        "machines": spec.machines,
        "procs": spec.procs,
        "created": spec.created,
        "state": "booting",
        "doing": agent_status.get("doing") or agent_status.get("state", ""),
        "reason": agent_status.get("reason", ""),
        "attempt": attempts.last_training_attempt_number(run_folder.shared, newest),
        "progress": agent_status.get("progress", ""),
        **{key: agent_status.get(key) for key in progress_keys},
        "where": encode(add_job_times(run_folder, spec, where)) if where else None,
        "target": spec.train.target or None,
        "run": str(run_folder.path),
    }
    if result is not None:
        return {**status, **_ended_job_status(result)}
    if agent_status:
        status |= _running_job_status(run_folder, agent_status, newest)
    else:
        status |= _starting_job_status(run_folder, spec)
    return {**status, "seconds": seconds_by_state(run_folder, spec)["total"]}


def _ended_job_status(result: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a job's status that comes from its result."""
    shared_keys = ("top1", "top5", "state", "reason", "images_per_second", "goodput", "where")
    status = {key: result.get(key) for key in shared_keys}
    outcome = result.get("target")
    status["target"] = target.describe_outcome(decode(target.TargetOutcome, outcome)) if outcome else None
    if result["state"] == "done":
        status["step"] = status["steps"] = result.get("steps")
        # The number of the last epoch, as in the epochs' lines: with --max-steps, whole epochs are left out.
        status["epoch"] = status["epochs"] = result["epochs"][-1].get("epoch") if result["epochs"] else 0
    return {**status, "doing": "", "attempt": result["attempts"], "seconds": result["seconds"]["total"]}


def _starting_job_status(run_folder: RunFolder, spec: JobSpec) -> dict[str, Any]:
    """Return the state of a job whose agents have not written a status: machines are rented or set up."""
    activity = cloud_activity.read_activity(run_folder.path) if spec.cloud else None
    if activity and activity.doing:
        return {"state": "acquiring", "doing": activity.doing}
    setup_progress = read_json(run_folder.path / "machines.json")
    if setup_progress:
        step_counts = Counter(row["step"] for row in setup_progress["machines"].values() if row["step"])
        steps = ", ".join(f"{step} on {count}" for step, count in step_counts.items())
        return {"state": "setup", "doing": f"setting up: {steps}"}
    return {}


def _running_job_status(
    run_folder: RunFolder, agent_status: dict[str, Any], newest: attempts.Attempt | None
) -> dict[str, Any]:
    """Return state and reason of a job whose agents have written statuses."""
    state = "setup" if agent_status["state"] == "fetching" else agent_status["state"]
    if state not in INACTIVE_STATES or agent_status.get("phase") == "failed":
        state = "running"
    reason = agent_status.get("reason", "")
    if newest and newest.number > 1 and newest.launch_id == run_folder.launch_id:
        if state == "running" and agent_status["state"] not in ("training", "validating", "done"):
            state = "recovering"
        reason = reason or newest.reason
    return {"state": state, "reason": reason}


def machine_rows(run_folder: RunFolder, spec: JobSpec) -> dict[str, dict[str, Any]]:
    """Return a row for each machine: host, state, its agent's last status, notes, and the seconds of each step so far.

    The supervisor measures the steps of setting up, the agent those from its start to the first training step.
    """
    statuses = machine_statuses(run_folder, spec)
    setup_rows = (read_json(run_folder.path / "machines.json") or {}).get("machines", {})
    newest = attempts.newest_attempt(run_folder.shared)
    rows = {}
    for name in spec.machine_names:
        setup_row = setup_rows.get(name, {})
        status = statuses.get(name, {})
        row = {
            "host": setup_row.get("host", ""),
            "state": setup_row.get("step", ""),
            "reason": setup_row.get("reason", ""),
            **status,
        }
        is_behind = newest and status.get("phase") == "running" and status.get("attempt", 0) < newest.number
        if status and not status.get("ended") and (is_behind or run_folder.result_path.exists()):
            row["state"] = "lost"
        row["notes"] = setup_row.get("notes", [])
        row["seconds"] = {**setup_row.get("seconds", {}), **timeline.startup_seconds(run_folder.path, name)}
        rows[name] = row
    return rows


def read_metrics(run_path: Path, row_type: type[RowT]) -> list[RowT]:
    """Return the metrics rows of one type in order. Rows of a later attempt replace those of steps it did again."""
    rows: list[RowT] = []
    for path in sorted((run_path / "metrics").glob("*.jsonl")):
        attempt_rows = list(read_metrics_file(path, row_type))
        if attempt_rows:
            rows = [row for row in rows if row.images < attempt_rows[0].images] + attempt_rows
    return rows


def seconds_by_state(run_folder: RunFolder, spec: JobSpec) -> dict[str, float]:
    """Return the seconds of each state over all launches, and "total", without the time between launches.

    At each moment the job is in the state of the machine that is furthest (STATES_BY_PROGRESS): a machine that waits or
    has gone does not count while another trains. The time of an agent that was killed counts until its last heartbeat.
    """
    spans: list[tuple[float, float, str]] = []
    for name in spec.machine_names:
        for (state, begin), (next_state, end) in pairwise(timeline.state_changes(run_folder, name)):
            is_new_agent = next_state == "setup"  # until then no agent was alive
            if state not in timeline.FINAL_AGENT_STATES and not is_new_agent and end > begin:
                spans.append((begin, end, state))

    def progress(state: str) -> int:
        return STATES_BY_PROGRESS.index(state) if state in STATES_BY_PROGRESS else len(STATES_BY_PROGRESS)

    seconds: dict[str, float] = {}
    edges = sorted({edge for begin, end, _ in spans for edge in (begin, end)})
    for begin, end in pairwise(edges):
        states = [state for span_begin, span_end, state in spans if span_begin <= begin and span_end >= end]
        if states:
            state = max(states, key=progress)
            part = "validation" if state == "validating" else state
            seconds[part] = seconds.get(part, 0.0) + end - begin
    return {"total": sum(seconds.values()), **seconds}


def reported_time_table(agent_status: Mapping[str, Any]) -> TimeTable | None:
    """Return the table of the wall time that a machine's status has from its trainers; None before their first."""
    table = agent_status.get("where")
    return decode(TimeTable, table, "the status of a machine") if table else None


def add_job_times(
    run_folder: RunFolder, spec: JobSpec, table: TimeTable, total_seconds: float | None = None
) -> TimeTable:
    """Return the trainers' table of the wall time with the times that they do not know.

    `pauses` are the seconds that changes of attempt cost. `start` holds the seconds of each step before the first
    training step, on the slowest machine. An agent sees the first step a moment late: when `total_seconds` of an ended
    job are given, that moment is subtracted, so that all parts add up to the total.
    """
    pauses = timeline.lost_seconds(run_folder.path, run_folder.shared)
    start_seconds = [dict[str, float](row["seconds"]) for row in machine_rows(run_folder, spec).values()]
    slowest = max(start_seconds, key=lambda seconds: sum(seconds.values())) or dict(table.start)
    if total_seconds is not None and "first step" in slowest:
        agent_steps = {*timeline.STARTUP_STEP_BY_STATE.values(), "indexing", "standby"}
        agent_seconds = sum(slowest.get(step, 0.0) for step in agent_steps)
        delay = max(0.0, agent_seconds - max(0.0, total_seconds - table.wall - pauses))
        slowest["first step"] = max(0.0, slowest["first step"] - delay)
    return replace(table, start=slowest, pauses=pauses)


def infer_end_state(run_folder: RunFolder, spec: JobSpec) -> tuple[str, str]:
    """Return state and reason of a job that has neither a result nor a living agent."""
    if agreed := attempts.agreed_end(run_folder.shared, run_folder.launch_id):
        return agreed.end_state, agreed.reason
    statuses = list(machine_statuses(run_folder, spec).values())
    final_statuses = [status for status in statuses if status.get("ended")]
    for state in ("stopped", "failed"):  # a stop on request explains the end best, then a failure with its reason
        for status in final_statuses:
            if status["state"] == state:
                return state, status.get("reason", "")
    if final_statuses and len(final_statuses) == len(statuses):
        return "stopped", final_statuses[0].get("reason", "")
    return "failed", explain_missing_agent(run_folder, bool(statuses))


def explain_missing_agent(run_folder: RunFolder, has_status: bool = True) -> str:
    """Return the probable reason why an agent ended without writing a final status, and what to type next."""
    resume_command = f"imgnet-cluster resume {run_folder.path.name}"
    if shutil.disk_usage(run_folder.path).free < FULL_DISK_BYTES:
        return f"no space left on the disk of {run_folder.path}; free some, then type {resume_command}"
    if not has_status:
        return (
            "the agent ended before it wrote its first status: it was killed, or its Python does not work; "
            f"try again: {resume_command}"
        )
    return f"the agent was killed or the machine went down; try again: {resume_command}"
