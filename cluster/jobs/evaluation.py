"""Runs evaluation, export and prediction, which need torch, in separate processes and reads their messages."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from train.tools.process import die_with_parent, kill_process_groups
from train.tools.records import encode

from .job import Job


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

    When the caller closes the iterator, the process and its children are killed. Raises `ClusterError` with the error
    message of the process when it fails.
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
