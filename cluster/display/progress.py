"""Follows a running job in the terminal and prints how it ended."""

import time
from collections.abc import Sequence

from cluster.jobs import billing
from cluster.jobs.job import Job
from cluster.state.states import JobState, MachineState
from cluster.state.status import JobStatus
from train.metrics.text import epoch_header, epoch_line, format_duration
from train.recipe.target import describe_outcome

from .status import show_machines, show_timeline
from .tables import STATE_EXIT_CODES, console

REFRESH_SECONDS = 0.3
TRAINING_STATES = (MachineState.TRAINING, MachineState.VALIDATING)


def follow(job: Job) -> int:
    """Show a job until it ends: a line for each epoch and, on a terminal, a progress bar.

    Off a terminal, each change of activity is a line. Returns the exit code for the job's final state.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    out = console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[right]}"),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    shown_epochs = 0
    activity = ""
    # When training was first seen to run, and at which step: the remaining time is estimated from there.
    training_start: float | None = None
    first_step = 0
    has_shown_machines = False
    with bar:
        task = bar.add_task(job.name, total=None, right="")
        while True:
            job.refresh()
            has_ended = job.has_ended
            status = job.status()
            epoch_rows = job.epochs()
            if not has_shown_machines and status.doing == MachineState.TRAINING and len(job.spec.machine_names) > 1:
                has_shown_machines = True
                show_machines(job.machine_details())
            for row in epoch_rows[shown_epochs:]:
                if shown_epochs == 0:
                    out.print(epoch_header())
                out.print(epoch_line(row))
                shown_epochs += 1
            if status.doing != activity and not has_ended:
                activity = status.doing
                if activity and not out.is_terminal and activity not in (*TRAINING_STATES, MachineState.DONE):
                    out.print(f"{time.strftime('%H:%M:%S')} {activity}")
            step = status.step or 0
            if training_start is None or activity not in TRAINING_STATES:
                training_start = time.monotonic()
                first_step = step
            right = _progress_text(status, training_start, first_step)
            bar.update(task, description=f"{job.name} {activity}", completed=step, total=status.steps, right=right)
            if has_ended:
                break
            time.sleep(REFRESH_SECONDS)
    show_outcome(job)
    return STATE_EXIT_CODES[job.state]


def _progress_text(status: JobStatus, since: float, first_step: int) -> str:
    """Return the text beside the bar: steps, speed, and the time left.

    The time left assumes the mean step time since `first_step`, at monotonic time `since`.
    """
    if not status.steps or status.step is None or not status.images_per_second:
        return status.progress.rpartition(": ")[2]
    steps = f"{status.step}/{status.steps}"
    epochs = f"{status.epoch}/{status.epochs}"
    steps_done = status.step - first_step
    steps_left = status.steps - status.step
    time_left = ""
    if steps_done > 0:
        time_left = f"  {format_duration((time.monotonic() - since) * steps_left / steps_done)} left"
    return f"step {steps}  epoch {epochs}  {status.images_per_second:.0f} img/s{time_left}"


def show_outcome(job: Job) -> None:
    """Print how a job ended, and what to type next."""
    result = job.result
    assert result
    seconds = result.seconds
    print(f"{job.name} {result.state}{': ' if result.reason else ''}{result.reason}")
    if result.state == JobState.DONE:
        training_seconds = seconds.get("training", 0.0) + seconds.get("validation", 0.0)
        numbers = (
            ("top-1 {:.2f} %", result.top1),
            ("top-5 {:.2f} %", result.top5),
            (f"training and validation {{:.1f}} s of {format_duration(seconds['total'])}", training_seconds),
            ("{:.0f} img/s", result.images_per_second),
            ("goodput {:.1f} %", None if result.goodput is None else 100 * result.goodput),
            ("${:.2f}", result.dollars),
        )
        known = "  ".join(template.format(number) for template, number in numbers if number is not None)
        print(f"{known}{_unpriced_note(billing.machines_without_price(job))}")
    if result.target:
        print(describe_outcome(result.target))
    if len(result.timeline) > 1:
        show_timeline(result.timeline)
    for name in result.did_not_answer:
        print(
            f"machine {name} did not answer at the end, so processes may still be running there; "
            f"when it answers again, check: imgnet-cluster ssh {job.name} --machine {name}"
        )
    if result.ids_wrong is not None:
        print("; ".join(result.ids_wrong) or "every image was used exactly once in every epoch")
    print(f"  curves      imgnet-cluster tensorboard {job.name}")
    print(f"  report      imgnet-cluster report {job.name}")
    print(f"  log         imgnet-cluster logs {job.name}")
    if result.state != JobState.DONE:
        print(f"  continue    imgnet-cluster resume {job.name}")
    print(f"  all results {job.run_folder.result_path}")


def _unpriced_note(machines: Sequence[str]) -> str:
    return f" without {', '.join(machines)}, whose price is unknown" if machines else ""


def print_next_commands(job: Job) -> None:
    """Print what to type while a job runs."""
    keys = job.backend.detach_keys
    print(f"  session     imgnet-cluster attach {job.name}        (detach with {keys}, the job continues)")
    print(f"  follow      imgnet-cluster logs -f {job.name}")
    print(f"  curves      imgnet-cluster tensorboard {job.name}")
    print(f"  stop        imgnet-cluster stop {job.name}")
