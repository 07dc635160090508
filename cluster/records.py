"""Benchmark records of a run: DAWNBench's TSV and JSON, and MLPerf's log. Reads the run folder, contacts no machine.

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
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.status import JobResult
from cluster.state.timeline import AttemptRow
from infra.costs import JobCost, MachineCost
from train.metrics.records import StartRow, read_metrics_file
from train.recipe.history import EpochResult
from train.recipe.target import CLOCK_JUMPED
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
    """What the records need of a run; None for what is not known.

    `starts` has a row for each attempt in which trainers began. `epoch_ends` are the seconds from the start of loading
    the images to the end of each epoch, `peak_lr` is the highest learning rate. Without rent `cost` is None.
    """

    spec: JobSpec
    result: JobResult
    launched_at: float
    starts: tuple[StartRow, ...]
    epoch_ends: tuple[float, ...]
    peak_lr: float | None
    cost: JobCost | None

    @property
    def attempts(self) -> list[AttemptRow]:
        """The attempts that had machines."""
        return [row for row in self.result.timeline if row.machines]

    @property
    def machines(self) -> tuple[MachineCost, ...]:
        """The rented machines."""
        return self.cost.machines if self.cost else ()

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
        epochs = zip(self.result.epochs, self.epoch_ends, strict=True)
        return [(epoch, end) for epoch, end in epochs if epoch.top1 is not None]

    @property
    def cost_per_hour(self) -> float | None:
        """The dollars an hour of the machines of the last attempt, None where a price is not known."""
        price_by_name = {machine.name: machine.price for machine in self.machines}
        names = self.attempts[-1].machines if self.attempts else ()
        prices = [price for name in names if (price := price_by_name.get(name)) is not None]
        return sum(prices) if prices and len(prices) == len(names) else None


def collect_run_data(job: Job) -> RunData:
    """Return what a job trained, on which machines, and how it went, for a record.

    Raises `BadInput` for a command, `ClusterError` for a job that has not ended, validated no epoch or lacks its times.
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
    return RunData(
        spec=job.spec,
        result=result,
        launched_at=first_launch_time(job.run),
        starts=starts,
        epoch_ends=epoch_ends,
        peak_lr=max((rate for rate in rates if rate is not None), default=None),
        cost=job.backend.job_cost() if job.backend.is_billed else None,
    )


def render_tsv(run: RunData) -> str:
    """Return DAWNBench's TSV: for each validated epoch its number, hours, and accuracies in percent."""
    columns = TSV_COLUMNS_BY_DATA.get(run.spec.recipe.data.name, TSV_COLUMNS)
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
    """Return DAWNBench's JSON as plain data; "misc" has the result and more. `log_filename` names MLPerf's log."""
    _, seconds = run.validated_epochs[-1]
    price = run.cost_per_hour
    versions = run.starts[-1].versions
    return {
        "version": "v1.0",
        "author": author,
        "authorEmail": None,
        "framework": f"imgnet-cluster {versions.get('imgnet-cluster')}, PyTorch {versions.get('torch')}",
        "codeURL": None,
        "model": run.spec.recipe.model.name,
        "hardware": describe_hardware(run),
        "costPerHour": price,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(run.loading_began_at + run.epoch_ends[-1])),
        "logFilename": log_filename,
        "misc": {
            **encode(run.result),
            "recipe": run.spec.recipe.to_json(),
            "uid": run.spec.uid,
            "max_steps": run.spec.train.max_steps,
            "scale": run.spec.train.scale,
            "starts": encode(run.starts),
            "peak_lr": run.peak_lr,
            "rented": encode(run.cost),
            "billed": run.cost.dollars if run.cost and not run.cost.unknown else None,
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
        type_texts.append(f"{type_name}{gpus_text}, {run.spec.backend} {', '.join(sorted(places))}")
    machines_text = f"{counts} x {' and '.join(type_texts)}" if type_texts else f"machines: {counts}"
    unit = "GPUs" if start.device == "cuda" else "processes"
    return f"{machines_text}; {unit}: {process_counts} on {start.processor or 'a processor of unknown name'}"


def _describe_counts(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def render_mlperf_log(run: RunData, org: str | None) -> str:
    """Return the run as the lines of MLPerf's log. Accuracies are fractions, as there; times are in milliseconds.

    The lines are those that MLCommons' checker wants of the open division. `org` is who submits the record.
    """
    lines: list[str] = []

    def add_event(at: float, event_type: str, key: str, value: object = None, **metadata: object) -> None:
        event = {"namespace": "", "time_ms": round(1000 * at), "event_type": event_type, "key": key, "value": value}
        lines.append(f":::MLLOG {json.dumps({**event, 'metadata': metadata})}\n")

    began_at = run.loading_began_at
    submission: JsonDict = {
        "submission_org": org,
        "submission_platform": describe_hardware(run),
        "submission_division": "open",  # the closed division prescribes model, schedule and optimizer
        "submission_status": "cloud" if run.cost else "onprem",
        "submission_benchmark": "resnet",  # the classification of images; the open division allows any model
    }
    for key, value in submission.items():
        add_event(run.first_attempt_at, POINT_IN_TIME, key, value)
    add_event(run.first_attempt_at, POINT_IN_TIME, "cache_clear", False)  # the images may be in memory from before
    add_event(run.first_attempt_at, INTERVAL_START, "init_start")
    for key, value in mlperf_settings(run).items():
        add_event(began_at, POINT_IN_TIME, key, value)
    add_event(began_at, INTERVAL_END, "init_stop")
    add_event(began_at, INTERVAL_START, "run_start")
    global_batch = run.result.epochs[0].global_batch
    for row, end in zip(run.result.epochs, run.epoch_ends, strict=True):
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
    target = run.result.target
    has_succeeded = target.reached if target else run.result.state == JobState.DONE
    add_event(began_at, INTERVAL_END, "run_stop", status="success" if has_succeeded else "aborted")
    return "".join(lines)


def mlperf_settings(run: RunData) -> JsonDict:
    """Return the settings that MLPerf logs before a run, by MLPerf's keys. Learning rates are the executed ones."""
    optim = run.spec.recipe.optim
    optimizer_settings = {
        "base_learning_rate": run.peak_lr,
        "end_learning_rate": run.result.epochs[-1].lr,
        "weight_decay": optim.weight_decay,
    }
    key_prefix = "opt"
    if optim.name in ("sgd", "lars"):  # MLPerf defines keys of their own for these two
        optimizer_settings["momentum"] = optim.momentum
        key_prefix = f"{optim.name}_opt"
    return {
        "model_name": run.spec.recipe.model.name,
        "global_batch_size": run.result.epochs[0].global_batch,
        "train_samples": run.starts[-1].train_images,
        "eval_samples": run.starts[-1].val_images,
        "seed": run.spec.recipe.seed,
        "opt_name": optim.name,
        **{f"{key_prefix}_{key}": value for key, value in optimizer_settings.items()},
    }
