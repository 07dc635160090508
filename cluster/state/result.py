"""Writes result.json when a job has ended."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from train.data.order import usage_log
from train.forecast import compare, measured
from train.recipe import target
from train.tools.filesystem import as_json, json_lines, read_json, replace

from . import attempts, timeline
from .run_folder import Folders
from .spec import Spec
from .status import ending, leader, lines, machines, seconds_by_part, with_job


class CostMeter(Protocol):
    """What a job has cost; every backend is one."""

    def dollars(self, spec: Spec, folders: Folders) -> float:
        """Return what the job has cost until now."""

    def dollars_until(self, spec: Spec, folders: Folders, moment: float) -> float | None:
        """Return what the job had cost at `moment`; None when the price of a machine is unknown."""


def launched(folders: Folders, spec: Spec) -> float:
    """Return when the job was first launched; of one that waited in a queue, when the first of it was heard."""
    heard = [float(row["time"]) for row in json_lines(folders.run / "cloud.jsonl", "time")][:1]
    for name in spec.names:
        heard += [at for _, at in timeline.states(folders, name)[:1]]
    return min(heard, default=spec.created) if spec.queue else spec.created


def settle(
    folders: Folders, spec: Spec, cost: CostMeter, silent: Sequence[str] = (), why: str = "", how: str = "failed"
) -> None:
    """Write the result of a job whose agent is gone: what the trainers measured, and how the job ended.

    `silent` are machines that did not answer when everything was ended. `why` is the reason when it never began, or was
    ended from outside, `how` its state then; a job that has trained to its end is done all the same. The seconds of
    training and validation are the trainers', others the agents'.
    """
    trained = read_json(folders.shared / "result.json")
    state, reason = ("done", "") if trained else (how, why) if why else ending(folders, spec)
    epochs = trained["epochs"] if trained else lines(folders.run, "epoch")
    validated = [one for one in epochs if one["top1"] is not None]
    seconds = seconds_by_part(folders, spec)
    measured = {key: one for key, one in (trained or {}).get("seconds", {}).items() if key != "attempt"}
    result = {
        "job": spec.name,
        "recipe": spec.recipe.name,
        "state": state,
        "reason": reason,
        "top1": validated[-1]["top1"] if validated else None,
        "top5": validated[-1]["top5"] if validated else None,
        "epochs": epochs,
        "images_per_second": None,
        "goodput": None,
        "seed": spec.recipe.seed,
        **(trained or {}),
        "where": with_job(folders, spec, (trained or leader(folders, spec)).get("where"), seconds["total"]),
        "seconds": {**seconds, **measured},
        "machines": spec.machines,
        "procs": spec.procs,
        "setup": {name: one["seconds"] for name, one in machines(folders, spec).items()},
        "attempts": attempts.gathered(folders.shared, attempts.newest(folders.shared)),
        "timeline": timeline.table(folders.run, folders.shared),
        "dollars": cost.dollars(spec, folders),
        "backend": spec.backend,
        "git_commit": spec.git_commit,
        "did_not_answer": list(silent),
    }
    if trained and result["goodput"]:
        wall = trained["seconds"].get("first step to last", 0.0)
        result["goodput"] *= wall / (wall + timeline.lost_seconds(folders.run, folders.shared)) if wall else 1.0
    result["target"] = of_target(folders, spec, cost, epochs)
    result |= after(spec.forecast, {**result, "state": state})
    if trained and spec.log_ids:
        result["ids_wrong"] = ids_wrong(folders, trained["epochs"])
    replace(folders.result, as_json({**result, "state": state}))


def of_target(
    folders: Folders, spec: Spec, cost: CostMeter, epochs: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return what became of the job's target, or its recipe's, with what only we know of it; None without one."""
    told = target.outcome(target.Target.of(spec.target, spec.recipe), epochs)
    if told and told["at"] is not None:
        told["seconds_all"] = told["at"] - launched(folders, spec)
        told["dollars"] = cost.dollars_until(spec, folders, told["at"])
    return told


def ids_wrong(folders: Folders, epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the images that were used, [] when each was used once in every epoch."""
    begins = {one.number: one.first_step for one in attempts.history(folders.shared) if one.members}
    steps = {one["epoch"] - 1: one["steps"] for one in epochs}
    images = {one["epoch"] - 1: one["train_images"] for one in epochs}
    return usage_log.check(folders.run / usage_log.FOLDER, begins, images, steps)


Result = Mapping[str, Any]


def after(kept: Mapping[str, Any] | None, result: Result) -> dict[str, Any]:
    """Return what a job's result says beside the rest: the forecast made at its launch, that beside what the run took,
    and the constants it measured. Nothing of a run that is not done, or says too little.
    """
    if result.get("state") != "done":
        return {}
    try:
        found: dict[str, Any] = {"constants": measured(result).to_json()}
        if kept:
            found |= {"forecast": dict(kept), "against": compare(kept, result)}
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}
    return found
