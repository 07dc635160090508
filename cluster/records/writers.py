"""Writes a run as benchmark records: DAWNBench's TSV and JSON, and MLPerf's log.

Pure functions from the data that `cluster/records/run_data.py` collects to texts. Nothing is typed by hand except who
the author is, and what is not known is null.
"""

import json
import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.recipe.components import OPTIMIZERS
from train.recipe.schema import REFERENCE_BATCH, Phase, Recipe
from train.tools.filesystem import json_roundtrip
from train.tools.records import decode, encode

from .run_data import RunData

JsonDict = dict[str, Any]  # Any: JSON of any shape, also of files that others wrote

# Columns of DAWNBench's TSV. Its tests want exactly these, and no top-5 accuracy for CIFAR-10.
TSV_COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
TSV_COLUMNS_BY_DATA = {"cifar10": ("epoch", "hours", "top1Accuracy")}
CLOCK_DESCRIPTION = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
RECORDED_PHASE_FIELDS = (  # fields of the recipe's phases that a record repeats
    "batch",
    "shape",
    "copy",
    "min_scale",
    "rect_train",
    "rect_val",
    "frozen",
    "validate",
)
OPTIMIZERS_BY_SETTING = {  # for settings that only some of the built-in optimizers use (train/optim/factory.py)
    "momentum": ("sgd", "lars"),
    "nesterov": ("sgd", "lars"),
    "trust": ("lars",),
    "lars_form": ("lars",),
    "betas": ("lamb", "adamw"),
    "eps": ("lamb", "adamw"),
    # LARS and LAMB never decay norms and biases, so these settings have no effect there.
    "norm_decay": ("sgd", "adamw"),
    "bias_decay": ("sgd", "adamw"),
}


@dataclass(frozen=True, kw_only=True)
class DawnbenchEntry:
    """The fields of a DAWNBench entry (JSON), under the names that DAWNBench gives them."""

    version: str
    author: str | None
    authorEmail: str | None
    framework: str
    codeURL: str | None
    model: str
    hardware: str
    costPerHour: float | None
    timestamp: str
    logFilename: str | None
    misc: RunData


# --- DAWNBench ------------------------------------------------------------------------------------------------------


def render_tsv(run: RunData) -> str:
    """Return DAWNBench's TSV: for each validated epoch its number, hours, and accuracies in percent."""
    columns = tsv_columns(run.recipe)
    rows = [
        (f"{epoch.epoch}", f"{(epoch.clock or 0.0) / 3600:.6f}", f"{epoch.top1:.4f}", f"{epoch.top5:.4f}")
        for epoch in run.validated_epochs
    ]
    return "".join("\t".join(row[: len(columns)]) + "\n" for row in (columns, *rows))


def tsv_columns(recipe: Recipe) -> tuple[str, ...]:
    """Return the columns that DAWNBench wants for the data set of a recipe."""
    return TSV_COLUMNS_BY_DATA.get(recipe.data.name, TSV_COLUMNS)


def dawnbench_entry(
    run: RunData,
    author: str | None = None,
    email: str | None = None,
    code_url: str | None = None,
    log_filename: str | None = None,
) -> JsonDict:
    """Return DAWNBench's JSON as plain data.

    `log_filename` is the name of MLPerf's log beside it. The field "misc" holds the whole run, from which
    `decode_entry` makes an equal `RunData`, and what follows from it.
    """
    recipe = run.recipe.to_json()
    optimizer = used_optimizer_settings(recipe["optim"])
    hours = (run.validated_epochs[-1].clock or 0.0) / 3600
    price = run.cost_per_hour
    entry = {
        "version": "v1.0",
        "author": author,
        "authorEmail": email,
        "framework": f"imgnet-cluster {run.versions.get('imgnet-cluster')}, PyTorch {run.versions.get('torch')}",
        "codeURL": code_url,
        "model": run.recipe.model.name,
        "hardware": describe_hardware(run),
        "costPerHour": price,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(run.epochs[-1].at)),
        "logFilename": log_filename,
        "misc": {
            **encode(run),
            "clock": CLOCK_DESCRIPTION,
            "hours": hours,
            "dollars": None if price is None else hours * price,
            "seconds_to_loading": run.loading_began_at - run.launched_at,
            "seconds_to_first_step": run.seconds_to_first_step,
            "seed": recipe["seed"],
            "optimizer": optimizer,
            "comm": recipe["comm"],
            "schedule": executed_phases(run),
            "recipe": {**recipe, "optim": optimizer},
        },
    }
    return dict(json_roundtrip(entry))


def decode_entry(entry: object) -> RunData:
    """Return the run that a DAWNBench JSON describes. Raises `DamagedRecord`."""
    return decode(DawnbenchEntry, entry, "no record of this program").misc


def used_optimizer_settings(optim: JsonDict) -> JsonDict:
    """Return the settings that the optimizer uses; all settings for an optimizer that is not built in."""
    name = optim["name"]
    return {
        setting: value
        for setting, value in optim.items()
        if name not in OPTIMIZERS or name in OPTIMIZERS_BY_SETTING.get(setting, OPTIMIZERS)
    }


def executed_phases(run: RunData) -> list[JsonDict]:
    """Return the phases as they were executed, from the epochs of the run and the phases of its recipe."""
    phases = []
    for (phase, size), group in groupby(run.epochs, key=lambda epoch: (phase_of(run.recipe, epoch.epoch), epoch.size)):
        epochs = list(group)
        rates = [epochs[0].first_lr, epochs[-1].last_lr]
        global_batch = epochs[0].global_batch
        phases.append(
            {
                "start": epochs[0].epoch - 1,
                "end": epochs[-1].epoch,
                "size": size,
                **{name: getattr(phase, name) for name in RECORDED_PHASE_FIELDS},
                "global_batch": global_batch,
                "steps": sum(epoch.steps for epoch in epochs),
                "lr": rates,
                "lr_per_256": [None if rate is None else rate * REFERENCE_BATCH / global_batch for rate in rates],
            }
        )
    return phases


def phase_of(recipe: Recipe, epoch_number: int) -> Phase:
    """Return the recipe's phase that contains an epoch, counted from 1. Raises `ValueError`: none does."""
    for phase in recipe.phases:
        first_epoch, end_epoch = phase.epochs
        if first_epoch < epoch_number <= end_epoch:
            return phase
    raise ValueError(f"no phase of the recipe contains epoch {epoch_number}")


def describe_hardware(run: RunData) -> str:
    """Return one line with the machines and processors of the run."""
    machine_counts = [len(attempt.machines) for attempt in run.attempts] or [1]
    type_texts = []
    for type_name in sorted({machine.type for machine in run.machines if machine.type}):
        gpus = run.gpus_by_type.get(type_name)
        gpus_text = f" ({gpus})" if gpus else ""
        of_type = [machine for machine in run.machines if machine.type == type_name]
        locations = sorted({f"{machine.zone} {machine.market}" for machine in of_type})
        type_texts.append(f"{type_name}{gpus_text}, AWS {', '.join(locations)}")
    count_text = _format_range(min(machine_counts), max(machine_counts))
    if type_texts:
        machines_text = f"{count_text} x {' and '.join(type_texts)}"
    else:
        machines_text = f"{count_text} machine{'s' if max(machine_counts) > 1 else ''}"
    process_counts = sorted({attempt.processes for attempt in run.attempts if attempt.processes}) or [1]
    singular, plural = ("GPU", "GPUs") if run.device == "cuda" else ("process", "processes")
    unit = plural if process_counts[-1] > 1 else singular
    processor = run.processor or "a processor of unknown name"
    return f"{machines_text}; {_format_range(process_counts[0], process_counts[-1])} {unit} on {processor}"


def _format_range(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


# --- MLPerf ---------------------------------------------------------------------------------------------------------

POINT_IN_TIME = "POINT_IN_TIME"
INTERVAL_START = "INTERVAL_START"
INTERVAL_END = "INTERVAL_END"
MLPERF_BENCHMARK = "resnet"  # MLPerf's name for the classification of images; its open division allows any model


def render_mlperf_log(run: RunData, org: str | None = None) -> str:
    """Return the run as the lines of MLPerf's log, in the order of their times. Accuracies are fractions, as there.

    The lines are those that MLCommons' checker wants of the open division. `org` is who submits the record.
    """
    events: list[tuple[float, str]] = []

    def add_event(at: float | None, event_type: str, key: str, value: object = None, **metadata: object) -> None:
        if at is not None:
            event = {"namespace": "", "time_ms": round(1000 * at), "event_type": event_type, "key": key, "value": value}
            events.append((at, f":::MLLOG {json.dumps({**event, 'metadata': metadata})}"))

    start = run.loading_began_at
    init_start = min(run.attempt_began_at, start)
    for key, value in submission_settings(run, org).items():
        add_event(init_start, POINT_IN_TIME, key, value)
    add_event(init_start, POINT_IN_TIME, "cache_clear", False)  # a data set that was read before may be in memory
    add_event(init_start, INTERVAL_START, "init_start")
    for key, value in mlperf_settings(run).items():
        add_event(start, POINT_IN_TIME, key, value)
    add_event(start, INTERVAL_END, "init_stop")
    add_event(start, INTERVAL_START, "run_start")
    global_batch = run.epochs[0].global_batch
    for row in run.epochs:
        epoch = row.epoch
        if row.global_batch != global_batch:
            global_batch = row.global_batch
            add_event(row.began_at, POINT_IN_TIME, "global_batch_size", global_batch, epoch_num=epoch)
        if None not in (row.began_at, row.trained_at):
            add_event(row.began_at, INTERVAL_START, "epoch_start", epoch_num=epoch)
            add_event(row.trained_at, INTERVAL_END, "epoch_stop", epoch_num=epoch)
        if row.top1 is not None and row.top5 is not None:
            top1 = row.top1 / 100
            add_event(row.trained_at, INTERVAL_START, "eval_start", epoch_num=epoch)
            add_event(row.at, POINT_IN_TIME, "eval_accuracy", top1, epoch_num=epoch, top5=row.top5 / 100)
            if row.trained_at:  # an interval ends only where it began
                add_event(row.at, INTERVAL_END, "eval_stop", epoch_num=epoch)
    status = "success" if run.has_succeeded else "aborted"
    add_event(run.epochs[-1].at, INTERVAL_END, "run_stop", status=status)
    return "\n".join(line for _, line in sorted(events, key=lambda event: event[0])) + "\n"


def submission_settings(run: RunData, org: str | None) -> JsonDict:
    """Return what MLPerf logs about a submission, by MLPerf's keys."""
    return {
        "submission_org": org,
        "submission_platform": describe_hardware(run),
        "submission_division": "open",  # the closed division prescribes model, schedule and optimizer
        "submission_status": "cloud" if run.is_rented else "onprem",
        "submission_benchmark": MLPERF_BENCHMARK,
    }


def mlperf_settings(run: RunData) -> JsonDict:
    """Return the settings that MLPerf logs before a run, by MLPerf's keys. Learning rates are the executed ones."""
    optim = run.recipe.optim
    rates = [rate for row in run.epochs for rate in (row.first_lr, row.last_lr) if rate is not None]
    optimizer_settings = {
        "base_learning_rate": max(rates, default=None),
        "end_learning_rate": run.epochs[-1].last_lr,
        "weight_decay": optim.weight_decay,
    }
    key_prefix = "opt"
    if optim.name in ("sgd", "lars"):  # MLPerf defines keys of their own for these two
        optimizer_settings["momentum"] = optim.momentum
        key_prefix = f"{optim.name}_opt"
    return {
        "model_name": run.recipe.model.name,
        "global_batch_size": run.epochs[0].global_batch,
        "train_samples": run.train_images,
        "eval_samples": run.val_images,
        "seed": run.recipe.seed,
        "opt_name": optim.name,
        **{f"{key_prefix}_{key}": value for key, value in optimizer_settings.items()},
    }
