"""Prepares a job's images on its machine: generates the built-in set, or fetches a packed set."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.connectors.local import module_command
from cluster.state.spec import JobSpec
from train.recipe.schema import FULL_SIZE, reads_full_size
from train.tools import process

# An EC2 machine with an address of its own may need a moment until its credentials can be read. botocore tries once.
METADATA_ENVIRONMENT = {"AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5", "AWS_METADATA_SERVICE_TIMEOUT": "5"}
KILL_TIMEOUT_SECONDS = 10.0


class DataPreparationError(Exception):
    """The images could not be generated or fetched. The text is one line."""


def prepare_data(spec: JobSpec, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Generate or fetch the images, where the job wants it.

    `on_progress` is called all the time with the activity and its progress; an exception that it raises ends the
    preparation. Raises `DataPreparationError`.
    """
    if spec.generate_data:
        generate_sample_set(spec, log_path, on_progress)
    elif spec.data_source:
        _run_command(f"fetching {spec.data_source}", log_path, on_progress, *fetch_command(spec))


def generate_sample_set(spec: JobSpec, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Generate the built-in set and the resized copies that the recipe's phases read.

    Of several machines that share the folder only one does the work. `on_progress` is called as in `prepare_data`.
    Raises `DataPreparationError`.
    """
    _run_command("generating the built-in set", log_path, on_progress, "data", "sample", spec.train.data)
    sizes = ",".join(map(str, spec.recipe.copy_sizes))
    if sizes and spec.train.scale == 1:  # a trial on a part of the images is fast enough without copies
        arguments = ("data", "resize", "--anew", spec.train.data, spec.train.copies, "--sizes", sizes)
        _run_command(f"making copies of {sizes} pixels", log_path, on_progress, *arguments)


def _run_command(activity: str, log_path: Path, on_progress: Callable[[str, str], None], *arguments: str) -> None:
    """Run an imgnet-cluster command with its output in the log. Raises `DataPreparationError` when it fails."""
    child = process.start_process(module_command("cluster", *arguments), log_path, METADATA_ENVIRONMENT)
    try:
        while child.poll() is None:
            on_progress(activity, last_line(log_path))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.kill_process_groups([child], KILL_TIMEOUT_SECONDS)
    if child.returncode:
        message = last_line(log_path).removeprefix("error: ")
        raise DataPreparationError(f"{activity}: {message or f'exit code {child.returncode}'}")


def last_line(path: Path) -> str:
    """Return the last line of a log, or the last state of a progress bar; "" when there is none."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def fetch_command(spec: JobSpec) -> list[str]:
    """Return the arguments of `imgnet-cluster` that fetch a job's images on one of its machines."""
    sizes = ",".join([FULL_SIZE, *map(str, spec.recipe.copy_sizes)])
    arguments = ["data", "fetch", spec.data_source, spec.train.data, "--sizes", sizes, "--else-full"]
    if not reads_full_size(spec.recipe):
        arguments.append("--index-only")
    if spec.copies_source:
        arguments += ["--copies", spec.copies_source]
    return arguments
