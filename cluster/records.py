"""A run as benchmark records: DAWNBench's TSV and JSON, and MLPerf's log. Reads the run folder, and asks no machine.

Nothing is typed by hand except who the author is, and what is not known is null.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from cluster.backends.aws.shipped_tables import find_machine_type
from cluster.errors import ClusterError
from cluster.jobs import checkpoints
from cluster.jobs.job import Job
from cluster.state.result import first_launch_time
from cluster.state.states import JobState
from cluster.state.timeline import AttemptRow
from infra.costs import MachineCost
from train.metrics.records import StartRow, read_metrics_file
from train.recipe.history import EpochResult
from train.recipe.schema import Recipe
from train.recipe.target import CLOCK_JUMPED, TargetOutcome
from train.tools.agent_protocol import metrics_files
from train.tools.records import encode

JsonDict = dict[str, Any]  # Any: JSON of any shape

# Columns of DAWNBench's TSV. Its tests want exactly these, and no top-5 accuracy for CIFAR-10.
TSV_COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
TSV_COLUMNS_BY_DATA = {"cifar10": ("epoch", "hours", "top1Accuracy")}
CLOCK_DESCRIPTION = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
POINT_IN_TIME = "POINT_IN_TIME"
INTERVAL_START = "INTERVAL_START"
INTERVAL_END = "INTERVAL_END"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run that its records need. Unknown values are None.

    `starts` has a row for each attempt in which trainers began, `attempts` a row for each that had machines.
    `epoch_ends` are the seconds from the start of loading the images to the end of each epoch, `peak_lr` the highest
    learning rate of a step. Only of rented machines more than the name is known: `machines` is empty for others, and
    `billed` (dollars) None. `launched_at` is a Unix time.
    """

    job: str
    uid: str
    state: JobState
    backend: str
    is_rented: bool
    recipe: Recipe
    max_steps: int | None
    scale: float
    commit: str | None
    launched_at: float
    starts: tuple[StartRow, ...]
    epochs: tuple[EpochResult, ...]
    epoch_ends: tuple[float, ...]
    peak_lr: float | None
    target: TargetOutcome | None
    attempts: tuple[AttemptRow, ...]
    machines: tuple[MachineCost, ...]
    billed: float | None

    @property
    def loading_began_at(self) -> float:
        """When the first attempt began to load the images, as a Unix time."""
        return self.starts[0].begun

    @property
    def first_attempt_at(self) -> float:
        """When the machines agreed on the first attempt in which trainers began, as a Unix time."""
        times = [row.at for row in self.attempts if row.attempt == self.starts[0].attempt]
        return min([*times, self.loading_began_at])

    @property
    def validated_epochs(self) -> list[tuple[EpochResult, float]]:
        """The epochs that have accuracies, each with its end in seconds."""
        return [(epoch, end) for epoch, end in zip(self.epochs, self.epoch_ends, strict=True) if epoch.top1 is not None]

    @property
    def cost_per_hour(self) -> float | None:
        """The dollars an hour of the machines of the last attempt, None where a price is not known."""
        price_by_name = {machine.name: machine.price for machine in self.machines}
        names = self.attempts[-1].machines if self.attempts else ()
        prices = [price for name in names if (price := price_by_name.get(name)) is not None]
        return sum(prices) if prices and len(prices) == len(names) else None

    @property
    def has_succeeded(self) -> bool:
        """Whether the run reached its target or, without a target, ran to its end."""
        return self.target.reached if self.target else self.state == JobState.DONE


def collect_run_data(job: Job) -> RunData:
    """Return what a job has run.

    Raises `BadInput` for a job of a command, and `ClusterError` when the job has not ended, has validated no epoch, or
    lacks the times of its run.
    """
    checkpoints.require_recipe(job)
    result = job.result
    if result is None:
        raise ClusterError(f"{job.name} is {job.state.phrase}; a record can only be made of a job that has ended")
    if not any(epoch.top1 is not None for epoch in result.epochs):
        reason = f": {result.reason}" if result.reason else ""
        raise ClusterError(f"{job.name} has no validated epoch to record; it is {result.state}{reason}")
    epoch_ends = tuple(epoch.clock for epoch in result.epochs if epoch.clock is not None)
    if len(epoch_ends) < len(result.epochs):
        raise ClusterError(
            f"{job.name} cannot be recorded: {CLOCK_JUMPED} between two of its attempts, so its time is not known; "
            "run it again"
        )
    first_rows = (next(read_metrics_file(path, StartRow), None) for path in metrics_files(job.path))
    starts = tuple(row for row in first_rows if row)
    if not starts:
        raise ClusterError(f"{job.name} cannot be recorded: its metrics lack the time at which loading began")
    rates = (row.scalars.get("sizes/lr") for row in job.run_folder.steps())
    cost = job.backend.job_cost() if job.backend.is_billed else None
    spec = job.spec
    return RunData(
        job=job.name,
        uid=spec.uid,
        state=result.state,
        backend=spec.backend,
        is_rented=cost is not None,
        recipe=spec.recipe,
        max_steps=spec.train.max_steps,
        scale=spec.train.scale,
        commit=spec.git_commit,
        launched_at=first_launch_time(job.run),
        starts=starts,
        epochs=result.epochs,
        epoch_ends=epoch_ends,
        peak_lr=max((rate for rate in rates if rate is not None), default=None),
        target=result.target,
        attempts=tuple(row for row in result.timeline if row.machines),
        machines=cost.machines if cost else (),
        billed=None if cost is None or cost.unknown else cost.dollars,
    )


def render_tsv(run: RunData) -> str:
    """Return DAWNBench's TSV: for each validated epoch its number, hours, and accuracies in percent."""
    columns = TSV_COLUMNS_BY_DATA.get(run.recipe.data.name, TSV_COLUMNS)
    rows = [
        (
            f"{epoch.epoch}",
            f"{end / 3600:.6f}",
            f"{epoch.top1:.4f}",
            f"{100.0 if epoch.top5 is None else epoch.top5:.4f}",
        )
        for epoch, end in run.validated_epochs
    ]
    return "".join("\t".join(row[: len(columns)]) + "\n" for row in (columns, *rows))


def dawnbench_entry(run: RunData, author: str | None, log_filename: str | None) -> JsonDict:
    """Return DAWNBench's JSON as plain data; its field "misc" holds the whole run.

    `log_filename` is the name of MLPerf's log beside it.
    """
    _, seconds = run.validated_epochs[-1]
    price = run.cost_per_hour
    versions = run.starts[-1].versions
    return {
        "version": "v1.0",
        "author": author,
        "authorEmail": None,
        "framework": f"imgnet-cluster {versions.get('imgnet-cluster')}, PyTorch {versions.get('torch')}",
        "codeURL": None,
        "model": run.recipe.model.name,
        "hardware": describe_hardware(run),
        "costPerHour": price,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(run.loading_began_at + run.epoch_ends[-1])),
        "logFilename": log_filename,
        "misc": {
            **encode(run),
            "recipe": run.recipe.to_json(),
            "clock": CLOCK_DESCRIPTION,
            "hours": seconds / 3600,
            "dollars": None if price is None else seconds / 3600 * price,
            "seconds_to_loading": run.loading_began_at - run.launched_at,
        },
    }


def describe_hardware(run: RunData) -> str:
    """Return one line with the machines and processors of the run."""
    start = run.starts[-1]
    counts = _describe_counts([len(attempt.machines) for attempt in run.attempts] or [1])
    process_counts = _describe_counts([row.world for row in run.starts])
    type_texts = []
    for type_name in sorted({machine.type for machine in run.machines}):
        machine_type = find_machine_type(type_name)
        gpus_text = f" ({machine_type.gpus} x {machine_type.gpu})" if machine_type and machine_type.gpu != "CPU" else ""
        places = {f"{machine.zone} {machine.market}" for machine in run.machines if machine.type == type_name}
        type_texts.append(f"{type_name}{gpus_text}, {run.backend} {', '.join(sorted(places))}")
    machines_text = f"{counts} x {' and '.join(type_texts)}" if type_texts else f"machines: {counts}"
    unit = "GPUs" if start.device == "cuda" else "processes"
    return f"{machines_text}; {unit}: {process_counts} on {start.processor or 'a processor of unknown name'}"


def _describe_counts(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def render_mlperf_log(run: RunData, org: str | None) -> str:
    """Return the run as the lines of MLPerf's log. Accuracies are fractions, as there; times are in milliseconds.

    The lines are those that MLCommons' checker wants of the open division. `org` is who submits the record. An epoch
    begins where the one before it ends.
    """
    lines: list[str] = []

    def add_event(at: float, event_type: str, key: str, value: object = None, **metadata: object) -> None:
        event = {"namespace": "", "time_ms": round(1000 * at), "event_type": event_type, "key": key, "value": value}
        lines.append(f":::MLLOG {json.dumps({**event, 'metadata': metadata})}\n")

    began_at = run.loading_began_at
    for key, value in submission_settings(run, org).items():
        add_event(run.first_attempt_at, POINT_IN_TIME, key, value)
    add_event(run.first_attempt_at, POINT_IN_TIME, "cache_clear", False)  # the images may be in memory from before
    add_event(run.first_attempt_at, INTERVAL_START, "init_start")
    for key, value in mlperf_settings(run).items():
        add_event(began_at, POINT_IN_TIME, key, value)
    add_event(began_at, INTERVAL_END, "init_stop")
    add_event(began_at, INTERVAL_START, "run_start")
    global_batch = run.epochs[0].global_batch
    for row, end in zip(run.epochs, run.epoch_ends, strict=True):
        ended_at = run.loading_began_at + end
        trained_at = max(began_at, ended_at - row.val_seconds)
        epoch = row.epoch
        if row.global_batch != global_batch:
            global_batch = row.global_batch
            add_event(began_at, POINT_IN_TIME, "global_batch_size", global_batch, epoch_num=epoch)
        add_event(began_at, INTERVAL_START, "epoch_start", epoch_num=epoch)
        add_event(trained_at, INTERVAL_END, "epoch_stop", epoch_num=epoch)
        if row.top1 is not None:
            top5 = {} if row.top5 is None else {"top5": row.top5 / 100}
            add_event(trained_at, INTERVAL_START, "eval_start", epoch_num=epoch)
            add_event(ended_at, POINT_IN_TIME, "eval_accuracy", row.top1 / 100, epoch_num=epoch, **top5)
            add_event(ended_at, INTERVAL_END, "eval_stop", epoch_num=epoch)
        began_at = ended_at
    add_event(began_at, INTERVAL_END, "run_stop", status="success" if run.has_succeeded else "aborted")
    return "".join(lines)


def submission_settings(run: RunData, org: str | None) -> JsonDict:
    """Return what MLPerf logs about a submission, by MLPerf's keys."""
    return {
        "submission_org": org,
        "submission_platform": describe_hardware(run),
        "submission_division": "open",  # the closed division prescribes model, schedule and optimizer
        "submission_status": "cloud" if run.is_rented else "onprem",
        "submission_benchmark": "resnet",  # the classification of images; the open division allows any model
    }


def mlperf_settings(run: RunData) -> JsonDict:
    """Return the settings that MLPerf logs before a run, by MLPerf's keys. Learning rates are the executed ones."""
    optim = run.recipe.optim
    optimizer_settings = {
        "base_learning_rate": run.peak_lr,
        "end_learning_rate": run.epochs[-1].lr,
        "weight_decay": optim.weight_decay,
    }
    key_prefix = "opt"
    if optim.name in ("sgd", "lars"):  # MLPerf defines keys of their own for these two
        optimizer_settings["momentum"] = optim.momentum
        key_prefix = f"{optim.name}_opt"
    return {
        "model_name": run.recipe.model.name,
        "global_batch_size": run.epochs[0].global_batch,
        "train_samples": run.starts[-1].train_images,
        "eval_samples": run.starts[-1].val_images,
        "seed": run.recipe.seed,
        "opt_name": optim.name,
        **{f"{key_prefix}_{key}": value for key, value in optimizer_settings.items()},
    }
