"""A run written down as others have written theirs: DAWNBench's TSV and JSON, MLPerf's log. Pure: from what
`cluster/records/run_data.py` found to texts; nothing is typed in but who the author is, and what is not known is null.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from train.recipe.components import OPTIMIZERS
from train.recipe.schema import REFERENCE_BATCH

JsonMapping = Mapping[str, Any]
TSV_HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"
ENTRY_FIELDS = (
    "version", "author", "authorEmail", "framework", "codeURL", "model", "hardware", "costPerHour", "timestamp",
    "logFilename", "misc",
)  # fmt: skip
CLOCK_DESCRIPTION = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
RECORDED_PHASE_FIELDS = (  # of a phase of the recipe
    "size", "batch", "shape", "copy", "min_scale", "rect_train", "rect_val", "frozen", "validate",
)  # fmt: skip
OPTIMIZERS_BY_SETTING = {  # of the settings that not each of our optimizers uses (train/optim/factory.py)
    **dict.fromkeys(("momentum", "nesterov"), ("sgd", "lars")),
    "trust": ("lars",),
    **dict.fromkeys(("betas", "eps"), ("lamb", "adamw")),
    **dict.fromkeys(("norm_decay", "bias_decay"), ("sgd", "adamw")),  # the others' skip rule leaves no choice
}


# --- DAWNBench ------------------------------------------------------------------------------------------------------


def render_tsv(run_data: JsonMapping) -> str:
    """Return a row for each epoch that was validated: its number, hours, top-1 and top-5 in percent."""
    rows = [
        f"{row['epoch']}\t{row['clock'] / 3600:.6f}\t{row['top1']:.4f}\t{row['top5']:.4f}"
        for row in validated_epochs(run_data)
    ]
    return "\n".join([TSV_HEADER, *rows]) + "\n"


def validated_epochs(run_data: JsonMapping) -> list[JsonMapping]:
    """Return the epochs that have accuracies."""
    return [row for row in run_data["epochs"] if row["top1"] is not None]


def dawnbench_entry(
    run_data: JsonMapping,
    author: str | None = None,
    email: str | None = None,
    code_url: str | None = None,
    log_filename: str | None = None,
) -> dict[str, Any]:
    """Return DAWNBench's JSON as plain data; `log` is the name of a file beside it. `misc` says all that was run."""
    versions, price = run_data["versions"], run_data["cost_per_hour"]
    hours = validated_epochs(run_data)[-1]["clock"] / 3600
    rows = [epoch_entry(row) for row in run_data["epochs"]]
    recipe = {**run_data["recipe"], "optim": used_optimizer_settings(run_data["recipe"]["optim"])}
    start = None if run_data["first_step_at"] is None else run_data["first_step_at"] - run_data["begun"]
    return {
        "version": "v1.0",
        "author": author,
        "authorEmail": email,
        "framework": f"imgnet-cluster {versions.get('imgnet-cluster')}, PyTorch {versions.get('torch')}",
        "codeURL": code_url,
        "model": recipe["model"]["name"],
        "hardware": describe_hardware(run_data),
        "costPerHour": price,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(run_data["epochs"][-1]["at"])),
        "logFilename": log_filename,
        "misc": {
            "job": run_data["job"], "uid": run_data["uid"], "state": run_data["state"], "clock": CLOCK_DESCRIPTION, "hours": hours,
            "cost": {"dollars": None if price is None else hours * price, "billed": run_data["billed"]},
            "target": run_data["target"], "images": {"train": run_data["train_images"], "val": run_data["val_images"]},
            "gpus": run_data["gpus"], "max_steps": run_data["max_steps"], "scale": run_data["scale"], "seed": recipe["seed"],
            "precision": run_data["precision"], "optimizer": recipe["optim"], "comm": recipe["comm"],
            "schedule": executed_phases(rows, recipe), "epochs": rows, "seconds_to_loading": run_data["begun"] - run_data["launched"],
            "seconds_to_first_step": start, "attempts": attempt_entries(run_data), "machines": run_data["machines"],
            "at_work": run_data["at_work"], "processor": run_data["processor"], "versions": dict(versions),
            "commit": run_data["commit"], "recipe": recipe,
        },
    }  # fmt: skip


def used_optimizer_settings(optim: JsonMapping) -> dict[str, Any]:
    """Return what of an optimizer's settings it uses; of somebody else's, all of them."""
    name = optim["name"]
    return {
        key: one
        for key, one in optim.items()
        if name not in OPTIMIZERS or name in OPTIMIZERS_BY_SETTING.get(key, OPTIMIZERS)
    }


def epoch_entry(epoch_row: JsonMapping) -> dict[str, Any]:
    """Return an epoch as it was run: `seconds` of the clock at its end, `lr` the rates of its first and last step."""
    same = (
        "epoch", "attempt", "step", "steps", "size", "global_batch", "images_per_second", "train_seconds",
        "val_seconds", "train_loss", "view", "val_images", "top1", "top5", "top1_square", "top5_square",
    )  # fmt: skip
    own = {
        "seconds": epoch_row["clock"],
        "images": epoch_row["train_images"],
        "lr": [epoch_row["first_lr"], epoch_row["last_lr"]],
    }
    return {**{name: epoch_row.get(name) for name in same}, **own}


def executed_phases(epoch_entries: Sequence[JsonMapping], recipe: JsonMapping) -> list[dict[str, Any]]:
    """Return the phases as they were run, from the epochs (`epoch`) and what the recipe says of each phase."""
    found = []
    for place, some in groupby(epoch_entries, key=lambda row: phase_index(recipe, row["epoch"])):
        mine, phase = list(some), recipe["phases"][place]
        rates, batch = [mine[0]["lr"][0], mine[-1]["lr"][1]], mine[0]["global_batch"]
        found.append({
            "start": mine[0]["epoch"] - 1, "end": mine[-1]["epoch"],
            **{name: phase[name] for name in RECORDED_PHASE_FIELDS if name in phase}, "global_batch": batch,
            "steps": sum(row["steps"] for row in mine), "lr": rates,
            "lr_per_256": [None if one is None else one * REFERENCE_BATCH / batch for one in rates],
        })  # fmt: skip
    return found


def phase_index(recipe: JsonMapping, epoch_number: int) -> int:
    """Return which of the recipe's phases an epoch, counted from 1, belongs to. Raises `ValueError`: to none."""
    for place, phase in enumerate(recipe["phases"]):
        if phase["epochs"][0] < epoch_number <= phase["epochs"][1]:
            return place
    raise ValueError(f"epoch {epoch_number} stands in no phase of the recipe")


def attempt_entries(run_data: JsonMapping) -> list[dict[str, Any]]:
    """Return the attempts: who, how many processes, from which step, why, and the seconds of the clock each cost."""
    lost = {one["attempt"]: one["seconds"] for one in run_data["away"]}
    return [
        {
            **{name: one[name] for name in ("attempt", "machines", "first_step", "reason", "steps_lost")},
            "processes": run_data["worlds"].get(str(one["attempt"])), "seconds_lost": lost.get(one["attempt"]),
        }
        for one in run_data["attempts"]
        if one["machines"]
    ]  # fmt: skip


def describe_hardware(run_data: JsonMapping) -> str:
    """Return the machines and processors in one line, as the run had them."""
    counts = run_data["machines_at_once"] or [1]
    least, most = min(counts), max(counts)
    count = str(most) if least == most else f"{least} to {most}"
    types = sorted({one["type"] for one in run_data["machines"] if one["type"]})
    parts = []
    for kind in types:
        mine = [one for one in run_data["machines"] if one["type"] == kind]
        gpus = f" ({run_data['kinds'][kind]})" if run_data["kinds"].get(kind) else ""
        places = ", ".join(sorted({f"{one['zone']} {one['market']}" for one in mine}))
        parts.append(f"{kind}{gpus}, AWS {places}")
    what = f"{count} x {' and '.join(parts)}" if parts else f"{count} machine{'s' * (most > 1)}"
    worlds = sorted(set(run_data["worlds"].values()))
    span = str(worlds[-1]) if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]}"
    unit = "GPU" if run_data["device"] == "cuda" else "process"
    more = ("es" if unit == "process" else "s") * (worlds[-1] > 1)
    return f"{what}; {span} {unit}{more} on {run_data['processor'] or 'a processor that does not say its name'}"


# --- MLPerf ---------------------------------------------------------------------------------------------------------

POINT_IN_TIME, INTERVAL_START, INTERVAL_END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


def render_mlperf_log(run_data: JsonMapping) -> str:
    """Return the run as MLPerf's log lines, in the order of their times; accuracies are shares of 1, as there."""
    begun, last = run_data["begun"], run_data["epochs"][-1]["at"]
    events: list[tuple[float, str]] = []

    def say(at: float | None, kind: str, key: str, value: Any = None, **more: Any) -> None:
        if at is not None:
            said = {"namespace": "", "time_ms": round(1000 * at), "event_type": kind, "key": key, "value": value}
            events.append((at, f":::MLLOG {json.dumps({**said, 'metadata': more})}"))

    say(begun, INTERVAL_START, "run_start")
    for key, value in mlperf_settings(run_data).items():
        say(begun, POINT_IN_TIME, key, value)
    batch = run_data["epochs"][0]["global_batch"]
    for row in run_data["epochs"]:
        number = row["epoch"]
        if row["global_batch"] != batch:
            batch = row["global_batch"]
            say(row["began"], POINT_IN_TIME, "global_batch_size", batch, epoch_num=number)
        if None not in (row["began"], row["trained"]):
            say(row["began"], INTERVAL_START, "epoch_start", epoch_num=number)
            say(row["trained"], INTERVAL_END, "epoch_stop", epoch_num=number)
        if row["top1"] is not None:
            say(row["trained"], INTERVAL_START, "eval_start", epoch_num=number)
            say(row["at"], POINT_IN_TIME, "eval_accuracy", row["top1"] / 100, epoch_num=number, top5=row["top5"] / 100)
            say(row["trained"] and row["at"], INTERVAL_END, "eval_stop", epoch_num=number)
    say(last, INTERVAL_END, "run_stop", status="success" if has_succeeded(run_data) else "aborted")
    return "\n".join(text for _, text in sorted(events, key=lambda one: one[0])) + "\n"


def has_succeeded(run_data: JsonMapping) -> bool:
    """Whether the run did what it was for: reached its target, or without one came to its end."""
    target = run_data["target"]
    return bool(target["reached"] if target else run_data["state"] == "done")


def mlperf_settings(run_data: JsonMapping) -> dict[str, Any]:
    """Return what MLPerf writes before a run, by its keys; rates are those that were run."""
    optim, rows = run_data["recipe"]["optim"], run_data["epochs"]
    name = optim["name"]
    rates = [rate for row in rows for rate in (row["first_lr"], row["last_lr"]) if rate is not None]
    own = {
        "base_learning_rate": max(rates, default=None), "end_learning_rate": rows[-1]["last_lr"],
        "weight_decay": optim["weight_decay"],
    }  # fmt: skip
    own |= {"momentum": optim["momentum"]} if name in ("sgd", "lars") else {}
    return {
        "submission_benchmark": run_data["recipe"]["model"]["name"],
        "global_batch_size": rows[0]["global_batch"],
        "train_samples": run_data["train_images"],
        "eval_samples": run_data["val_images"],
        "seed": run_data["recipe"]["seed"],
        "opt_name": name,
        **{f"{name}_opt_{key}" if name in ("sgd", "lars") else f"opt_{key}": value for key, value in own.items()},
    }
