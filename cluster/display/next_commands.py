"""Prints the next commands for a job: while it runs, and when it has ended. They work in the user's shell."""

import os
import shutil
import sys
from pathlib import Path

from cluster.jobs import checkpoints
from cluster.jobs.job import Job
from cluster.state.job_result import JobResult
from cluster.state.states import JobState

PROGRAM = "imgnet-cluster"


def print_next_commands(job: Job) -> None:
    """Print the commands that are useful while a job runs."""
    print_activation()
    keys = job.backend.detach_keys
    print(f"  session     {PROGRAM} attach {job.name}        (detach with {keys}, the job continues)")
    print(f"  follow      {PROGRAM} logs -f {job.name}")
    print(f"  curves      {PROGRAM} tensorboard {job.name}")
    print(f"  stop        {PROGRAM} stop {job.name}")


def print_commands_after(job: Job, result: JobResult) -> None:
    """Print the commands that are useful in the state in which a job has ended."""
    if job.status().step or result.epochs:
        print(f"  curves      {PROGRAM} tensorboard {job.name}")
    if job.status().step or result.epochs or job.spec.own_command:
        print(f"  report      {PROGRAM} report {job.name}")
    end = job.run_folder.attempts.newest()
    rank = f" --rank {end.failed_rank}" if end and end.failed_rank else ""
    print(f"  log         {PROGRAM} logs {job.name}{rank}")
    if result.state != JobState.DONE:
        print(f"  {_describe_continuation(job, result)}")
    print(f"  all results {job.run_folder.result_path}")
    print_activation()


def _describe_continuation(job: Job, result: JobResult) -> str:
    """Return the command that continues a job that is not done.

    A failed job is resumed when it has a checkpoint and the cause was not its input; else it is launched again.
    """
    resume = f"{PROGRAM} resume {job.name}"
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
    print(f"  first       . {shown_path}        (so that this shell finds {PROGRAM})")
