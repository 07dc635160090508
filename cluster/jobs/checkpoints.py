"""Finds or downloads the checkpoints and networks of a job. Runs tasks with them, in processes with torch."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.connectors.local import module_command
from cluster.errors import BadInput, ClusterError
from cluster.machines.trained_files import newest_local_checkpoint
from cluster.script.snapshot import newest_version
from cluster.state.states import JobState
from train.metrics.time_table import TimePart
from train.recipe.history import best_epoch
from train.tools.agent_protocol import (
    BEST_MODEL_FILE,
    CHECKPOINT_PATTERN,
    MODEL_FILE,
    NETWORK_FILES,
    checkpoint_files,
    checkpoint_folders,
)
from train.tools.process import die_with_parent, kill_process_groups
from train.tools.process_log import Progress, no_progress
from train.tools.records import encode

from .job import Job


def trained_weights(job: Job, is_best: bool = False, progress: Progress = no_progress) -> Path:
    """Return the weights that a job left at its end, the last or the best; of an unfinished job, its checkpoint.

    `progress` is called with the bytes that have been downloaded from another machine, and with their total.

    Raises `ClusterError` when no machine sends them, `BadInput` for a command, and when the best were not kept.
    """
    require_recipe(job)
    fetch_network(job, progress)
    result = job.result
    last, best = (job.run_folder.network_folder / name for name in (MODEL_FILE, BEST_MODEL_FILE))
    if is_best:
        if result is None or result.state != JobState.DONE:
            raise BadInput(
                f"{job.name} is {job.state.phrase}; its best network is known when it is done: leave out --best"
            )
        if best.exists():
            return best
        if best_epoch(result.epochs) is not result.epochs[-1]:
            raise BadInput(f"{job.name} has not kept its best network (launch --keep best,last): leave out --best")
    return last if last.exists() else newest_checkpoint(job, progress)


def require_recipe(job: Job) -> None:
    """Raise `BadInput` for a job that runs a command of the user: what it has saved is for the user's own programs."""
    if job.spec.own_command:
        saved = "on its machines" if job.backend.is_remote else f"in {job.run_folder.shared / 'checkpoints'}"
        raise BadInput(
            f"{job.name} runs a command of your own, whose network this program does not know; what it has saved to "
            f"IMGNET_CHECKPOINTS is {saved}"
        )


def fetch_network(job: Job, progress: Progress = no_progress) -> list[Path]:
    """Download a finished job's network unless it is here; return its files. Raises `ClusterError` if none comes."""
    folder = job.run_folder.network_folder
    result = job.result
    is_recipe = job.spec.own_command is None
    if is_recipe and result and result.state == JobState.DONE and not (folder / MODEL_FILE).exists():
        try:
            job.backend.fetch_network(progress)
        except ClusterError as error:
            raise ClusterError(
                f"{job.name}: its network is on its machines, and no machine sent it: {error}"
            ) from error
    return [folder / name for name in NETWORK_FILES if (folder / name).exists()]


def newest_checkpoint(job: Job, progress: Progress = no_progress) -> Path:
    """Return the path of the newest complete checkpoint of a job, of a command the copy of its checkpoint folder.

    `progress` is as in `trained_weights`. Raises `ClusterError` when there is none, here or on a machine that answers.
    """
    is_command = job.spec.own_command is not None
    path = (newest_version if is_command else newest_local_checkpoint)(job.run_folder.shared)
    failure = ""
    if job.backend.is_remote and not (path and job.has_ended and not (is_command and job.spec.hosts)):
        try:
            path = job.backend.download_checkpoint(progress) or path
        except ClusterError as error:
            failure = str(error)
    if path:
        return path
    if failure:
        raise ClusterError(f"{job.name}: its checkpoints are on its machines, and no machine sent one: {failure}")
    state = job.state.phrase
    raise ClusterError(f"{job.name} is {state} and has saved nothing yet; see: imgnet-cluster status {job.run.handle}")


def has_saved(job: Job) -> bool:
    """Whether a job has written a checkpoint, as far as this computer knows: checkpoints stay on the machines."""
    folders = checkpoint_folders(job.run_folder.shared)
    if any(path for folder in folders for path in checkpoint_files(folder, CHECKPOINT_PATTERN)):
        return True
    if not job.backend.is_remote:
        return False
    if any(attempt.resume for attempt in job.run_folder.attempts.all()):
        return True
    status = job.status()
    has_waited_for_save = status.where is not None and status.where.parts[TimePart.CHECKPOINTS].seconds > 0
    return has_waited_for_save or (status.state == JobState.STOPPED and bool(status.step))  # it saves when it stops


def module_folders(job: Job) -> tuple[str, ...]:
    """Return the folders in a job's copy of the user's project in which the recipe's modules are found."""
    project = job.spec.user_project
    return project.search_folders(job.run_folder.user_project) if project else ()


def run_task(
    task: str, options: object, folders: Sequence[str]
) -> Iterator[Mapping[str, Any]]:  # Any: the values of a message
    """Run a task of `train.inference`; yield its messages. `folders` have the user's modules. Raises `ClusterError`."""
    arguments = (task, json.dumps(encode(options)))
    return run_module(module_command("train.inference.__main__", *arguments, module_folders=folders))


def run_module(argv: Sequence[str]) -> Iterator[Mapping[str, Any]]:  # Any: the values of a message
    """Run a command and yield its messages, lines of JSON, as they come. What it logs goes to stderr.

    When the caller closes the iterator, all its processes are killed. Raises `ClusterError` with the error of one.
    """
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent
    )
    assert process.stdout
    try:
        for line in process.stdout:
            message = json.loads(line)
            if message["kind"] == "error":
                raise ClusterError(message["error"])
            yield message
        if code := process.wait():
            raise ClusterError(f"the process ended with code {code}; its last lines are above")
    finally:
        kill_process_groups([process])
        process.stdout.close()
