"""What a job has run, from its run folder, as plain data: for whoever writes it down. Reads only; asks no machine.

Epochs are those that count: what an attempt did beyond the save that the next one went on from is left out. Their rows
are the metrics' lines, or the trainers' own history where a machine was lost with its last lines.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.backends import machine_types
from cluster.errors import ClusterError
from cluster.jobs.job import Job
from cluster.state import attempts, timeline
from cluster.state import result as state_result
from train.tools.filesystem import read_json_lines

JsonDict = dict[str, Any]


def collect_run_data(job: Job) -> JsonDict:
    """Return what a job has run.

    Raises `ClusterError` when it is not over, nothing of it was validated, or it is of an old version.
    """
    if not job.has_ended:
        raise ClusterError(f"{job.name} is {job.state}; a record is of a run that is over, which this is not yet")
    spec, folders = job.spec, job.run_folder
    result = job.result or {}
    members = {one.number: one for one in attempts.history(folders.shared) if one.members}
    lines = effective_metrics(job, members)
    starts = [row for row in lines if row["kind"] == "start"]
    epochs = epoch_rows(lines, result.get("epochs") or [])
    if not any(row["top1"] is not None for row in epochs):
        state = job.status()
        why = f": {state['reason']}" if state["reason"] else ""
        raise ClusterError(
            f"{job.name} has validated no epoch, so there is nothing to record; it is {state['state']}{why}"
        )
    if not starts or any(row.get("clock") is None for row in epochs):
        raise ClusterError(f"{job.name} was trained by an older version, which did not note when loading began")
    first, last = starts[0], starts[-1]
    found = {
        "job": job.name, "uid": spec.uid, "state": job.state, "backend": spec.backend,
        "recipe": spec.recipe.to_json(), "gpus": last["gpus"], "max_steps": spec.max_steps, "scale": spec.scale,
        "commit": spec.git_commit, "begun": first["begun"], "launched": state_result.first_launch_time(folders, spec),
        "train_images": last["train_images"], "val_images": last["val_images"],
        "device": last["device"], "processor": last["processor"] or None, "precision": last["precision"],
        "versions": last["versions"], "worlds": {str(row["attempt"]): row["world"] for row in starts},
        "epochs": epochs, "attempts": timeline.attempt_rows(job.path, folders.shared), "away": recovery_costs(lines, members),
        "first_step_at": next((row["began"] for row in epochs if row["began"] is not None), None),
        "target": result.get("target"), "schedule": result.get("schedule"),
        "result_seconds": (result.get("clock") or {}).get("seconds"), "result_epochs": result.get("epochs") or [],
        "result_top": {name: result.get(name) for name in ("top1", "top5")},
        "machines_at_once": [len(one.members) for one in members.values()],
    }  # fmt: skip
    return found | machine_costs(job, members, epochs[-1]["at"])


def effective_metrics(job: Job, attempts_by_number: Mapping[int, attempts.Attempt]) -> list[JsonDict]:
    """Return the metrics' lines that count, in order: none beyond the step that a later attempt went on from."""
    found: list[JsonDict] = []
    for path in sorted((job.path / "metrics").glob("*.jsonl")):
        number = int(path.stem)
        kept = min((one.first_step for later, one in attempts_by_number.items() if later > number), default=math.inf)
        rows = read_json_lines(path, "kind", "step", "time")
        found += [{**row, "attempt": number} for row in rows if row["kind"] == "start" or row["step"] <= kept]
    return found


def epoch_rows(metrics_lines: Sequence[JsonDict], result_epochs: Sequence[Mapping[str, Any]]) -> list[JsonDict]:
    """Return a row for each epoch that was done: its result, `step` of the run at its end, the attempt that ended it,
    the measured rates of its first and last step, and when it began and its last step was made; None: not known.
    """
    told = {row["epoch"]: row for row in result_epochs}
    told |= {row["epoch"]: row for row in metrics_lines if row["kind"] == "epoch"}  # of two lines the later attempt's
    steps = {row["step"]: row for row in metrics_lines if row["kind"] == "train"}
    found, done = list[JsonDict](), 0
    for number in sorted(told):
        row = told[number]
        first, last = steps.get(done + 1, {}), steps.get(done + row["steps"], {})
        done += row["steps"]
        speed, images = first.get("times/images_per_second"), min(row["global_batch"], row["train_images"])
        found.append({
            **{name: one for name, one in row.items() if name not in ("kind", "time", "images", "where", "gap_steps")},
            "step": done, "attempt": row.get("attempt"), "first_lr": first.get("sizes/lr"),
            "last_lr": last.get("sizes/lr"), "noted": row.get("time"),
            "began": first["time"] - images / speed if speed else None, "trained": last.get("time"),
        })  # fmt: skip
    return found


def recovery_costs(
    metrics_lines: Sequence[JsonDict], attempts_by_number: Mapping[int, attempts.Attempt]
) -> list[JsonDict]:
    """Return what each later attempt cost in seconds of the clock, and the step it went on from: from the save that it
    was given until its own first step was done; None where nobody noted that.
    """
    begun = min((row["begun"] for row in metrics_lines if row["kind"] == "start"), default=None)
    steps = [row for row in metrics_lines if row["kind"] == "train"]
    found = []
    for number, one in list(attempts_by_number.items())[1:]:
        before = [row["time"] for row in steps if row["attempt"] < number and row["step"] <= one.first_step]
        after = [row["time"] for row in steps if row["attempt"] == number]
        since = before[-1] if before else begun
        lost = after[0] - since if after and since is not None else None
        found.append({"attempt": number, "step": one.first_step, "seconds": lost})
    return found


def machine_costs(job: Job, attempts_by_number: Mapping[int, attempts.Attempt], end_time: float) -> JsonDict:
    """Return the machines, and what those of the last attempt cost an hour; None where that is not known."""
    spec = job.spec
    last = attempts_by_number[max(attempts_by_number)].machine_names if attempts_by_number else ()
    if not spec.cloud:
        own = [
            {"name": name, "type": None, "price": None} for name in spec.machine_names
        ]  # addresses are nobody's business
        return {"machines": own, "kinds": {}, "at_work": list(last), "cost_per_hour": None, "billed": None}
    from cluster.backends.aws import admin

    said = admin.job_cost(job.path)
    each = [
        {name: one[name] for name in ("name", "type", "market", "zone", "price", "seconds", "dollars", "all")}
        for one in said["machines"]
        if one["launched"] <= end_time
    ]
    there = {one["name"]: one["price"] for one in each}
    hourly = [there.get(name) for name in last]
    prices = [one for one in hourly if one is not None]
    return {
        "machines": each, "kinds": {one["type"]: describe_gpus(one["type"]) for one in each}, "at_work": list(last),
        "cost_per_hour": sum(prices) if prices and len(prices) == len(hourly) else None,
        "billed": None if said["unknown"] else said["dollars"],
    }  # fmt: skip


def describe_gpus(type_name: str) -> str:
    """Return what GPUs a type of machine has, such as "8 x A100"; "" where that is none or not known."""
    found = machine_types.find_machine_type(type_name)
    return f"{found.gpus} x {found.gpu}" if found and found.gpu != "CPU" else ""
