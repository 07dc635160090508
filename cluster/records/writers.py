"""Writes a run as benchmark records: DAWNBench's TSV and JSON, and MLPerf's log.

Functions from the data that `cluster/records/run_data.py` collects to texts. Nothing is typed by hand except who the
author is, and what is not known is null.
"""

import json
import time
from typing import Any

from cluster.backends.aws.shipped_tables import find_machine_type
from train.tools.records import encode

from .run_data import RunData

JsonDict = dict[str, Any]  # Any: JSON of any shape

# Columns of DAWNBench's TSV. Its tests want exactly these, and no top-5 accuracy for CIFAR-10.
TSV_COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
TSV_COLUMNS_BY_DATA = {"cifar10": ("epoch", "hours", "top1Accuracy")}
CLOCK_DESCRIPTION = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
POINT_IN_TIME = "POINT_IN_TIME"
INTERVAL_START = "INTERVAL_START"
INTERVAL_END = "INTERVAL_END"


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
