"""The images of a job, before its machine trains: the built-in set is drawn, a packed set may be fetched."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.connectors.local import module_command
from cluster.state.spec import JobSpec
from train.recipe.schema import FULL_SIZE, reads_full_size
from train.tools import process

# An address of one's own at EC2 may need a moment to give out the machine's credentials (botocore tries once).
METADATA_ENVIRONMENT = {"AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5", "AWS_METADATA_SERVICE_TIMEOUT": "5"}


class DataPreparationError(Exception):
    """The set could not be drawn, or not be fetched; one line."""


def prepare_data(spec: JobSpec, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Draw or fetch what the job wants to be drawn or fetched; `going_on` as in `draw`. Raises `DrawError`."""
    if spec.generate_data:
        generate_sample_set(spec, log_path, on_progress)
    elif spec.data_source:
        _run_command(f"fetching {spec.data_source}", log_path, on_progress, *fetch_command(spec))


def generate_sample_set(spec: JobSpec, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Draw the set and the copies that its phases read; of several machines that share the folder one does.

    `going_on` is called all the time with what is being done and how far it is; what it raises ends the drawing.
    Raises `DrawError`.
    """
    _run_command("drawing the built-in set", log_path, on_progress, "data", "sample", spec.data)
    sizes = ",".join(map(str, spec.recipe.copy_sizes))
    if sizes and spec.scale == 1:  # a rehearsal on a part of the images does as well without
        doing = f"making copies of {sizes} pixels"
        _run_command(doing, log_path, on_progress, "data", "resize", "--anew", spec.data, spec.copies, "--sizes", sizes)


def _run_command(activity: str, log_path: Path, on_progress: Callable[[str, str], None], *arguments: str) -> None:
    """Run one of our own commands, its output to the log."""
    child = process.start_process(module_command("cluster", *arguments), log_path, METADATA_ENVIRONMENT)
    try:
        while child.poll() is None:
            on_progress(activity, last_line(log_path))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.kill_process_groups([child], 10)
    if child.returncode:
        said = last_line(log_path).removeprefix("error: ")
        raise DataPreparationError(f"{activity}: {said or f'exit code {child.returncode}'}")


def last_line(path: Path) -> str:
    """Return the last line of a log; of a progress bar its last state."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def fetch_command(spec: JobSpec) -> list[str]:
    """Return the words of our own command line that fetch a job's images on one of its machines."""
    sizes = ",".join([FULL_SIZE, *map(str, spec.recipe.copy_sizes)])
    words = ["data", "fetch", spec.data_source, spec.data, "--sizes", sizes, "--else-full"]
    words += [] if reads_full_size(spec.recipe) else ["--index-only"]
    return words + (["--copies", spec.copies_source] if spec.copies_source else [])
