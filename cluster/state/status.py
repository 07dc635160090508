"""What a job's files say: its state while it runs, and the result when it has ended. Reads; writes result.json only."""

import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from train.recipe import target
from train.tools.filesystem import json_lines, read_json

from . import attempts, timeline
from .run_folder import Folders
from .spec import Spec

WAITING = ("setup", "failed", "stopped")  # of a machine: the job is not under way, or not any more
ORDER = (  # of the states of a machine, from the one that tells least of a job
    *("setup", "fetching", "warming", "waiting", "failed", "saved", "starting", "indexing", "joining", "stopping"),
    *("validating", "training"),
)
PHASES = ("running", "saved", "failed", "spare", "warming", "ended")  # the ones that know most first


def agent_status(folders: Folders, machine: str = "0") -> dict[str, Any]:
    """Return what a machine's agent of the last launch said last, {} before its first word."""
    said = read_json(folders.status(machine))
    return said if isinstance(said, dict) and said.get("launch", "") == folders.mark else {}


def started(folders: Folders, spec: Spec) -> float:
    """Return when the agents of the last launch were started: at the launch, or after machines were set up for it."""
    launch, board = folders.launch, read_json(folders.run / "machines.json") or {}
    since = launch.stat().st_mtime if launch.exists() else spec.created
    return max(since, board.get("finished", 0.0) if board.get("launch") == folders.mark else 0.0)


def words(folders: Folders, spec: Spec) -> dict[str, dict[str, Any]]:
    """Return what each machine of the last launch said last, for those that have spoken."""
    found = {name: agent_status(folders, name) for name in spec.names}
    return {name: said for name, said in found.items() if said}


def leader(folders: Folders, spec: Spec) -> dict[str, Any]:
    """Return the word of the machine that knows best how the job stands, {} before anybody has spoken."""

    def rank(said: Mapping[str, Any]) -> tuple[bool, int, int]:
        place = PHASES.index(said["phase"]) if said.get("phase") in PHASES else 0
        return said.get("state") != "done", -int(said.get("attempt", 0)), place

    return min(words(folders, spec).values(), key=rank, default={})


def status(folders: Folders, spec: Spec, result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the job's state and numbers as plain data."""
    said, newest = leader(folders, spec), attempts.newest(folders.shared)
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
        "attempt": attempts.gathered(folders.shared, newest),
        "progress": said.get("progress", ""),
        **{
            name: said.get(name)
            for name in ("step", "steps", "epoch", "epochs", "images_per_second", "lr", "top1", "top5")
        },
        "where": with_job(folders, spec, said.get("where")),
        "target": spec.target or None,
        "run": str(folders.run),
    }
    if result is not None:
        same = ("top1", "top5", "state", "reason", "images_per_second", "goodput", "where")
        own = {name: result.get(name) for name in same}
        told = result.get("target")
        own["target"] = target.sentence(told) if told else None
        if result["state"] == "done":
            own |= dict.fromkeys(("step", "steps"), result.get("steps"))
            own |= dict.fromkeys(("epoch", "epochs"), len(result["epochs"]))
        return {**known, **own, "doing": "", "attempt": result["attempts"], "seconds": result["seconds"]["total"]}
    if not said and spec.cloud and (renting := read_json(folders.run / "cloud.json")) and renting["doing"]:
        known |= {"state": "acquiring", "doing": renting["doing"]}
    elif not said and (board := read_json(folders.run / "machines.json")):
        steps = Counter(one["step"] for one in board["machines"].values() if one["step"])
        known["doing"] = "setting up: " + ", ".join(f"{step} on {count}" for step, count in steps.items())
        known["state"] = "setup"
    if said:
        state = "setup" if said["state"] == "fetching" else said["state"]
        known["state"] = state if state in WAITING and said.get("phase") != "failed" else "running"
        before = newest.number > 1 and newest.launch == folders.mark if newest else False
        if known["state"] == "running" and before and said["state"] not in ("training", "validating", "done"):
            known["state"] = "recovering"
        last = newest.reason if before and newest else ""
        known["reason"] = known["reason"] or last
    return {**known, "seconds": seconds_by_part(folders, spec)["total"]}


def machines(folders: Folders, spec: Spec) -> dict[str, dict[str, Any]]:
    """Return a row for each machine: host, what it is at, its own last words, and the seconds of each step so far.

    The supervisor notes those of setting up, the agent those from its start to the first training step.
    """
    said, board = words(folders, spec), (read_json(folders.run / "machines.json") or {}).get("machines", {})
    newest = attempts.newest(folders.shared)
    found = {}
    for name in spec.names:
        row = board.get(name, {})
        seconds = {**row.get("seconds", {}), **timeline.beginning(folders.run, name)}
        word = said.get(name, {})
        own = {"host": row.get("host", ""), "state": row.get("step", ""), "reason": row.get("reason", ""), **word}
        behind = newest and word.get("phase") == "running" and word.get("attempt", 0) < newest.number
        if word and not word.get("ended") and (behind or folders.result.exists()):
            own["state"] = "lost"
        found[name] = {**own, "notes": row.get("notes", []), "seconds": seconds}
    return found


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the metrics' lines of one kind in order; a later attempt replaces what it did again."""
    found: list[dict[str, Any]] = []
    for path in sorted((run / "metrics").glob("*.jsonl")):
        rows = [row for row in json_lines(path, "kind", "images") if row["kind"] == kind]
        first = rows[0]["images"] if rows else 0
        found = [row for row in found if row["images"] < first or not rows] + rows
    return found


def seconds_by_part(folders: Folders, spec: Spec) -> dict[str, float]:
    """Return the seconds of each state over all launches, "total" without the time between them.

    At each moment the job is in the state of the machine that is furthest: one that waits or has gone does not count
    while another trains. An agent that was killed counts until its last beat: its follower notes that as "gone",
    before it the status tells.
    """
    spans: list[tuple[float, float, str]] = []
    for name in spec.names:
        for (state, begin), (following, end) in pairwise(timeline.states(folders, name)):
            anew = following == "setup"  # by another agent
            if state not in timeline.OVER and not anew and end > begin:
                spans.append((begin, end, state))
    parts: dict[str, float] = {}
    edges = sorted({edge for begin, end, _ in spans for edge in (begin, end)})
    for begin, end in pairwise(edges):
        states = [state for first, last, state in spans if first <= begin and last >= end]
        if states:
            state = max(states, key=lambda one: ORDER.index(one) if one in ORDER else len(ORDER))
            name = "validation" if state == "validating" else state
            parts[name] = parts.get(name, 0.0) + end - begin
    return {"total": sum(parts.values()), **parts}


def with_job(
    folders: Folders, spec: Spec, where: dict[str, Any] | None, total: float | None = None
) -> dict[str, Any] | None:
    """Return the trainers' table of where the time went with what they do not know: the seconds that losses cost, and
    all that came before their start, on the slowest machine. None while there is none.

    An agent hears of the first step a moment late: with the `total` of a job that has ended, that moment is left out.
    """
    if not where:
        return None
    pauses = timeline.lost_seconds(folders.run, folders.shared)
    begun = [dict[str, float](one["seconds"]) for one in machines(folders, spec).values()]
    slowest = max(begun, key=lambda one: sum(one.values())) or where["start"]
    if total is not None and "first step" in slowest:
        own = sum(slowest.get(name, 0.0) for name in {*timeline.STATES.values(), "indexing", "standby"})
        late = max(0.0, own - max(0.0, total - where["wall"] - pauses))
        slowest["first step"] = max(0.0, slowest["first step"] - late)
    return {**where, "start": slowest, "pauses": pauses}


def ending(folders: Folders, spec: Spec) -> tuple[str, str]:
    """Return the state and reason of a job that has no result and no living agent."""
    if agreed := attempts.end(folders.shared, folders.mark):
        return agreed.state, agreed.reason
    said = words(folders, spec)
    for state in ("stopped", "failed"):  # who was asked to end says so; else the first machine that says why it did
        for one in said.values():
            if one.get("ended") and one["state"] == state:
                return state, one.get("reason", "")
    left = [one for one in said.values() if one.get("ended")]
    if left and len(left) == len(said):
        return "stopped", left[0].get("reason", "")
    return "failed", silence(folders, bool(said))


def silence(folders: Folders, spoke: bool = True) -> str:
    """Return why an agent may be gone without a last word."""
    if shutil.disk_usage(folders.run).free < 1e6:
        return f"no space left on the disk of {folders.run}; free some, then imgnet-cluster resume {folders.run.name}"
    if not spoke:
        again = f"once more: imgnet-cluster resume {folders.run.name}"
        return f"the agent ended before its first word: it was killed, or its Python does not work; {again}"
    return f"the agent was killed or the machine went down; imgnet-cluster resume {folders.run.name}"
