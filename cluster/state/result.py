"""Writes result.json when a job has ended."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from train.data.order import usage_log
from train.forecast import calibrate, compare_with_run
from train.recipe import target
from train.tools.filesystem import read_json, read_json_lines, to_json_bytes, write_atomic

from . import attempts, timeline
from .run_folder import RunFolder
from .spec import JobSpec
from .status import add_job_times, best_informed_status, infer_end_state, machine_rows, read_metrics, seconds_by_state


class CostMeter(Protocol):
    """What a job has cost; every backend is one."""

    def cost_dollars(self, spec: JobSpec, run_folder: RunFolder) -> float:
        """Return what the job has cost until now."""

    def cost_dollars_until(self, spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
        """Return what the job had cost at `moment`; None when the price of a machine is unknown."""


def first_launch_time(run_folder: RunFolder, spec: JobSpec) -> float:
    """Return when the job was first launched; of one that waited in a queue, when the first of it was heard."""
    heard = [float(row["time"]) for row in read_json_lines(run_folder.path / "cloud.jsonl", "time")][:1]
    for name in spec.machine_names:
        heard += [at for _, at in timeline.state_changes(run_folder, name)[:1]]
    return min(heard, default=spec.created) if spec.queue else spec.created


def write_result(
    run_folder: RunFolder,
    spec: JobSpec,
    cost: CostMeter,
    unreachable: Sequence[str] = (),
    end_reason: str = "",
    end_state: str = "failed",
) -> None:
    """Write the result of a job whose agent is gone: what the trainers measured, and how the job ended.

    `silent` are machines that did not answer when everything was ended. `why` is the reason when it never began, or was
    ended from outside, `how` its state then; a job that has trained to its end is done all the same. The seconds of
    training and validation are the trainers', others the agents'.
    """
    trained = read_json(run_folder.shared / "result.json")
    state, reason = (
        ("done", "") if trained else (end_state, end_reason) if end_reason else infer_end_state(run_folder, spec)
    )
    epochs = trained["epochs"] if trained else read_metrics(run_folder.path, "epoch")
    validated = [one for one in epochs if one["top1"] is not None]
    seconds = seconds_by_state(run_folder, spec)
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
        "where": add_job_times(
            run_folder, spec, (trained or best_informed_status(run_folder, spec)).get("where"), seconds["total"]
        ),
        "seconds": {**seconds, **measured},
        "machines": spec.machines,
        "procs": spec.procs,
        "setup": {name: one["seconds"] for name, one in machine_rows(run_folder, spec).items()},
        "attempts": attempts.last_training_attempt_number(
            run_folder.shared, attempts.newest_attempt(run_folder.shared)
        ),
        "timeline": timeline.attempt_rows(run_folder.path, run_folder.shared),
        "dollars": cost.cost_dollars(spec, run_folder),
        "backend": spec.backend,
        "git_commit": spec.git_commit,
        "did_not_answer": list(unreachable),
    }
    if trained and result["goodput"]:
        wall = trained["seconds"].get("first step to last", 0.0)
        result["goodput"] *= wall / (wall + timeline.lost_seconds(run_folder.path, run_folder.shared)) if wall else 1.0
    result["target"] = target_outcome(run_folder, spec, cost, epochs)
    result |= forecast_vs_actual(spec.forecast, {**result, "state": state})
    if trained and spec.log_ids:
        result["ids_wrong"] = check_image_usage(run_folder, trained["epochs"])
    write_atomic(run_folder.result_path, to_json_bytes({**result, "state": state}))


def target_outcome(
    run_folder: RunFolder, spec: JobSpec, cost: CostMeter, epochs: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return what became of the job's target, or its recipe's, with what only we know of it; None without one."""
    told = target.target_outcome(target.Target.from_options(spec.target, spec.recipe), epochs)
    if told and told["at"] is not None:
        told["seconds_all"] = told["at"] - first_launch_time(run_folder, spec)
        told["dollars"] = cost.cost_dollars_until(spec, run_folder, told["at"])
    return told


def check_image_usage(run_folder: RunFolder, epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the images that were used, [] when each was used once in every epoch."""
    begins = {one.number: one.first_step for one in attempts.history(run_folder.shared) if one.members}
    steps = {one["epoch"] - 1: one["steps"] for one in epochs}
    images = {one["epoch"] - 1: one["train_images"] for one in epochs}
    return usage_log.find_usage_errors(run_folder.path / usage_log.USAGE_FOLDER, begins, images, steps)


JobResult = Mapping[str, Any]


def forecast_vs_actual(launch_forecast: Mapping[str, Any] | None, result: JobResult) -> dict[str, Any]:
    """Return what a job's result says beside the rest: the forecast made at its launch, that beside what the run took,
    and the constants it measured. Nothing of a run that is not done, or says too little.
    """
    if result.get("state") != "done":
        return {}
    try:
        found: dict[str, Any] = {"constants": calibrate(result).to_json()}
        if launch_forecast:
            found |= {"forecast": dict(launch_forecast), "against": compare_with_run(launch_forecast, result)}
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}
    return found
