"""Follows a running job in the terminal, and prints how it ended and what to type next."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cluster.errors import EXIT_UNFINISHED, ClusterError
from cluster.jobs import checkpoints
from cluster.jobs.job import Job
from cluster.report.tables import differing_settings
from cluster.script.snapshot import newest_version
from cluster.state.states import JobState, MachineState, work_title
from cluster.state.status import JobResult, JobStatus
from cluster.state.timeline import describe_members
from train.metrics.records import EpochRow
from train.metrics.text import describe_image_usage, epoch_header, epoch_line, format_duration
from train.recipe.history import best_epoch
from train.recipe.target import describe_outcome, has_stalled
from train.tools.agent_protocol import BEST_MODEL_FILE, CLASSES_FILE, MODEL_FILE
from train.tools.files import FULL_DISK_ERRORS, open_regular
from train.tools.process_log import log_end

from .cloud import format_dollars
from .status import progress_parts, show_machines, show_timeline
from .tables import STATE_EXIT_CODES, console, print_state, print_table, print_wrapped

PROGRAM = "imgnet-cluster"
BEST_MARK = "*"  # of the best accuracy in a sweep
REFRESH_SECONDS = 0.3
LOG_END_LINES = 10  # of a failed rank
LOG_END_BYTES = 10_000
MAX_OUTPUT_BYTES = 1 << 16  # of a command, shown at one look
TRAINING_STATES = (MachineState.TRAINING, MachineState.VALIDATING)


def follow(job: Job, others: Sequence[Job] = ()) -> int:
    """Show a job until it ends: a line for each epoch, or what a command prints; on a terminal, also a progress bar.

    The bar also shows the `others` of its sweep. Off a terminal, each change of activity is a line. Returns an exit
    code.
    """
    out = console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[right]}"),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    output = CommandOutput(job) if job.spec.own_command else None
    shown_epochs: set[tuple[int, int]] = set()
    activity = trouble = ""
    # When training was first seen to run, and at which step: the remaining time is estimated from there.
    training_start: float | None = None
    first_step = 0
    has_shown_machines = False
    with bar:
        task = bar.add_task(job.name, total=None, right="")
        while True:
            trouble = _refresh(job, trouble, out)
            has_ended = job.has_ended
            status = job.status()
            epoch_lines = new_epoch_lines(job.run_folder.epochs(), shown_epochs)
            if not has_shown_machines and status.doing == MachineState.TRAINING:
                has_shown_machines = True
                machines = job.machine_details()
                if len(machines) > 1 or any(machine.notes for machine in machines.values()):
                    bar.stop()  # else the table would begin behind the bar
                    show_machines(machines)
                    bar.start()
            for line in (*epoch_lines, *(output.new_lines(has_ended) if output else ())):
                out.print(line)
            if status.doing != activity and not has_ended:
                activity = status.doing
                if activity and not out.is_terminal and activity not in (*TRAINING_STATES, MachineState.DONE):
                    out.print(f"{time.strftime('%H:%M:%S')} {activity}")
            step = status.step or 0
            if training_start is None or activity not in TRAINING_STATES:
                training_start = time.monotonic()
                first_step = step
            right = progress_text(status, training_start, first_step)
            if out.is_terminal:
                right += "".join(f"  {_describe_other(other)}" for other in others)
            bar.update(task, description=f"{job.name} {activity}", completed=step, total=status.steps, right=right)
            if has_ended or status.state == JobState.ADOPTED:
                break
            time.sleep(REFRESH_SECONDS)
    if status.state == JobState.ADOPTED:
        out.print(status.warning)
        return EXIT_UNFINISHED
    show_outcome(job)
    return STATE_EXIT_CODES[job.state]


def _refresh(job: Job, shown_trouble: str, out: Console) -> str:
    """Refresh a job and return why it cannot be now: the disk is full. Print that unless it is shown already."""
    try:
        job.refresh()
    except ClusterError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL_DISK_ERRORS):
            raise
        if str(error) != shown_trouble:
            out.print(f"{time.strftime('%H:%M:%S')} {error}")
        return str(error)
    return ""


def new_epoch_lines(rows: Sequence[EpochRow], shown: set[tuple[int, int]]) -> list[str]:
    """Return the lines of the epochs that are not `shown` (attempt, epoch), repeated ones too, and add them to it."""
    new_rows = [row for row in rows if (row.attempt, row.epoch) not in shown]
    header = [epoch_header()] if new_rows and not shown else []
    shown.update((row.attempt, row.epoch) for row in new_rows)
    return [*header, *map(epoch_line, new_rows)]


@dataclass
class CommandOutput:
    """Reads the new output of rank 0 of a command, from the launch or the last resume on."""

    job: Job
    attempt: int = 0
    printed_bytes: int = 0  # of that attempt's log

    def new_lines(self, is_complete: bool = False) -> list[str]:
        """Return the new lines, with `is_complete` also an unfinished one; of a progress bar only the last state."""
        lines: list[str] = []
        launch_id = self.job.run_folder.launch_id
        attempts = [attempt for attempt in self.job.run_folder.attempts.all() if attempt.members]
        numbers = [attempt.number for attempt in attempts if attempt.launch_id == launch_id]
        for number in (number for number in numbers if number >= self.attempt):
            if number > self.attempt:
                self.attempt, self.printed_bytes = number, 0
            with contextlib.suppress(OSError):
                lines += self._read_lines(is_complete or number != numbers[-1])
        return lines

    def _read_lines(self, is_complete: bool) -> list[str]:
        with open_regular(self.job.log_path(0, self.attempt)) as file:
            size = file.seek(0, os.SEEK_END)
            left_out = max(0, size - self.printed_bytes - MAX_OUTPUT_BYTES)
            file.seek(self.printed_bytes + left_out)
            data = file.read(MAX_OUTPUT_BYTES)
        if not is_complete:
            data = data[: data.rfind(b"\n") + 1]
        self.printed_bytes += left_out + len(data)
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in data.decode(errors="replace").split("\n")]
        note = f"... {left_out:,} bytes are left out; all: imgnet-cluster logs {self.job.run.handle}"
        return [*[note][: bool(left_out)], *(lines if lines[-1] else lines[:-1])]


def _describe_other(job: Job) -> str:
    """Return the state of another job in a few characters, such as "job-7 25%"."""
    status = job.status()
    if status.state == JobState.RUNNING and status.step and status.steps:
        return f"{job.name} {100 * status.step // status.steps}%"
    return f"{job.name} {status.state}"


def progress_text(status: JobStatus, since: float, first_step: int) -> str:
    """Return the text beside the bar: steps, speed, and the time left.

    The time left assumes the mean step since `first_step`, at monotonic time `since`. A command may tell its step only.
    """
    is_told = (status.steps and status.images_per_second) or status.command
    if not is_told or status.step is None:
        return status.progress.rpartition(": ")[2]
    parts = progress_parts(status)
    steps_done = status.step - first_step
    if steps_done > 0 and status.steps:
        seconds_left = (time.monotonic() - since) * max(0, status.steps - status.step) / steps_done
        parts.append(f"{format_duration(seconds_left)} left")
    return "  ".join(parts)


def show_outcome(job: Job) -> None:
    """Print how a job ended, and the next commands."""
    result = job.result
    assert result
    seconds = result.seconds
    print_state(f"{job.name} ", result.state, f": {result.reason}" if result.reason else "")
    if result.state == JobState.DONE:
        training_seconds = seconds.get("training", 0.0) + seconds.get("validation", 0.0)
        work = "the command ran" if job.spec.own_command else "training and validation"
        numbers = (
            ("top-1 {:.2f} %", result.top1),
            ("top-5 {:.2f} %", result.top5),
            (f"{work} {{:.1f}} s of {format_duration(seconds['total'])} at work", training_seconds),
            ("{:.0f} img/s", result.images_per_second),
            ("goodput {:.1f} %", None if result.goodput is None else 100 * result.goodput),
            ("${:.2f}", result.dollars),
        )
        known = "  ".join(template.format(number) for template, number in numbers if number is not None)
        unpriced = job.backend.job_cost().unknown
        print(known + (f" without {', '.join(unpriced)}, whose price is unknown" if unpriced else ""))
    if result.target:
        print(describe_outcome(result.target))
    if result.state == JobState.DONE and not job.spec.own_command:
        patience, epochs = job.spec.recipe.patience, job.spec.recipe.epochs
        if has_stalled(patience, result.epochs) and (last := result.epochs[-1].epoch) < epochs:
            print(f"ended after epoch {last} of {epochs}: {patience} validations in a row without a higher top-1")
    if len(result.timeline) > 1:
        show_timeline(result.timeline)
    if result.did_not_answer:
        print(describe_silent_machines(job, result.did_not_answer))
    if result.state == JobState.FAILED and job.spec.own_command:
        _print_log_of_failed_rank(job)
    if result.ids_wrong is not None:
        print(describe_image_usage(result.ids_wrong))
    if job.spec.own_command:
        if job.backend.is_remote or newest_version(job.run_folder.shared):
            _print_hint(f"  checkpoints {PROGRAM} pull {job.run.handle}        (prints the folder of the newest)")
    elif result.state == JobState.DONE:
        _print_network(job, result)
    print_commands_after(job, result)


def describe_silent_machines(job: Job, names: Sequence[str]) -> str:
    """Return which machines did not answer when a job was ended, and what to do about them."""
    return (
        f"{describe_members(names)} of {job.name} did not answer at the end, so processes may still be running there; "
        f"to end them when there is an answer again: imgnet-cluster down {job.run.handle}"
    )


def _print_log_of_failed_rank(job: Job) -> None:
    end = job.run_folder.attempts.newest()
    if end is None or end.failed_rank is None:
        return
    with contextlib.suppress(OSError):
        path = job.log_path(end.failed_rank)
        lines = log_end(path, LOG_END_BYTES).splitlines()[-LOG_END_LINES:]
        print(f"the last lines of rank {end.failed_rank} ({path}):", *(f"  {line}" for line in lines), sep="\n")


def _print_hint(line: str) -> None:
    """Print a title and a text, on a narrow terminal on several lines."""
    print_wrapped(line, len("  all results "))


def _print_network(job: Job, result: JobResult) -> None:
    folder = job.run_folder.network_folder
    if not (folder / MODEL_FILE).exists():
        if job.backend.is_remote:
            _print_hint(f"  network     on its machines; bring it here: imgnet-cluster pull {job.run.handle}")
        return
    last_epoch = next(reversed(result.epochs), None)
    for title, name, epoch in (
        ("network", MODEL_FILE, last_epoch),
        ("best", BEST_MODEL_FILE, best_epoch(result.epochs)),
    ):
        if (folder / name).exists():
            accuracy = f"  (epoch {epoch.epoch}, top-1 {epoch.top1:.2f} %)" if epoch and epoch.top1 is not None else ""
            _print_hint(f"  {title:11} {folder / name}{accuracy}")
    _print_hint(f"  classes     {folder / CLASSES_FILE}")
    name = job.run.handle
    _print_hint(f"  use it      imgnet-cluster predict {name} PHOTO.jpg    imgnet-cluster export {name}")


def print_next_commands(job: Job) -> None:
    """Print the commands that are useful while a job runs."""
    print_activation()
    keys = job.backend.detach_keys
    _print_hint(f"  session     {PROGRAM} attach {job.run.handle}        (detach with {keys}, the job continues)")
    _print_hint(f"  follow      {PROGRAM} logs -f {job.run.handle}")
    _print_hint(f"  curves      {PROGRAM} tensorboard {job.run.handle}")
    _print_hint(f"  stop        {PROGRAM} stop {job.run.handle}")


def print_commands_after(job: Job, result: JobResult) -> None:
    """Print the commands that are useful in the state in which a job has ended."""
    if job.status().step or result.epochs:
        _print_hint(f"  curves      {PROGRAM} tensorboard {job.run.handle}")
    if job.status().step or result.epochs or job.spec.own_command:
        _print_hint(f"  report      {PROGRAM} report {job.run.handle}")
    end = job.run_folder.attempts.newest()
    rank = f" --rank {end.failed_rank}" if end and end.failed_rank else ""
    _print_hint(f"  log         {PROGRAM} logs {job.run.handle}{rank}")
    if result.state != JobState.DONE:
        _print_hint(f"  {_describe_continuation(job, result)}")
    _print_hint(f"  all results {job.run_folder.result_path}")
    print_activation()


def _describe_continuation(job: Job, result: JobResult) -> str:
    """Return the command that goes on: a resume if something was saved and the input is right, else a launch."""
    resume = f"{PROGRAM} resume {job.run.handle}"
    has_saved = job.spec.own_command is not None or checkpoints.has_saved(job)
    if result.state == JobState.STOPPED:
        return f"continue    {resume}" if has_saved else f"start again {resume}  (nothing was saved yet)"
    if has_saved and not result.is_input_wrong:
        return f"continue    {resume}"
    return f"fix it, then: {job.launch_command}"


def print_activation() -> None:
    """Print how to put the program on PATH, when it is not there: `make demo` calls it by its path."""
    activate = Path(sys.prefix, "bin", "activate")
    if shutil.which(PROGRAM) or not activate.exists():
        return
    shown_path = os.path.relpath(activate) if activate.is_relative_to(Path.cwd()) else activate
    _print_hint(f"  first       . {shown_path}        (so that this shell finds {PROGRAM})")


def show_sweep(jobs: Sequence[Job]) -> None:
    """Print a row for each job of a sweep: the settings that differ, the best accuracy, time and cost."""
    settings = [job.hparams for job in jobs]
    statuses = [job.status() for job in jobs]
    names = differing_settings(settings)
    best = max((status.top1 for status in statuses if status.top1 is not None), default=None)
    has_cost = any(job.result and job.result.dollars for job in jobs)
    work = work_title(status.work for status in statuses)
    own_columns = ("job", "state", "top-1", "best", "at work", "cost")  # a script may have an option of such a name
    rows = [
        {
            "job": job.name,
            work: status.recipe,
            "state": status.state,
            **{f"--{name}" if name in own_columns else name: values.get(name) for name in names},
            "top-1": "" if status.top1 is None else f"{status.top1:.2f}",
            "best": BEST_MARK if status.top1 is not None and status.top1 == best else "",
            "at work": format_duration(status.seconds),
            **({"cost": format_dollars(job.result.dollars) if job.result else ""} if has_cost else {}),
        }
        for job, values, status in zip(jobs, settings, statuses, strict=True)
    ]
    print_table(rows, optional=(work,))
    _print_hint(f"  compare     imgnet-cluster report {' '.join(job.run.handle for job in jobs)}")
    _print_hint(f"  curves      imgnet-cluster tensorboard {' '.join(job.run.handle for job in jobs)}")
