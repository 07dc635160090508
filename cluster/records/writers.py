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

Row = Mapping[str, Any]
HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"
FIELDS = (
    "version", "author", "authorEmail", "framework", "codeURL", "model", "hardware", "costPerHour", "timestamp",
    "logFilename", "misc",
)  # fmt: skip
CLOCK = "from the start of loading the images to the end of the epoch's validation; losses and pauses count"
KEPT = (  # of a phase of the recipe
    "size", "batch", "shape", "copy", "min_scale", "rect_train", "rect_val", "frozen", "validate",
)  # fmt: skip
USERS = {  # of the settings that not each of our optimizers uses (train/optim/factory.py)
    **dict.fromkeys(("momentum", "nesterov"), ("sgd", "lars")),
    "trust": ("lars",),
    **dict.fromkeys(("betas", "eps"), ("lamb", "adamw")),
    **dict.fromkeys(("norm_decay", "bias_decay"), ("sgd", "adamw")),  # the others' skip rule leaves no choice
}


# --- DAWNBench ------------------------------------------------------------------------------------------------------


def tsv(ran: Row) -> str:
    """Return a row for each epoch that was validated: its number, hours, top-1 and top-5 in percent."""
    rows = [
        f"{row['epoch']}\t{row['clock'] / 3600:.6f}\t{row['top1']:.4f}\t{row['top5']:.4f}" for row in validated(ran)
    ]
    return "\n".join([HEADER, *rows]) + "\n"


def validated(ran: Row) -> list[Row]:
    """Return the epochs that have accuracies."""
    return [row for row in ran["epochs"] if row["top1"] is not None]


def entry(
    ran: Row, author: str | None = None, email: str | None = None, code: str | None = None, log: str | None = None
) -> dict[str, Any]:
    """Return DAWNBench's JSON as plain data; `log` is the name of a file beside it. `misc` says all that was run."""
    versions, price = ran["versions"], ran["cost_per_hour"]
    hours = validated(ran)[-1]["clock"] / 3600
    rows = [epoch(row) for row in ran["epochs"]]
    recipe = {**ran["recipe"], "optim": used(ran["recipe"]["optim"])}
    start = None if ran["first_step_at"] is None else ran["first_step_at"] - ran["begun"]
    return {
        "version": "v1.0",
        "author": author,
        "authorEmail": email,
        "framework": f"imgnet-cluster {versions.get('imgnet-cluster')}, PyTorch {versions.get('torch')}",
        "codeURL": code,
        "model": recipe["model"]["name"],
        "hardware": hardware(ran),
        "costPerHour": price,
        "timestamp": time.strftime("%Y-%m-%d", time.gmtime(ran["epochs"][-1]["at"])),
        "logFilename": log,
        "misc": {
            "job": ran["job"], "uid": ran["uid"], "state": ran["state"], "clock": CLOCK, "hours": hours,
            "cost": {"dollars": None if price is None else hours * price, "billed": ran["billed"]},
            "target": ran["target"], "images": {"train": ran["train_images"], "val": ran["val_images"]},
            "gpus": ran["gpus"], "max_steps": ran["max_steps"], "scale": ran["scale"], "seed": recipe["seed"],
            "precision": ran["precision"], "optimizer": recipe["optim"], "comm": recipe["comm"],
            "schedule": executed(rows, recipe), "epochs": rows, "seconds_to_loading": ran["begun"] - ran["launched"],
            "seconds_to_first_step": start, "attempts": tries(ran), "machines": ran["machines"],
            "at_work": ran["at_work"], "processor": ran["processor"], "versions": dict(versions),
            "commit": ran["commit"], "recipe": recipe,
        },
    }  # fmt: skip


def used(optim: Row) -> dict[str, Any]:
    """Return what of an optimizer's settings it uses; of somebody else's, all of them."""
    name = optim["name"]
    return {key: one for key, one in optim.items() if name not in OPTIMIZERS or name in USERS.get(key, OPTIMIZERS)}


def epoch(row: Row) -> dict[str, Any]:
    """Return an epoch as it was run: `seconds` of the clock at its end, `lr` the rates of its first and last step."""
    same = (
        "epoch", "attempt", "step", "steps", "size", "global_batch", "images_per_second", "train_seconds",
        "val_seconds", "train_loss", "view", "val_images", "top1", "top5", "top1_square", "top5_square",
    )  # fmt: skip
    own = {"seconds": row["clock"], "images": row["train_images"], "lr": [row["first_lr"], row["last_lr"]]}
    return {**{name: row.get(name) for name in same}, **own}


def executed(rows: Sequence[Row], recipe: Row) -> list[dict[str, Any]]:
    """Return the phases as they were run, from the epochs (`epoch`) and what the recipe says of each phase."""
    found = []
    for place, some in groupby(rows, key=lambda row: phase_of(recipe, row["epoch"])):
        mine, phase = list(some), recipe["phases"][place]
        rates, batch = [mine[0]["lr"][0], mine[-1]["lr"][1]], mine[0]["global_batch"]
        found.append({
            "start": mine[0]["epoch"] - 1, "end": mine[-1]["epoch"],
            **{name: phase[name] for name in KEPT if name in phase}, "global_batch": batch,
            "steps": sum(row["steps"] for row in mine), "lr": rates,
            "lr_per_256": [None if one is None else one * REFERENCE_BATCH / batch for one in rates],
        })  # fmt: skip
    return found


def phase_of(recipe: Row, number: int) -> int:
    """Return which of the recipe's phases an epoch, counted from 1, belongs to. Raises `ValueError`: to none."""
    for place, phase in enumerate(recipe["phases"]):
        if phase["epochs"][0] < number <= phase["epochs"][1]:
            return place
    raise ValueError(f"epoch {number} stands in no phase of the recipe")


def tries(ran: Row) -> list[dict[str, Any]]:
    """Return the attempts: who, how many processes, from which step, why, and the seconds of the clock each cost."""
    lost = {one["attempt"]: one["seconds"] for one in ran["away"]}
    return [
        {
            **{name: one[name] for name in ("attempt", "machines", "first_step", "reason", "steps_lost")},
            "processes": ran["worlds"].get(str(one["attempt"])), "seconds_lost": lost.get(one["attempt"]),
        }
        for one in ran["attempts"]
        if one["machines"]
    ]  # fmt: skip


def hardware(ran: Row) -> str:
    """Return the machines and processors in one line, as the run had them."""
    counts = ran["machines_at_once"] or [1]
    least, most = min(counts), max(counts)
    count = str(most) if least == most else f"{least} to {most}"
    types = sorted({one["type"] for one in ran["machines"] if one["type"]})
    parts = []
    for kind in types:
        mine = [one for one in ran["machines"] if one["type"] == kind]
        gpus = f" ({ran['kinds'][kind]})" if ran["kinds"].get(kind) else ""
        places = ", ".join(sorted({f"{one['zone']} {one['market']}" for one in mine}))
        parts.append(f"{kind}{gpus}, AWS {places}")
    what = f"{count} x {' and '.join(parts)}" if parts else f"{count} machine{'s' * (most > 1)}"
    worlds = sorted(set(ran["worlds"].values()))
    span = str(worlds[-1]) if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]}"
    unit = "GPU" if ran["device"] == "cuda" else "process"
    more = ("es" if unit == "process" else "s") * (worlds[-1] > 1)
    return f"{what}; {span} {unit}{more} on {ran['processor'] or 'a processor that does not say its name'}"


# --- MLPerf ---------------------------------------------------------------------------------------------------------

POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


def mlperf(ran: Row) -> str:
    """Return the run as MLPerf's log lines, in the order of their times; accuracies are shares of 1, as there."""
    begun, last = ran["begun"], ran["epochs"][-1]["at"]
    events: list[tuple[float, str]] = []

    def say(at: float | None, kind: str, key: str, value: Any = None, **more: Any) -> None:
        if at is not None:
            said = {"namespace": "", "time_ms": round(1000 * at), "event_type": kind, "key": key, "value": value}
            events.append((at, f":::MLLOG {json.dumps({**said, 'metadata': more})}"))

    say(begun, START, "run_start")
    for key, value in settings(ran).items():
        say(begun, POINT, key, value)
    batch = ran["epochs"][0]["global_batch"]
    for row in ran["epochs"]:
        number = row["epoch"]
        if row["global_batch"] != batch:
            batch = row["global_batch"]
            say(row["began"], POINT, "global_batch_size", batch, epoch_num=number)
        if None not in (row["began"], row["trained"]):
            say(row["began"], START, "epoch_start", epoch_num=number)
            say(row["trained"], END, "epoch_stop", epoch_num=number)
        if row["top1"] is not None:
            say(row["trained"], START, "eval_start", epoch_num=number)
            say(row["at"], POINT, "eval_accuracy", row["top1"] / 100, epoch_num=number, top5=row["top5"] / 100)
            say(row["trained"] and row["at"], END, "eval_stop", epoch_num=number)
    say(last, END, "run_stop", status="success" if succeeded(ran) else "aborted")
    return "\n".join(text for _, text in sorted(events, key=lambda one: one[0])) + "\n"


def succeeded(ran: Row) -> bool:
    """Whether the run did what it was for: reached its target, or without one came to its end."""
    target = ran["target"]
    return bool(target["reached"] if target else ran["state"] == "done")


def settings(ran: Row) -> dict[str, Any]:
    """Return what MLPerf writes before a run, by its keys; rates are those that were run."""
    optim, rows = ran["recipe"]["optim"], ran["epochs"]
    name = optim["name"]
    rates = [rate for row in rows for rate in (row["first_lr"], row["last_lr"]) if rate is not None]
    own = {
        "base_learning_rate": max(rates, default=None), "end_learning_rate": rows[-1]["last_lr"],
        "weight_decay": optim["weight_decay"],
    }  # fmt: skip
    own |= {"momentum": optim["momentum"]} if name in ("sgd", "lars") else {}
    return {
        "submission_benchmark": ran["recipe"]["model"]["name"],
        "global_batch_size": rows[0]["global_batch"],
        "train_samples": ran["train_images"],
        "eval_samples": ran["val_images"],
        "seed": ran["recipe"]["seed"],
        "opt_name": name,
        **{f"{name}_opt_{key}" if name in ("sgd", "lars") else f"opt_{key}": value for key, value in own.items()},
    }
