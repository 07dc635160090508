"""Prints jobs: a list of them, and the state, machines and attempts of one. Decides nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.machines.setup_progress import fold_by_machine
from cluster.report.tables import attempts_table, format_cell, format_known
from cluster.state.states import JobState, work_title
from cluster.state.status import JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from train.metrics.text import format_duration, time_table_lines
from train.tools.records import encode

from .tables import DAMAGED, print_state, print_table, print_wrapped
from .terminal import cut_text

MAX_REASON_CHARACTERS = 140
MAX_ATTEMPTS = 20  # in the table of a status; a long run has thousands
DAY_SECONDS = 86_400
# The labels under which `show_status` prints values whose keys are not plain words.
STATUS_LABELS = {
    "procs": "processes",
    "risk": "at risk",
    "images_per_second": "images/s",
    "lr": "learning rate",
    "top1": "top-1 %",
    "top5": "top-5 %",
    "run": "run folder",
    "seconds": "time at work",
}


def show_jobs(job_statuses: Mapping[str, JobStatus | None]) -> None:
    """Print a row for each job, by name. None: a file of its run folder is damaged."""
    work = work_title(status.work for status in job_statuses.values() if status)
    has_names = any(status.name for status in job_statuses.values() if status)
    rows: list[dict[str, object]] = [
        {
            "job": name,
            **({"name": status.name} if has_names else {}),
            work: status.recipe,
            "state": status.state,
            "machines": status.machines,
            "epoch": status.epoch,
            "step": status.step,
            "top-1": status.top1 and f"{status.top1:.2f}",
            "top-5": status.top5 and f"{status.top5:.2f}",
            "img/s": status.images_per_second and f"{status.images_per_second:.0f}",
            "at work": format_duration(status.seconds),
        }
        if status
        else {"job": name, "state": DAMAGED}
        for name, status in job_statuses.items()
    ]
    print_table(rows, optional=("top-5", "img/s", "machines", "step"))
    for name, status in job_statuses.items():
        if status and status.state == JobState.ENDING and status.doing:
            print_wrapped(f"{name}: {status.doing}")


def show_status(status: JobStatus, machines: Mapping[str, MachineRow], attempts: Sequence[AttemptRow]) -> None:
    """Print the status of a job, then tables of its machines and attempts if there are several."""
    texts = {
        "created": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(status.created)),
        "seconds": format_duration(status.seconds),
        "goodput": format_known(None if status.goodput is None else 100 * status.goodput, "{:.1f} %"),
    }
    for name, value in (encode(status) | texts).items():
        if name == "state":
            print_state(f"{name:19}", status.state)
        elif name not in ("where", "work") and value not in (None, ""):
            label = "script" if name == "recipe" and status.command else STATUS_LABELS.get(name, name)
            print(f"{label:18} {format_cell(value)}")
    if len(machines) > 1 or any(machine.host for machine in machines.values()):
        print()
        show_machines(machines)
    if len(attempts) > 1:
        print()
        show_timeline(attempts)
    if status.where:
        print()
        for line in time_table_lines(status.where, status.goodput):
            print_wrapped(line, indent=4)


def show_machines(machines: Mapping[str, MachineRow]) -> None:
    """Print a row for each machine, with the seconds until its first training step; then each reason and note once."""
    rows = [
        {
            "machine": name,
            "host": machine.host,
            "state": machine.state,
            "set-up s": f"{sum(machine.seconds.values()):.1f}" if machine.seconds else "",
        }
        for name, machine in machines.items()
    ]
    print_table(rows, optional=("host",))
    lines = [(name, line) for name, row in machines.items() for line in ([row.reason] if row.reason else row.notes)]
    for text in fold_by_machine(lines, {name: row.host for name, row in machines.items()}):
        print_wrapped(text, indent=2)


def show_timeline(attempts: Sequence[AttemptRow]) -> None:
    """Print a row for each of the last attempts: start, machines, reason, and the time and steps that it cost."""
    shown = attempts[-MAX_ATTEMPTS:]
    if len(shown) < len(attempts):
        print(f"the last {len(shown)} of {len(attempts):,} attempts; all: imgnet-cluster status JOB -o json")
    time_format = "%H:%M:%S %Z" if shown[-1].at - shown[0].at < DAY_SECONDS else "%m-%d %H:%M %Z"
    shortened = [replace(attempt, reason=cut_text(attempt.reason, MAX_REASON_CHARACTERS)) for attempt in shown]
    table = attempts_table(shortened, lambda moment: time.strftime(time_format, time.localtime(moment)))
    print_table(table.rows, optional=("from step", "at"))


def progress_parts(status: JobStatus) -> list[str]:
    """Return how far a job is: step, epoch and images per second, as far as they are known."""
    speed = status.images_per_second
    step, epoch = format_of_total(status.step, status.steps), format_of_total(status.epoch, status.epochs)
    return [
        *([f"step {step}"] if step else []),
        *([f"epoch {epoch}"] if epoch else []),
        *([f"{speed:.0f} img/s"] if speed else []),
    ]


def format_of_total(count: int | None, total: int | None) -> str:
    """Return a count with its total, such as "120/4500", or the one of both that is known."""
    return "/".join(str(number) for number in (count, total) if number is not None)
