"""Prepares what a job needs on its machine: the images, and the environment or container image of a command."""

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.connectors.local import module_command
from cluster.state.spec import JobSpec
from train.tools import process
from train.tools.text_files import last_line

# An EC2 machine with an address of its own may need a moment until its credentials can be read. botocore tries once.
METADATA_ENVIRONMENT = {"AWS_METADATA_SERVICE_NUM_ATTEMPTS": "5", "AWS_METADATA_SERVICE_TIMEOUT": "5"}
KILL_TIMEOUT_SECONDS = 10.0
ENVIRONMENT_RESULT_FILE = "environment"  # in the work folder: path of a Python, or what docker has


class DataPreparationError(Exception):
    """The images, or the environment, could not be generated, fetched or installed. The text is one line."""


def prepare_data(spec: JobSpec, shared: Path, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Generate or fetch the images, where the job wants it.

    `on_progress` gets the activity and its progress; its exception ends the preparation. Raises `DataPreparationError`.
    """
    if spec.generate_data:
        _generate_sample_set(spec, log_path, on_progress)
    elif spec.data_source:
        _run_command(f"fetching {spec.data_source}", log_path, on_progress, "data", "fetch-for-job", str(shared))


def prepare_environment(
    spec: JobSpec, project: Path | None, work: Path, log_path: Path, on_progress: Callable[[str, str], None]
) -> tuple[str, bool]:
    """Install what a command's project requires, or pull its image.

    Returns the path of the Python to use, "" for the active one, and whether docker has the NVIDIA runtime. On the
    launching computer and on Slurm, only what the command names is installed. `on_progress`, errors: `prepare_data`.
    """
    command = spec.own_command
    result = work / ENVIRONMENT_RESULT_FILE
    if command and command.image:
        arguments = (command.image, str(result))
        _run_command(f"pulling {command.image}", log_path, on_progress, *arguments, module="cluster.script.container")
        return "", bool(result.read_text())
    if not command or project is None or not spec.user_project or not (command.requirements or spec.has_own_folders):
        return "", False
    # The work folder of such a machine is FOLDER/jobs/UID-MACHINE; its environments are in FOLDER/venv.
    folder = work.absolute().parents[1] if spec.has_own_folders else cache_folder()
    workdir = project / spec.user_project.workdir
    words = (str(workdir), str(folder), str(result), command.requirements)
    module = "cluster.project_environment"
    _run_command("installing the project's requirements", log_path, on_progress, *words, module=module)
    return result.read_text(), False


def cache_folder() -> Path:
    """Return the folder of environments on the launching computer: in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "imgnet-cluster"


def _generate_sample_set(spec: JobSpec, log_path: Path, on_progress: Callable[[str, str], None]) -> None:
    """Generate the built-in set and its resized copies. Of several machines that share the folder one does the work."""
    data = spec.recipe.data
    counts = ("--train", str(data.train), "--val", str(data.val))
    verb = "checking" if Path(spec.train.data, "sample.json").exists() else "generating"
    _run_command(f"{verb} the built-in set", log_path, on_progress, "data", "sample", *counts, spec.train.data)
    sizes = ",".join(map(str, spec.recipe.copy_sizes))
    if sizes and spec.train.scale == 1:  # a trial on a part of the images is fast enough without copies
        arguments = ("data", "resize", "--overwrite", spec.train.data, spec.train.copies, "--sizes", sizes)
        verb = "checking" if all(Path(spec.train.copies, size).is_dir() for size in sizes.split(",")) else "making"
        _run_command(f"{verb} copies of {sizes} pixels", log_path, on_progress, *arguments)


def _run_command(
    activity: str, log_path: Path, on_progress: Callable[[str, str], None], *arguments: str, module: str = "cluster"
) -> None:
    """Run a module, by default this program, with its output in the log. Raises `DataPreparationError` on failure."""
    child = process.start_process(module_command(module, *arguments), log_path, METADATA_ENVIRONMENT)
    try:
        while child.poll() is None:
            on_progress(activity, last_line(log_path))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.kill_process_groups([child], KILL_TIMEOUT_SECONDS)
    if child.returncode:
        message = last_line(log_path).removeprefix("error: ")
        raise DataPreparationError(f"{activity}: {message or f'exit code {child.returncode}'}")


def count_fetch_requests(spec: JobSpec) -> int:
    """Return the requests that fetched a job's images from an object store: two for each file, without repetitions."""
    folders = {Path(spec.train.data), Path(spec.train.copies)}
    return 2 * sum(path.is_file() for folder in folders for path in folder.rglob("*"))
