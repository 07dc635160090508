"""Writes a run as benchmark records: DAWNBench's TSV and JSON, and MLPerf's log.

Pure functions from the data that `cluster/records/run_data.py` collects to texts. Nothing is typed by hand except who
the author is, and what is not known is null.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from train.recipe.components import OPTIMIZERS
from train.recipe.schema import REFERENCE_BATCH

JsonMapping = Mapping[str, Any]  # Any: JSON of any shape, also of files that others wrote
JsonDict = dict[str, Any]  # Any: as above

# Columns of DAWNBench's TSV. Its tests want exactly these, and no top-5 accuracy for CIFAR-10.
TSV_COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
TSV_COLUMNS_BY_DATA = {"cifar10": ("epoch", "hours", "top1Accuracy")}
ENTRY_FIELDS = (
    "version",
    "author",
    "authorEmail",
    "framework",
    "codeURL",
    "model",
    "hardware",
    "costPerHour",
    "timestamp",
    "logFilename",
    "misc",
)
CLOCK_DESCRIPTION = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
RECORDED_PHASE_FIELDS = (  # fields of the recipe's phases that a record repeats
    "size",
    "batch",
    "shape",
    "copy",
    "min_scale",
    "rect_train",
    "rect_val",
    "frozen",
    "validate",
)
RECORDED_EPOCH_FIELDS = (
    "epoch",
    "attempt",
    "step",
    "steps",
    "size",
    "global_batch",
    "images_per_second",
    "train_seconds",
    "val_seconds",
    "train_loss",
    "view",
    "val_images",
    "top1",
    "top5",
    "top1_square",
    "top5_square",
)
RECORDED_ATTEMPT_FIELDS = ("attempt", "machines", "first_step", "reason", "steps_lost")
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


# --- DAWNBench ------------------------------------------------------------------------------------------------------


def render_tsv(run_data: JsonMapping) -> str:
    """Return DAWNBench's TSV: for each validated epoch its number, hours, and accuracies in percent."""
    columns = tsv_columns(run_data["recipe"])
    rows = [
        (f"{row['epoch']}", f"{row['clock'] / 3600:.6f}", f"{row['top1']:.4f}", f"{row['top5']:.4f}")
        for row in validated_epochs(run_data)
    ]
    return "".join("\t".join(row[: len(columns)]) + "\n" for row in (columns, *rows))


def tsv_columns(recipe: JsonMapping) -> tuple[str, ...]:
    """Return the columns that DAWNBench wants for the data set of a recipe."""
    return TSV_COLUMNS_BY_DATA.get(recipe["data"]["name"], TSV_COLUMNS)


def validated_epochs(run_data: JsonMapping) -> list[JsonMapping]:
    """Return the rows of the epochs that have accuracies."""
    return [row for row in run_data["epochs"] if row["top1"] is not None]


def dawnbench_entry(
    run_data: JsonMapping,
    author: str | None = None,
    email: str | None = None,
    code_url: str | None = None,
    log_filename: str | None = None,
) -> JsonDict:
    """Return DAWNBench's JSON as plain data.

    `log_filename` is the name of MLPerf's log beside it. The field "misc" holds everything that is known of the run.
    """
    versions = run_data["versions"]
    cost_per_hour = run_data["cost_per_hour"]
    hours = validated_epochs(run_data)[-1]["clock"] / 3600
    epochs = [epoch_entry(row) for row in run_data["epochs"]]
    recipe = {**run_data["recipe"], "optim": used_optimizer_settings(run_data["recipe"]["optim"])}
    first_step_at = run_data["first_step_at"]
    loading_began_at = run_data["loading_began_at"]
    return {
        "version": "v1.0",
        "author": author,
        "authorEmail": email,
        "framework": f"imgnet-cluster {versions.get('imgnet-cluster')}, PyTorch {versions.get('torch')}",
        "codeURL": code_url,
        "model": recipe["model"]["name"],
        "hardware": describe_hardware(run_data),
        "costPerHour": cost_per_hour,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(run_data["epochs"][-1]["at"])),
        "logFilename": log_filename,
        "misc": {
            "job": run_data["job"],
            "uid": run_data["uid"],
            "state": run_data["state"],
            "clock": CLOCK_DESCRIPTION,
            "hours": hours,
            "cost": {
                "dollars": None if cost_per_hour is None else hours * cost_per_hour,
                "billed": run_data["billed"],
            },
            "target": run_data["target"],
            "images": {"train": run_data["train_images"], "val": run_data["val_images"]},
            "gpus": run_data["gpus"],
            "max_steps": run_data["max_steps"],
            "scale": run_data["scale"],
            "seed": recipe["seed"],
            "precision": run_data["precision"],
            "optimizer": recipe["optim"],
            "comm": recipe["comm"],
            "schedule": executed_phases(epochs, recipe),
            "epochs": epochs,
            "seconds_to_loading": loading_began_at - run_data["launched_at"],
            "seconds_to_first_step": None if first_step_at is None else first_step_at - loading_began_at,
            "attempts": attempt_entries(run_data),
            "machines": run_data["machines"],
            "at_work": run_data["at_work"],
            "processor": run_data["processor"],
            "versions": dict(versions),
            "commit": run_data["commit"],
            "recipe": recipe,
        },
    }


def used_optimizer_settings(optim: JsonMapping) -> JsonDict:
    """Return the settings that the optimizer uses; all settings for an optimizer that is not built in."""
    name = optim["name"]
    return {
        setting: value
        for setting, value in optim.items()
        if name not in OPTIMIZERS or name in OPTIMIZERS_BY_SETTING.get(setting, OPTIMIZERS)
    }


def epoch_entry(epoch_row: JsonMapping) -> JsonDict:
    """Return an epoch as it was executed.

    "seconds" is the clock at its end, "lr" the learning rates of its first and last step.
    """
    return {
        **{name: epoch_row.get(name) for name in RECORDED_EPOCH_FIELDS},
        "seconds": epoch_row["clock"],
        "images": epoch_row["train_images"],
        "lr": [epoch_row["first_lr"], epoch_row["last_lr"]],
    }


def executed_phases(epoch_entries: Sequence[JsonMapping], recipe: JsonMapping) -> list[JsonDict]:
    """Return the phases as they were executed, from the entries of the epochs and the phases of the recipe."""
    phases = []
    for index, group in groupby(epoch_entries, key=lambda row: phase_index(recipe, row["epoch"])):
        epochs = list(group)
        recipe_phase = recipe["phases"][index]
        rates = [epochs[0]["lr"][0], epochs[-1]["lr"][1]]
        global_batch = epochs[0]["global_batch"]
        phases.append(
            {
                "start": epochs[0]["epoch"] - 1,
                "end": epochs[-1]["epoch"],
                **{name: recipe_phase[name] for name in RECORDED_PHASE_FIELDS if name in recipe_phase},
                "global_batch": global_batch,
                "steps": sum(row["steps"] for row in epochs),
                "lr": rates,
                "lr_per_256": [None if rate is None else rate * REFERENCE_BATCH / global_batch for rate in rates],
            }
        )
    return phases


def phase_index(recipe: JsonMapping, epoch_number: int) -> int:
    """Return the index of the recipe's phase that contains an epoch, counted from 1. Raises `ValueError`: none does."""
    for index, phase in enumerate(recipe["phases"]):
        first_epoch, end_epoch = phase["epochs"]
        if first_epoch < epoch_number <= end_epoch:
            return index
    raise ValueError(f"no phase of the recipe contains epoch {epoch_number}")


def attempt_entries(run_data: JsonMapping) -> list[JsonDict]:
    """Return the attempts: machines, number of processes, first step, reason, and the seconds of the clock it cost."""
    seconds_by_attempt = {cost["attempt"]: cost["seconds"] for cost in run_data["recovery_costs"]}
    return [
        {
            **{name: attempt[name] for name in RECORDED_ATTEMPT_FIELDS},
            "processes": run_data["processes_by_attempt"].get(str(attempt["attempt"])),
            "seconds_lost": seconds_by_attempt.get(attempt["attempt"]),
        }
        for attempt in run_data["attempts"]
        if attempt["machines"]
    ]


def describe_hardware(run_data: JsonMapping) -> str:
    """Return one line with the machines and processors of the run."""
    machine_counts = run_data["machine_counts"] or [1]
    type_names = sorted({machine["type"] for machine in run_data["machines"] if machine["type"]})
    type_texts = []
    for type_name in type_names:
        machines = [machine for machine in run_data["machines"] if machine["type"] == type_name]
        gpus = run_data["gpus_by_type"].get(type_name)
        gpus_text = f" ({gpus})" if gpus else ""
        locations = sorted({f"{machine['zone']} {machine['market']}" for machine in machines})
        type_texts.append(f"{type_name}{gpus_text}, AWS {', '.join(locations)}")
    count_text = _format_range(min(machine_counts), max(machine_counts))
    if type_texts:
        machines_text = f"{count_text} x {' and '.join(type_texts)}"
    else:
        machines_text = f"{count_text} machine{'s' if max(machine_counts) > 1 else ''}"
    process_counts = sorted(set(run_data["processes_by_attempt"].values()))
    singular, plural = ("GPU", "GPUs") if run_data["device"] == "cuda" else ("process", "processes")
    unit = plural if process_counts[-1] > 1 else singular
    processor = run_data["processor"] or "a processor of unknown name"
    return f"{machines_text}; {_format_range(process_counts[0], process_counts[-1])} {unit} on {processor}"


def _format_range(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


# --- MLPerf ---------------------------------------------------------------------------------------------------------

POINT_IN_TIME = "POINT_IN_TIME"
INTERVAL_START = "INTERVAL_START"
INTERVAL_END = "INTERVAL_END"
MLPERF_BENCHMARK = "resnet"  # MLPerf's name for the classification of images; its open division allows any model


def render_mlperf_log(run_data: JsonMapping, org: str | None = None) -> str:
    """Return the run as the lines of MLPerf's log, in the order of their times. Accuracies are fractions, as there.

    The lines are those that MLCommons' checker wants of the open division. `org` is who submits the record.
    """
    events: list[tuple[float, str]] = []

    def add_event(at: float | None, event_type: str, key: str, value: object = None, **metadata: object) -> None:
        if at is not None:
            event = {"namespace": "", "time_ms": round(1000 * at), "event_type": event_type, "key": key, "value": value}
            events.append((at, f":::MLLOG {json.dumps({**event, 'metadata': metadata})}"))

    start = run_data["loading_began_at"]
    init_start = min(run_data["attempt_began_at"], start)
    for key, value in submission_settings(run_data, org).items():
        add_event(init_start, POINT_IN_TIME, key, value)
    add_event(init_start, POINT_IN_TIME, "cache_clear", False)  # a data set that was read before may be in memory
    add_event(init_start, INTERVAL_START, "init_start")
    for key, value in mlperf_settings(run_data).items():
        add_event(start, POINT_IN_TIME, key, value)
    add_event(start, INTERVAL_END, "init_stop")
    add_event(start, INTERVAL_START, "run_start")
    global_batch = run_data["epochs"][0]["global_batch"]
    for row in run_data["epochs"]:
        epoch = row["epoch"]
        if row["global_batch"] != global_batch:
            global_batch = row["global_batch"]
            add_event(row["began_at"], POINT_IN_TIME, "global_batch_size", global_batch, epoch_num=epoch)
        if None not in (row["began_at"], row["trained_at"]):
            add_event(row["began_at"], INTERVAL_START, "epoch_start", epoch_num=epoch)
            add_event(row["trained_at"], INTERVAL_END, "epoch_stop", epoch_num=epoch)
        if row["top1"] is not None:
            top1 = row["top1"] / 100
            add_event(row["trained_at"], INTERVAL_START, "eval_start", epoch_num=epoch)
            add_event(row["at"], POINT_IN_TIME, "eval_accuracy", top1, epoch_num=epoch, top5=row["top5"] / 100)
            if row["trained_at"]:  # an interval ends only where it began
                add_event(row["at"], INTERVAL_END, "eval_stop", epoch_num=epoch)
    status = "success" if has_succeeded(run_data) else "aborted"
    add_event(run_data["epochs"][-1]["at"], INTERVAL_END, "run_stop", status=status)
    return "\n".join(line for _, line in sorted(events, key=lambda event: event[0])) + "\n"


def has_succeeded(run_data: JsonMapping) -> bool:
    """Return whether the run reached its target or, without a target, ran to its end."""
    target = run_data["target"]
    return bool(target["reached"] if target else run_data["state"] == "done")


def submission_settings(run_data: JsonMapping, org: str | None) -> JsonDict:
    """Return what MLPerf logs about a submission, by MLPerf's keys."""
    return {
        "submission_org": org,
        "submission_platform": describe_hardware(run_data),
        "submission_division": "open",  # the closed division prescribes model, schedule and optimizer
        "submission_status": "cloud" if run_data["is_rented"] else "onprem",
        "submission_benchmark": MLPERF_BENCHMARK,
    }


def mlperf_settings(run_data: JsonMapping) -> JsonDict:
    """Return the settings that MLPerf logs before a run, by MLPerf's keys. Learning rates are the executed ones."""
    optim = run_data["recipe"]["optim"]
    optimizer = optim["name"]
    epochs = run_data["epochs"]
    rates = [rate for row in epochs for rate in (row["first_lr"], row["last_lr"]) if rate is not None]
    optimizer_settings = {
        "base_learning_rate": max(rates, default=None),
        "end_learning_rate": epochs[-1]["last_lr"],
        "weight_decay": optim["weight_decay"],
    }
    key_prefix = "opt"
    if optimizer in ("sgd", "lars"):  # MLPerf defines keys of their own for these two
        optimizer_settings["momentum"] = optim["momentum"]
        key_prefix = f"{optimizer}_opt"
    return {
        "model_name": run_data["recipe"]["model"]["name"],
        "global_batch_size": epochs[0]["global_batch"],
        "train_samples": run_data["train_images"],
        "eval_samples": run_data["val_images"],
        "seed": run_data["recipe"]["seed"],
        "opt_name": optimizer,
        **{f"{key_prefix}_{key}": value for key, value in optimizer_settings.items()},
    }
