"""What a job's files say: its state while it runs, and the result when it has ended. Reads; writes result.json only."""

import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from train.recipe import target
from train.tools.filesystem import read_json, read_json_lines

from . import attempts, timeline
from .run_folder import RunFolder
from .spec import JobSpec

INACTIVE_STATES = ("setup", "failed", "stopped")  # of a machine: the job is not under way, or not any more
STATES_BY_PROGRESS = (  # of the states of a machine, from the one that tells least of a job
    *("setup", "fetching", "warming", "waiting", "failed", "saved", "starting", "indexing", "joining", "stopping"),
    *("validating", "training"),
)
PHASES_BEST_INFORMED_FIRST = (
    "running",
    "saved",
    "failed",
    "spare",
    "warming",
    "ended",
)  # the ones that know most first


def read_agent_status(run_folder: RunFolder, machine: str = "0") -> dict[str, Any]:
    """Return what a machine's agent of the last launch said last, {} before its first word."""
    said = read_json(run_folder.status_path(machine))
    return said if isinstance(said, dict) and said.get("launch", "") == run_folder.launch_id else {}


def agents_start_time(run_folder: RunFolder, spec: JobSpec) -> float:
    """Return when the agents of the last launch were started: at the launch, or after machines were set up for it."""
    launch, board = run_folder.launch_path, read_json(run_folder.path / "machines.json") or {}
    since = launch.stat().st_mtime if launch.exists() else spec.created
    return max(since, board.get("finished", 0.0) if board.get("launch") == run_folder.launch_id else 0.0)


def machine_statuses(run_folder: RunFolder, spec: JobSpec) -> dict[str, dict[str, Any]]:
    """Return what each machine of the last launch said last, for those that have spoken."""
    found = {name: read_agent_status(run_folder, name) for name in spec.machine_names}
    return {name: said for name, said in found.items() if said}


def best_informed_status(run_folder: RunFolder, spec: JobSpec) -> dict[str, Any]:
    """Return the word of the machine that knows best how the job stands, {} before anybody has spoken."""

    def rank(said: Mapping[str, Any]) -> tuple[bool, int, int]:
        place = (
            PHASES_BEST_INFORMED_FIRST.index(said["phase"]) if said.get("phase") in PHASES_BEST_INFORMED_FIRST else 0
        )
        return said.get("state") != "done", -int(said.get("attempt", 0)), place

    return min(machine_statuses(run_folder, spec).values(), key=rank, default={})


def job_status(run_folder: RunFolder, spec: JobSpec, result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the job's state and numbers as plain data."""
    said, newest = best_informed_status(run_folder, spec), attempts.newest_attempt(run_folder.shared)
    known = {
        "job": spec.name,
        "recipe": spec.recipe.name,
        "backend": spec.backend,
        "machines": spec.machines,
        "procs": spec.procs,
        "created": spec.created,
        "state": "booting",
        "doing": said.get("doing") or said.get("state", ""),
        "reason": said.get("reason", ""),
        "attempt": attempts.last_training_attempt_number(run_folder.shared, newest),
        "progress": said.get("progress", ""),
        **{
            name: said.get(name)
            for name in ("step", "steps", "epoch", "epochs", "images_per_second", "lr", "top1", "top5")
        },
        "where": add_job_times(run_folder, spec, said.get("where")),
        "target": spec.target or None,
        "run": str(run_folder.path),
    }
    if result is not None:
        same = ("top1", "top5", "state", "reason", "images_per_second", "goodput", "where")
        own = {name: result.get(name) for name in same}
        told = result.get("target")
        own["target"] = target.describe_outcome(told) if told else None
        if result["state"] == "done":
            own |= dict.fromkeys(("step", "steps"), result.get("steps"))
            own |= dict.fromkeys(("epoch", "epochs"), len(result["epochs"]))
        return {**known, **own, "doing": "", "attempt": result["attempts"], "seconds": result["seconds"]["total"]}
    if not said and spec.cloud and (renting := read_json(run_folder.path / "cloud.json")) and renting["doing"]:
        known |= {"state": "acquiring", "doing": renting["doing"]}
    elif not said and (board := read_json(run_folder.path / "machines.json")):
        steps = Counter(one["step"] for one in board["machines"].values() if one["step"])
        known["doing"] = "setting up: " + ", ".join(f"{step} on {count}" for step, count in steps.items())
        known["state"] = "setup"
    if said:
        state = "setup" if said["state"] == "fetching" else said["state"]
        known["state"] = state if state in INACTIVE_STATES and said.get("phase") != "failed" else "running"
        before = newest.number > 1 and newest.launch_id == run_folder.launch_id if newest else False
        if known["state"] == "running" and before and said["state"] not in ("training", "validating", "done"):
            known["state"] = "recovering"
        last = newest.reason if before and newest else ""
        known["reason"] = known["reason"] or last
    return {**known, "seconds": seconds_by_state(run_folder, spec)["total"]}


def machine_rows(run_folder: RunFolder, spec: JobSpec) -> dict[str, dict[str, Any]]:
    """Return a row for each machine: host, what it is at, its own last words, and the seconds of each step so far.

    The supervisor notes those of setting up, the agent those from its start to the first training step.
    """
    said, board = (
        machine_statuses(run_folder, spec),
        (read_json(run_folder.path / "machines.json") or {}).get("machines", {}),
    )
    newest = attempts.newest_attempt(run_folder.shared)
    found = {}
    for name in spec.machine_names:
        row = board.get(name, {})
        seconds = {**row.get("seconds", {}), **timeline.startup_seconds(run_folder.path, name)}
        word = said.get(name, {})
        own = {"host": row.get("host", ""), "state": row.get("step", ""), "reason": row.get("reason", ""), **word}
        behind = newest and word.get("phase") == "running" and word.get("attempt", 0) < newest.number
        if word and not word.get("ended") and (behind or run_folder.result_path.exists()):
            own["state"] = "lost"
        found[name] = {**own, "notes": row.get("notes", []), "seconds": seconds}
    return found


def read_metrics(run_path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the metrics' lines of one kind in order; a later attempt replaces what it did again."""
    found: list[dict[str, Any]] = []
    for path in sorted((run_path / "metrics").glob("*.jsonl")):
        rows = [row for row in read_json_lines(path, "kind", "images") if row["kind"] == kind]
        first = rows[0]["images"] if rows else 0
        found = [row for row in found if row["images"] < first or not rows] + rows
    return found


def seconds_by_state(run_folder: RunFolder, spec: JobSpec) -> dict[str, float]:
    """Return the seconds of each state over all launches, "total" without the time between them.

    At each moment the job is in the state of the machine that is furthest: one that waits or has gone does not count
    while another trains. An agent that was killed counts until its last beat: its follower notes that as "gone",
    before it the status tells.
    """
    spans: list[tuple[float, float, str]] = []
    for name in spec.machine_names:
        for (state, begin), (following, end) in pairwise(timeline.state_changes(run_folder, name)):
            anew = following == "setup"  # by another agent
            if state not in timeline.FINAL_AGENT_STATES and not anew and end > begin:
                spans.append((begin, end, state))
    parts: dict[str, float] = {}
    edges = sorted({edge for begin, end, _ in spans for edge in (begin, end)})
    for begin, end in pairwise(edges):
        states = [state for first, last, state in spans if first <= begin and last >= end]
        if states:
            state = max(
                states,
                key=lambda one: STATES_BY_PROGRESS.index(one) if one in STATES_BY_PROGRESS else len(STATES_BY_PROGRESS),
            )
            name = "validation" if state == "validating" else state
            parts[name] = parts.get(name, 0.0) + end - begin
    return {"total": sum(parts.values()), **parts}


def add_job_times(
    run_folder: RunFolder, spec: JobSpec, time_breakdown: dict[str, Any] | None, total_seconds: float | None = None
) -> dict[str, Any] | None:
    """Return the trainers' table of where the time went with what they do not know: the seconds that losses cost, and
    all that came before their start, on the slowest machine. None while there is none.

    An agent hears of the first step a moment late: with the `total` of a job that has ended, that moment is left out.
    """
    if not time_breakdown:
        return None
    pauses = timeline.lost_seconds(run_folder.path, run_folder.shared)
    begun = [dict[str, float](one["seconds"]) for one in machine_rows(run_folder, spec).values()]
    slowest = max(begun, key=lambda one: sum(one.values())) or time_breakdown["start"]
    if total_seconds is not None and "first step" in slowest:
        own = sum(slowest.get(name, 0.0) for name in {*timeline.STARTUP_STEP_BY_STATE.values(), "indexing", "standby"})
        late = max(0.0, own - max(0.0, total_seconds - time_breakdown["wall"] - pauses))
        slowest["first step"] = max(0.0, slowest["first step"] - late)
    return {**time_breakdown, "start": slowest, "pauses": pauses}


def infer_end_state(run_folder: RunFolder, spec: JobSpec) -> tuple[str, str]:
    """Return the state and reason of a job that has no result and no living agent."""
    if agreed := attempts.agreed_end(run_folder.shared, run_folder.launch_id):
        return agreed.end_state, agreed.reason
    said = machine_statuses(run_folder, spec)
    for state in ("stopped", "failed"):  # who was asked to end says so; else the first machine that says why it did
        for one in said.values():
            if one.get("ended") and one["state"] == state:
                return state, one.get("reason", "")
    left = [one for one in said.values() if one.get("ended")]
    if left and len(left) == len(said):
        return "stopped", left[0].get("reason", "")
    return "failed", explain_missing_agent(run_folder, bool(said))


def explain_missing_agent(run_folder: RunFolder, has_status: bool = True) -> str:
    """Return why an agent may be gone without a last word."""
    if shutil.disk_usage(run_folder.path).free < 1e6:
        return f"no space left on the disk of {run_folder.path}; free some, then imgnet-cluster resume {run_folder.path.name}"
    if not has_status:
        again = f"once more: imgnet-cluster resume {run_folder.path.name}"
        return f"the agent ended before its first word: it was killed, or its Python does not work; {again}"
    return f"the agent was killed or the machine went down; imgnet-cluster resume {run_folder.path.name}"
