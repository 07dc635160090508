"""Collects what a job has run, from its run folder, as plain data for the benchmark records.

It only reads, and asks no machine. Only epochs and steps that count are included: steps that an attempt made beyond the
checkpoint from which the next attempt resumed are left out. The rows of the epochs come from the metrics, or from the
trainers' own history where a machine was lost together with its last lines.
"""

import math
from collections.abc import Mapping, Sequence

from cluster.backends import machine_types
from cluster.backends.base import BilledBackend
from cluster.errors import ClusterError
from cluster.jobs.job import Job
from cluster.state import attempts, timeline
from cluster.state import result as state_result
from train.metrics.records import EpochRow, RowT, StartRow, StepRow, check_metrics_file, read_metrics_file
from train.recipe.history import EpochResult
from train.recipe.target import CLOCK_JUMPED
from train.tools.agent_protocol import metrics_files
from train.tools.records import encode

from .writers import JsonDict

AttemptsByNumber = Mapping[int, attempts.Attempt]

METRICS_ONLY_FIELDS = ("kind", "time", "images", "where", "gap_steps")  # of an epoch's line; not part of a record
BILLED_MACHINE_FIELDS = ("name", "type", "market", "zone", "price", "seconds", "dollars", "all")


def collect_run_data(job: Job) -> JsonDict:
    """Return what a job has run.

    Raises `ClusterError` when the job has not ended, when no epoch was validated, or when the version that trained it
    was too old, and `DamagedRecord` for a damaged line of the metrics.
    """
    if not job.has_ended:
        raise ClusterError(f"{job.name} is {job.state}; a record can only be made of a job that has ended")
    spec = job.spec
    run_folder = job.run_folder
    result = job.result
    assert result  # the job has ended
    for path in metrics_files(job.path):
        check_metrics_file(path)  # a record must not leave out what cannot be read
    attempts_by_number = {attempt.number: attempt for attempt in run_folder.attempts.all() if attempt.members}
    start_rows = effective_metrics(job, attempts_by_number, StartRow)
    training_rows = effective_metrics(job, attempts_by_number, StepRow)
    epoch_metrics = effective_metrics(job, attempts_by_number, EpochRow)
    epochs = epoch_rows(epoch_metrics, training_rows, result.epochs)
    if not any(row["top1"] is not None for row in epochs):
        status = job.status()
        reason = f": {status.reason}" if status.reason else ""
        raise ClusterError(
            f"{job.name} has validated no epoch, so there is nothing to record; it is {status.state}{reason}"
        )
    if start_rows and any(row.get("clock") is None for row in epochs):
        raise ClusterError(
            f"{job.name} cannot be recorded: {CLOCK_JUMPED} between two of its attempts, so its time is not known; "
            "run it again"
        )
    if not start_rows:
        raise ClusterError(f"{job.name} was trained by an older version, which did not note when loading began")
    last_start = start_rows[-1]
    first_attempt = attempts_by_number.get(start_rows[0].attempt)  # in which trainers began for the first time
    return {
        "job": job.name,
        "uid": spec.uid,
        "state": job.state,
        "backend": spec.backend,
        "recipe": spec.recipe.to_json(),
        "gpus": last_start.gpus,
        "max_steps": spec.train.max_steps,
        "scale": spec.train.scale,
        "commit": spec.git_commit,
        "launched_at": state_result.first_launch_time(job.run),
        "attempt_began_at": (first_attempt and first_attempt.time) or start_rows[0].begun,
        "loading_began_at": start_rows[0].begun,
        "first_step_at": next((row["began_at"] for row in epochs if row["began_at"] is not None), None),
        "train_images": last_start.train_images,
        "val_images": last_start.val_images,
        "device": last_start.device,
        "processor": last_start.processor or None,
        "precision": last_start.precision,
        "versions": last_start.versions,
        "processes_by_attempt": {str(row.attempt): row.world for row in start_rows},
        "epochs": epochs,
        "attempts": encode(timeline.attempt_rows(run_folder)),
        "recovery_costs": recovery_costs(start_rows[0].begun, training_rows, attempts_by_number),
        "target": encode(result.target),
        "schedule": encode(result.schedule),
        "result_seconds": result.clock.seconds if result.clock else None,
        "result_epochs": encode(result.epochs),
        "result_top": {"top1": result.top1, "top5": result.top5},
        "machine_counts": [len(attempt.members) for attempt in attempts_by_number.values()],
        **machine_costs(job, attempts_by_number, epochs[-1]["at"]),
    }


def effective_metrics(job: Job, attempts_by_number: AttemptsByNumber, row_type: type[RowT]) -> list[RowT]:
    """Return the rows of the metrics that count, in order: none beyond the step from which a later attempt resumed."""
    rows: list[RowT] = []
    for path in metrics_files(job.path):
        number = int(path.stem)
        last_step = min(
            (attempt.first_step for later, attempt in attempts_by_number.items() if later > number), default=math.inf
        )
        rows += [row for row in read_metrics_file(path, row_type) if isinstance(row, StartRow) or row.step <= last_step]
    return rows


def epoch_rows(
    epoch_metrics: Sequence[EpochRow], step_metrics: Sequence[StepRow], result_epochs: Sequence[EpochResult]
) -> list[JsonDict]:
    """Return a row for each epoch that has ended.

    To the epoch's result it adds "step" (of the run, at the end of the epoch), "attempt" (in which it ended),
    "first_lr" and "last_lr" (the measured learning rates of its first and last step), and moments of the wall clock:
    "began_at", "trained_at" (after its last step) and "noted_at" (when its line was written). What is not known is
    None.
    """
    row_by_epoch = {row.epoch: row for row in result_epochs}
    # Of two lines about the same epoch, the one of the later attempt counts.
    row_by_epoch |= {row.epoch: row for row in epoch_metrics}
    training_row_by_step = {row.step: row for row in step_metrics}
    epochs = list[JsonDict]()
    steps_done = 0
    for number in sorted(row_by_epoch):
        row = row_by_epoch[number]
        first_step = training_row_by_step.get(steps_done + 1)
        steps_done += row.steps
        last_step = training_row_by_step.get(steps_done)
        # The first line is written after the first step, so the epoch began one step's time before.
        images_per_second = first_step.scalars.get("times/images_per_second") if first_step else None
        images_of_step = min(row.global_batch, row.train_images)
        began_at = first_step.time - images_of_step / images_per_second if first_step and images_per_second else None
        epochs.append(
            {
                **{name: value for name, value in encode(row).items() if name not in METRICS_ONLY_FIELDS},
                "step": steps_done,
                "attempt": row.attempt if isinstance(row, EpochRow) else None,
                "first_lr": first_step.scalars.get("sizes/lr") if first_step else None,
                "last_lr": last_step.scalars.get("sizes/lr") if last_step else None,
                "noted_at": row.time if isinstance(row, EpochRow) else None,
                "began_at": began_at,
                "trained_at": last_step.time if last_step else None,
            }
        )
    return epochs


def recovery_costs(
    loading_began_at: float | None, training_rows: Sequence[StepRow], attempts_by_number: AttemptsByNumber
) -> list[JsonDict]:
    """Return, for each attempt after the first, the step from which it resumed and the seconds that it cost.

    The seconds are those of the wall clock from the checkpoint that the attempt loaded until its own first step was
    done. They are None where no metrics tell.
    """
    costs = []
    for number, attempt in list(attempts_by_number.items())[1:]:
        times_before = [row.time for row in training_rows if row.attempt < number and row.step <= attempt.first_step]
        times_after = [row.time for row in training_rows if row.attempt == number]
        checkpoint_time = times_before[-1] if times_before else loading_began_at
        seconds = times_after[0] - checkpoint_time if times_after and checkpoint_time is not None else None
        costs.append({"attempt": number, "step": attempt.first_step, "seconds": seconds})
    return costs


def machine_costs(job: Job, attempts_by_number: AttemptsByNumber, end_time: float) -> JsonDict:
    """Return the machines until `end_time`, and what the machines of the last attempt cost.

    "cost_per_hour" and "billed" are in dollars, None where a price is not known.
    """
    spec = job.spec
    last_members = attempts_by_number[max(attempts_by_number)].machine_names if attempts_by_number else ()
    backend = job.backend
    if not isinstance(backend, BilledBackend):
        # Names only: the addresses of somebody's own machines do not belong in a public record.
        own_machines = [{"name": name, "type": None, "price": None} for name in spec.machine_names]
        return {
            "is_rented": False,
            "machines": own_machines,
            "gpus_by_type": {},
            "at_work": list(last_members),
            "cost_per_hour": None,
            "billed": None,
        }
    cost = backend.job_cost()
    machines = [machine for machine in cost.machines if machine.launched <= end_time]
    price_by_name = {machine.name: machine.price for machine in machines}
    prices = [price_by_name.get(name) for name in last_members]
    known_prices = [price for price in prices if price is not None]
    return {
        "is_rented": True,
        "machines": [_select(machine.to_json(), BILLED_MACHINE_FIELDS) for machine in machines],
        "gpus_by_type": {machine.type: describe_gpus(machine.type) for machine in machines},
        "at_work": list(last_members),
        "cost_per_hour": sum(known_prices) if known_prices and len(known_prices) == len(prices) else None,
        "billed": None if cost.unknown else cost.dollars,
    }


def _select(row: JsonDict, names: Sequence[str]) -> JsonDict:
    return {name: row[name] for name in names}


def describe_gpus(type_name: str) -> str:
    """Return the GPUs of a machine type, such as "8 x A100"; empty when it has none, or is not known."""
    machine_type = machine_types.find_machine_type(type_name)
    return f"{machine_type.gpus} x {machine_type.gpu}" if machine_type and machine_type.gpu != "CPU" else ""
