"""What a person sees: tables, and a job's progress. Nothing is decided here."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.machines.setup_progress import MACHINE_SETUP_STEPS
from train.metrics.text import format_duration, time_breakdown_lines

from .tables import print_table

if TYPE_CHECKING:
    pass

STARTUP_STEPS = (  # of a machine to its first training step
    *MACHINE_SETUP_STEPS,
    *("data", "fetch", "standby", "others", "rendezvous", "indexing", "group", "first step"),
)


def show_jobs(job_statuses: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each job."""
    columns = ("job", "recipe", "state", "machines", "epoch", "step", "top1", "top5", "img/s", "time")
    print_table(
        columns,
        [
            (
                one["job"], one["recipe"], one["state"], one["machines"], one["epoch"], one["step"],
                *(one[name] and f"{one[name]:.2f}" for name in ("top1", "top5")),
                one["images_per_second"] and f"{one['images_per_second']:.0f}", format_duration(one["seconds"]),
            )
            for one in job_statuses
        ],
    )  # fmt: skip


def show_status(status: Mapping[str, Any], machines: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> None:
    """Print what is known of a job; of several machines, and of more than one attempt, a table."""
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["created"]))
    for name, value in {**status, "created": created}.items():
        if name != "where" and value not in (None, "", [], {}):
            print(f"{name:18} {_format_status_value(name, value)}")
    if len(machines) > 1 or any(one["host"] for one in machines.values()):
        print()
        show_machines(machines)
    if len(attempts) > 1:
        print()
        show_timeline(attempts)
    if status.get("where"):
        print("\n" + "\n".join(time_breakdown_lines(status["where"], status.get("goodput"))))


def _format_status_value(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return f"{value}"
    return format_duration(value) if name == "seconds" else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def show_machines(machines: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each machine, with the seconds of each step to its first training step."""
    names = [name for name in STARTUP_STEPS if any(name in one["seconds"] for one in machines.values())]
    rows = []
    for machine, one in machines.items():
        seconds = [f"{one['seconds'][name]:.1f}" if name in one["seconds"] else "" for name in names]
        rows.append((machine, one["host"], one["state"], *seconds, one["reason"] or "; ".join(one["notes"])))
    print_table(("machine", "host", "state", *names, "note"), rows)


def show_timeline(attempts: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each attempt: when, who, why, and what the change cost."""
    rows = [
        (
            one["attempt"] if one["machines"] else "end", time.strftime("%H:%M:%S", time.localtime(one["at"])),
            " ".join(one["machines"]), one["first_step"], "" if one["pause"] is None else f"{one['pause']:.1f} s",
            one["steps_lost"], _truncate(one["reason"]),
        )
        for one in attempts
    ]  # fmt: skip
    print_table(("attempt", "at", "machines", "from step", "pause", "steps lost", "reason"), rows)


def _truncate(text: str) -> str:
    return text if len(text) < 140 else f"{text[:136]} ..."
