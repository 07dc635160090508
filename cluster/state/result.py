"""Writes result.json when a job has ended."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from cluster.connectors import untrusted
from infra.costs import JobCost
from train.data.order import usage_log
from train.forecast import Forecast, MeasuredRun, calibrate, compare_with_run
from train.metrics.records import TrainResult
from train.recipe import target
from train.recipe.history import EpochResult
from train.recipe.schema import Recipe
from train.tools.agent_protocol import RESULT_FILE, USAGE_FOLDER, Fault
from train.tools.files import write_atomic
from train.tools.records import DamagedRecord, encode, read_record
from train.tools.text_files import read_json_lines, to_json_bytes

from . import timeline
from .run_folder import Run, RunFolder
from .states import JobState
from .status import (
    JobResult,
    add_job_times,
    best_informed_status,
    infer_end_state,
    machine_rows,
    reported_time_table,
    seconds_by_state,
)

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 8_000_000  # a week of epochs of a minute; read, it takes twenty times the memory
LEFT_OUT = "the history of the job is too long to be kept whole: the oldest attempts, epochs and states are left out"


class CostMeter(Protocol):
    """Says what a job has cost. Every backend implements it."""

    is_billed: ClassVar[bool]  # whether the job costs anything

    def job_cost(self, moment: float | None = None) -> JobCost:
        """Return what each machine has cost until `moment` (seconds since 1970; None: until now)."""


def first_launch_time(run: Run) -> float:
    """Return when the job, or of a queued one its first machine, was launched, in seconds since 1970."""
    if not run.spec.queue:
        return run.spec.created
    first_signs = [float(row["time"]) for row in read_json_lines(run.folder.journal_path, "time")][:1]
    for name in run.spec.machine_names:
        first_signs += [begin for _, begin in timeline.state_changes(run.folder, name)[:1]]
    return min(first_signs, default=run.spec.created)


def write_result(
    run: Run,
    cost: CostMeter,
    unreachable: Sequence[str] = (),
    end_reason: str = "",
    end_state: JobState = JobState.FAILED,
) -> None:
    """Write the result of a job that has no living agent: what the trainers measured, and how the job ended.

    `unreachable` are machines that did not answer when the job's processes were ended. `end_reason` and `end_state` are
    given when the job never started or was ended from outside; a job that trained to its end is "done" all the same.
    The seconds of training and validation come from the trainers, all other seconds from the agents.
    """
    try:
        measured = read_record(run.folder.shared / RESULT_FILE, TrainResult, 2 * MAX_RESULT_BYTES)
    except DamagedRecord as error:  # the machines wrote it: it must not keep the job from its end
        measured = None
        end_reason, end_state = f"the result of the trainers is damaged: {error}", JobState.FAILED
    if measured:
        state, reason = JobState.DONE, ""
        usage_errors = check_image_usage(run.folder, measured.epochs) if run.spec.train.log_ids else None
    else:
        state, reason = (end_state, end_reason) if end_reason else infer_end_state(run)
        measured = _measurements_so_far(run)
        usage_errors = None
    agreed = run.folder.attempts.agreed_end(run.folder.launch_id)
    agent_seconds = seconds_by_state(run)
    history = timeline.read_timeline(run.folder, run.spec.own_command is not None)
    trainer_seconds = {part: seconds for part, seconds in measured.seconds.items() if part != "attempt"}
    measured = replace(
        measured,
        recipe=measured.recipe or run.spec.workload.name,
        seed=run.spec.workload.seed
        if measured.seed is None and isinstance(run.spec.workload, Recipe)
        else measured.seed,
        goodput=_job_goodput(run, measured, history),
        where=add_job_times(run, measured.where, agent_seconds["total"]) if measured.where else None,
        seconds={**agent_seconds, **trainer_seconds},
        target=target_outcome(run, cost, measured.epochs),
        procs=run.spec.procs,
        git_commit=run.spec.git_commit,
    )
    result = JobResult(
        **vars(measured),
        job=run.spec.name,
        state=state,
        reason=reason,
        machines=run.spec.machines,
        setup={name: row.seconds for name, row in machine_rows(run).items()},
        attempts=run.folder.attempts.last_training_number(),
        timeline=history.rows,
        dollars=cost.job_cost().dollars,
        backend=run.spec.backend,
        did_not_answer=list(unreachable),
        ids_wrong=usage_errors,
        is_input_wrong=state == JobState.FAILED and agreed is not None and agreed.fault == Fault.INPUT,
    )
    content = _limited_json(with_forecast(result, run.spec.forecast))
    if run.folder.is_history_cut:
        logger.warning(LEFT_OUT)
    write_atomic(run.folder.result_path, content)


def _limited_json(result: JobResult) -> bytes:
    """Return a result as JSON of limited size: without the oldest epochs and attempts, or only the outcome."""
    content = to_json_bytes(encode(result))
    if len(content) > MAX_RESULT_BYTES:
        logger.warning(LEFT_OUT)
    while len(content) > MAX_RESULT_BYTES and (result.epochs or result.timeline):
        epochs, rows = result.epochs, result.timeline
        result = replace(result, epochs=epochs[(len(epochs) + 1) // 2 :], timeline=rows[(len(rows) + 1) // 2 :])
        content = to_json_bytes(encode(result))
    if len(content) <= MAX_RESULT_BYTES:
        return content
    kept = ("job", "recipe", "state", "machines", "attempts", "dollars", "backend", "did_not_answer")
    outcome: dict[str, Any] = {name: getattr(result, name) for name in kept}
    reason, seconds = untrusted.one_line(result.reason), {"total": result.seconds["total"]}
    return to_json_bytes(encode(JobResult(**outcome, reason=reason, seconds=seconds, epochs=())))


def _measurements_so_far(run: Run) -> TrainResult:
    epochs = run.folder.epochs()
    last_validated = next((epoch for epoch in reversed(epochs) if epoch.top1 is not None), None)
    where = None
    with contextlib.suppress(DamagedRecord):  # a machine wrote it: it must not keep the job from its end
        where = reported_time_table(best_informed_status(run))
    return TrainResult(
        epochs=tuple(epochs),
        top1=last_validated.top1 if last_validated else None,
        top5=last_validated.top5 if last_validated else None,
        where=where,
    )


def _job_goodput(run: Run, measured: TrainResult, history: timeline.Timeline) -> float | None:
    """Return the trainers' goodput with the time that changes of attempt cost. They do not know that time."""
    if run.spec.own_command:
        return history.goodput
    wall_seconds = measured.seconds.get("first step to last without losses", 0.0)
    if not measured.goodput or not wall_seconds:
        return measured.goodput
    return measured.goodput * wall_seconds / (wall_seconds + history.lost_seconds)


def target_outcome(run: Run, cost: CostMeter, epochs: Sequence[EpochResult]) -> target.TargetOutcome | None:
    """Return whether and when the accuracy target of the job (or of its recipe) was reached; None without a target.

    When it was reached, `seconds_all` counts from the job's first launch, and `dollars` is the cost until then.
    """
    if run.spec.own_command:
        return None
    outcome = target.target_outcome(target.Target.from_options(run.spec.train.target, run.spec.recipe), epochs)
    if outcome is None or outcome.at is None:
        return outcome
    seconds_all = outcome.at - first_launch_time(run)
    cost_until = cost.job_cost(outcome.at)
    return replace(
        outcome,
        seconds_all=seconds_all if seconds_all >= (outcome.seconds or 0.0) else None,  # else the clock jumped
        dollars=cost_until.dollars if cost.is_billed and not cost_until.unknown else None,
    )


def check_image_usage(run_folder: RunFolder, epochs: Sequence[EpochResult]) -> list[str]:
    """Return the errors in the log of used images, [] when each image was used exactly once in every epoch."""
    training_attempts = [attempt for attempt in run_folder.attempts.all() if attempt.members]
    first_steps = {attempt.number: attempt.first_step for attempt in training_attempts}
    steps = {epoch.epoch - 1: epoch.steps for epoch in epochs}
    images = {epoch.epoch - 1: epoch.train_images for epoch in epochs}
    return usage_log.find_usage_errors(run_folder.path / USAGE_FOLDER, first_steps, images, steps)


def with_forecast(result: JobResult, forecast: Forecast | None) -> JobResult:
    """Add the constants that a run measured, and the comparison with its forecast, unless it measured too little."""
    if result.state != JobState.DONE or result.schedule is None or result.schedule_gpus is None:
        return result
    run = MeasuredRun(
        processes=result.procs * result.machines,
        machines=result.machines,
        epochs=result.epochs,
        schedule=result.schedule,
        schedule_gpus=result.schedule_gpus,
    )
    try:
        constants = calibrate(run, result.job or result.recipe, result.start_seconds())
    except (ValueError, ZeroDivisionError):
        return result
    if not forecast:
        return replace(result, constants=constants)
    start_seconds = sum(result.where.start.values()) if result.where else 0.0
    comparison = compare_with_run(forecast, result.epochs, start_seconds)
    return replace(result, constants=constants, forecast=forecast, against=comparison)
