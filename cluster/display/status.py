"""Prints jobs: a list of them, and the state, machines and attempts of one. Decides nothing."""

import time
from collections.abc import Mapping, Sequence

from cluster.state.states import SetupStep
from cluster.state.status import JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from train.metrics.text import format_duration, time_table_lines
from train.tools.records import encode

from .tables import print_table

MAX_REASON_CHARACTERS = 140
DAMAGED = "damaged"  # in place of the state of a job that cannot be read
# The labels under which `show_status` prints values whose keys are not plain words.
STATUS_LABELS = {
    "procs": "processes",
    "images_per_second": "images/s",
    "lr": "learning rate",
    "top1": "top-1 %",
    "top5": "top-5 %",
    "run": "run folder",
    "seconds": "time",
}


def show_jobs(job_statuses: Mapping[str, JobStatus | None]) -> None:
    """Print a row for each job, by name. None: a file of its run folder is damaged."""
    columns = ("job", "recipe", "state", "machines", "epoch", "step", "top1", "top5", "img/s", "time")
    rows = [
        (
            name,
            status.recipe,
            status.state,
            status.machines,
            status.epoch,
            status.step,
            status.top1 and f"{status.top1:.2f}",
            status.top5 and f"{status.top5:.2f}",
            status.images_per_second and f"{status.images_per_second:.0f}",
            format_duration(status.seconds),
        )
        if status
        else (name, "", DAMAGED, *[""] * 7)
        for name, status in job_statuses.items()
    ]
    print_table(columns, rows)


def show_status(status: JobStatus, machines: Mapping[str, MachineRow], attempts: Sequence[AttemptRow]) -> None:
    """Print the status of a job, then tables of its machines and attempts if there are several."""
    created = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(status.created))
    for name, value in {**encode(status), "created": created}.items():
        if name != "where" and value not in (None, ""):
            print(f"{STATUS_LABELS.get(name, name):18} {_format_status_value(name, value)}")
    if len(machines) > 1 or any(machine.host for machine in machines.values()):
        print()
        show_machines(machines)
    if len(attempts) > 1:
        print()
        show_timeline(attempts)
    if status.where:
        print("\n" + "\n".join(time_table_lines(status.where, status.goodput)))


def _format_status_value(name: str, value: object) -> str:
    if not isinstance(value, float):
        return f"{value}"
    if name == "seconds":
        return format_duration(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def show_machines(machines: Mapping[str, MachineRow]) -> None:
    """Print a row for each machine, with the seconds of each step until its first training step."""
    steps = [step for step in SetupStep if any(step in machine.seconds for machine in machines.values())]
    rows = []
    for name, machine in machines.items():
        seconds = [f"{machine.seconds[step]:.1f}" if step in machine.seconds else "" for step in steps]
        rows.append((name, machine.host, machine.state, *seconds, machine.reason or "; ".join(machine.notes)))
    print_table(("machine", "host", "state", *steps, "note"), rows)


def show_timeline(attempts: Sequence[AttemptRow]) -> None:
    """Print a row for each attempt: start, machines, reason, and the time and steps that the change cost."""
    rows = [
        (
            attempt.attempt if attempt.machines else "end",
            time.strftime("%H:%M:%S", time.localtime(attempt.at)),
            " ".join(attempt.machines),
            attempt.first_step,
            "" if attempt.pause is None else f"{attempt.pause:.1f} s",
            attempt.steps_lost,
            _truncate(attempt.reason),
        )
        for attempt in attempts
    ]
    print_table(("attempt", "at", "machines", "from step", "pause", "steps lost", "reason"), rows)


def _truncate(text: str) -> str:
    return text if len(text) < MAX_REASON_CHARACTERS else f"{text[: MAX_REASON_CHARACTERS - 4]} ..."
