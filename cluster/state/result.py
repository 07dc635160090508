"""Writes result.json when a job has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from train.data.order import usage_log
from train.forecast import ForecastRecord, MeasuredRun, calibrate, compare_with_run
from train.metrics.records import EpochRow, TrainResult
from train.recipe import target
from train.recipe.history import EpochResult
from train.tools.agent_protocol import RESULT_FILE
from train.tools.filesystem import read_json_lines, to_json_bytes, write_atomic
from train.tools.records import decode, encode, read_record

from . import attempts, timeline
from .run_folder import RunFolder
from .spec import JobSpec
from .status import (
    add_job_times,
    best_informed_status,
    infer_end_state,
    machine_rows,
    read_metrics,
    reported_time_table,
    seconds_by_state,
)

JobResult = Mapping[str, Any]


class CostMeter(Protocol):
    """Says what a job has cost. Every backend implements it."""

    def cost_dollars(self) -> float:
        """Return what the job has cost until now."""

    def cost_dollars_until(self, moment: float) -> float | None:
        """Return what the job had cost at `moment` (seconds since 1970); None when a machine's price is unknown."""


def first_launch_time(run_folder: RunFolder, spec: JobSpec) -> float:
    """Return when the job was first launched, in seconds since 1970.

    A job that waited in a queue was launched when its machines were first recorded: in the journal of the backend, or
    as a state of an agent.
    """
    if not spec.queue:
        return spec.created
    first_signs = [float(row["time"]) for row in read_json_lines(run_folder.path / "cloud.jsonl", "time")][:1]
    for name in spec.machine_names:
        first_signs += [begin for _, begin in timeline.state_changes(run_folder, name)[:1]]
    return min(first_signs, default=spec.created)


def write_result(
    run_folder: RunFolder,
    spec: JobSpec,
    cost: CostMeter,
    unreachable: Sequence[str] = (),
    end_reason: str = "",
    end_state: str = "failed",
) -> None:
    """Write the result of a job that has no living agent: what the trainers measured, and how the job ended.

    `unreachable` are machines that did not answer when the job's processes were ended. `end_reason` and `end_state` are
    given when the job never started or was ended from outside; a job that trained to its end is "done" all the same.
    The seconds of training and validation come from the trainers, all other seconds from the agents.
    """
    trainer_result = read_record(run_folder.shared / RESULT_FILE, TrainResult)
    if trainer_result:
        state, reason = "done", ""
    elif end_reason:
        state, reason = end_state, end_reason
    else:
        state, reason = infer_end_state(run_folder, spec)
    epochs: Sequence[EpochResult] = trainer_result.epochs if trainer_result else read_metrics(run_folder.path, EpochRow)
    validated_epochs = [epoch for epoch in epochs if epoch.top1 is not None]
    agent_seconds = seconds_by_state(run_folder, spec)
    trainer_seconds = (
        {part: seconds for part, seconds in trainer_result.seconds.items() if part != "attempt"}
        if trainer_result
        else {}
    )
    where = trainer_result.where if trainer_result else reported_time_table(best_informed_status(run_folder, spec))
    newest = attempts.newest_attempt(run_folder.shared)
    result = {
        "job": spec.name,
        "recipe": spec.recipe.name,
        "state": state,
        "reason": reason,
        "top1": validated_epochs[-1].top1 if validated_epochs else None,
        "top5": validated_epochs[-1].top5 if validated_epochs else None,
        "epochs": encode(epochs),
        "images_per_second": None,
        "goodput": None,
        "seed": spec.recipe.seed,
        **(encode(trainer_result) if trainer_result else {}),
        "where": encode(add_job_times(run_folder, spec, where, agent_seconds["total"])) if where else None,
        "seconds": {**agent_seconds, **trainer_seconds},
        "machines": spec.machines,
        "procs": spec.procs,
        "setup": {name: row["seconds"] for name, row in machine_rows(run_folder, spec).items()},
        "attempts": attempts.last_training_attempt_number(run_folder.shared, newest),
        "timeline": timeline.attempt_rows(run_folder.path, run_folder.shared),
        "dollars": cost.cost_dollars(),
        "backend": spec.backend,
        "git_commit": spec.git_commit,
        "did_not_answer": list(unreachable),
    }
    if trainer_result and result["goodput"]:
        # The trainers do not know the time that changes of attempt cost: it adds to their wall time.
        wall_seconds = trainer_result.seconds.get("first step to last", 0.0)
        if wall_seconds:
            lost_seconds = timeline.lost_seconds(run_folder.path, run_folder.shared)
            result["goodput"] *= wall_seconds / (wall_seconds + lost_seconds)
    result["target"] = encode(target_outcome(run_folder, spec, cost, epochs))
    result |= forecast_vs_actual(spec.forecast, {**result, "state": state})
    if trainer_result and spec.train.log_ids:
        result["ids_wrong"] = check_image_usage(run_folder, trainer_result.epochs)
    write_atomic(run_folder.result_path, to_json_bytes({**result, "state": state}))


def target_outcome(
    run_folder: RunFolder, spec: JobSpec, cost: CostMeter, epochs: Sequence[EpochResult]
) -> target.TargetOutcome | None:
    """Return whether and when the accuracy target of the job (or of its recipe) was reached; None without a target.

    When it was reached, `seconds_all` counts the seconds since the job's first launch, and `dollars` is the cost until
    then.
    """
    outcome = target.target_outcome(target.Target.from_options(spec.train.target, spec.recipe), epochs)
    if outcome is None or outcome.at is None:
        return outcome
    return replace(
        outcome,
        seconds_all=outcome.at - first_launch_time(run_folder, spec),
        dollars=cost.cost_dollars_until(outcome.at),
    )


def check_image_usage(run_folder: RunFolder, epochs: Sequence[EpochResult]) -> list[str]:
    """Return the errors in the log of used images, [] when each image was used exactly once in every epoch."""
    training_attempts = [attempt for attempt in attempts.history(run_folder.shared) if attempt.members]
    first_steps = {attempt.number: attempt.first_step for attempt in training_attempts}
    steps = {epoch.epoch - 1: epoch.steps for epoch in epochs}
    images = {epoch.epoch - 1: epoch.train_images for epoch in epochs}
    return usage_log.find_usage_errors(run_folder.path / usage_log.USAGE_FOLDER, first_steps, images, steps)


def forecast_vs_actual(launch_forecast: Mapping[str, Any] | None, result: JobResult) -> dict[str, Any]:
    """Return the forecast part of a result.

    `constants` are the machine constants that the run measured. When a forecast was made at the launch, `forecast`
    holds it and `against` compares it with the run. Returns {} for a job that is not done or measured too little.
    """
    if result.get("state") != "done":
        return {}
    try:
        run = decode(MeasuredRun, result)
        comparison: dict[str, Any] = {"constants": encode(calibrate(run))}
        if launch_forecast:
            comparison["forecast"] = dict(launch_forecast)
            comparison["against"] = encode(compare_with_run(decode(ForecastRecord, launch_forecast), run))
    except (ValueError, ZeroDivisionError):
        return {}
    return comparison
