"""What a job's files say: its state while it runs, and the result when it has ended. Reads; writes result.json only."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from train.files import as_json, read_json, replace

from . import attempts
from .backends import Backend
from .spec import Folders, Spec

OVER = ("done", "failed", "stopped", "gone")
RUNNING = (
    *("starting", "indexing", "joining", "warming", "training", "validating", "stopping", "saved"),
    "done",  # and its last files are on their way home
)


def agent_status(folders: Folders, machine: str = "0") -> dict[str, Any]:
    """Return what the agent of the last launch said last, {} before its first word."""
    said: dict[str, Any] = read_json(folders.status(machine)) or {}
    return said if said.get("launch", "") == folders.mark else {}


def status(folders: Folders, spec: Spec, result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the job's state and numbers as plain data."""
    said = agent_status(folders)
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
        "attempt": said.get("attempt", 0),
        "progress": said.get("progress", ""),
        **{
            name: said.get(name)
            for name in ("step", "steps", "epoch", "epochs", "images_per_second", "lr", "top1", "top5")
        },
        "run": str(folders.run),
    }
    if result is not None:
        own = {name: result.get(name) for name in ("top1", "top5", "state", "reason", "images_per_second")}
        return {**known, **own, "doing": "", "attempt": result["attempts"], "seconds": result["seconds"]["total"]}
    if said:
        known["state"] = "running" if said["state"] in RUNNING else said["state"]
    return {**known, "seconds": seconds_by_part(folders)["total"]}


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the metrics' lines of one kind in order; a later attempt replaces what it did again."""
    found: list[dict[str, Any]] = []
    for path in sorted((run / "metrics").glob("*.jsonl")):
        rows = [row for row in _rows(path, "kind", "images") if row["kind"] == kind]
        first = rows[0]["images"] if rows else 0
        found = [row for row in found if row["images"] < first or not rows] + rows
    return found


def _rows(path: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Lines of JSON with these names; not the last one when only a part of it has arrived, nor what is damaged."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.keys() >= {*names}:
                yield row


def seconds_by_part(folders: Folders) -> dict[str, float]:
    """Return the seconds of each state over all launches, "total" without the time between them.

    An agent that was killed counts until its last beat: its follower notes that as "gone", before it the status tells.
    """
    rows = [row for path in (folders.run / "logs").glob("agent-0.jsonl") for row in _rows(path, "time", "state")]
    if rows and rows[-1]["state"] not in OVER:
        said = read_json(folders.status()) or {}
        rows.append({"state": "gone", "time": max(rows[-1]["time"], said.get("time", 0.0))})
    parts: dict[str, float] = {}
    for one, following in pairwise(rows):
        if following["state"] != "setup" and one["state"] not in OVER:
            name = "validation" if one["state"] == "validating" else one["state"]
            parts[name] = parts.get(name, 0.0) + max(0.0, following["time"] - one["time"])
    return {"total": sum(parts.values()), **parts}


def settle(folders: Folders, spec: Spec, backend: Backend) -> None:
    """Write the result of a job whose agent is gone: what the trainers measured, and how the job ended.

    The seconds of training and validation are the trainers' own, all others the agent's.
    """
    said = agent_status(folders)
    trained = read_json(folders.shared / "result.json")
    state, reason = said.get("state"), said.get("reason", "")
    if trained:
        state, reason = "done", ""
    elif not said.get("ended"):
        state, reason = "failed", silence(folders, bool(said))
    newest = attempts.newest(folders.shared)
    epochs = trained["epochs"] if trained else lines(folders.run, "epoch")
    seconds = seconds_by_part(folders)
    measured = {key: one for key, one in (trained or {}).get("seconds", {}).items() if key != "attempt"}
    result = {
        "job": spec.name,
        "recipe": spec.recipe.name,
        "state": state,
        "reason": reason,
        "top1": epochs[-1]["top1"] if epochs else None,
        "top5": epochs[-1]["top5"] if epochs else None,
        "epochs": epochs,
        "images_per_second": None,
        "goodput": None,
        "seed": spec.recipe.seed,
        **(trained or {}),
        "seconds": {**seconds, **measured},
        "machines": spec.machines,
        "procs": spec.procs,
        "attempts": newest.number if newest else 0,
        "dollars": backend.dollars(spec, seconds["total"]),
        "backend": spec.backend,
        "git_commit": spec.git_commit,
    }
    replace(folders.result, as_json({**result, "state": state}))


def silence(folders: Folders, spoke: bool = True) -> str:
    """Return why an agent may be gone without a last word."""
    if shutil.disk_usage(folders.run).free < 1e6:
        return f"no space left on the disk of {folders.run}; free some, then imgnet-cluster resume {folders.run.name}"
    if not spoke:
        return f"the agent did not start; see imgnet-cluster logs {folders.run.name}"
    return f"the agent was killed or the machine went down; imgnet-cluster resume {folders.run.name}"
