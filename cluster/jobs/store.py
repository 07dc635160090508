"""The run folders of this computer: find, list and create jobs."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import NoSuchJob

from .job import Job

RUNS_ENV_VAR = "IMGNET_RUNS"
MAX_JOBS_LISTED = 5  # in an error message


def runs_folder() -> Path:
    """Return the folder of all run folders: $IMGNET_RUNS, else ./runs."""
    return Path(os.environ.get(RUNS_ENV_VAR) or "runs").absolute()


def all_jobs() -> list[Job]:
    """Return the jobs of this folder, oldest first.

    A folder without job.json belongs to a launch that was killed, and is left out.
    """
    paths = [
        spec_path.parent
        for spec_path in runs_folder().glob("job-*/job.json")
        if re.fullmatch("job-[1-9][0-9]*", spec_path.parent.name)
    ]
    return [Job(path) for path in sorted(paths, key=lambda path: _job_number(path.name))]


def _job_number(name: str) -> int:
    """Return 3 for "job-3"."""
    return int(name.removeprefix("job-"))


def find(name: str | None = None) -> Job:
    """Return the job called "job-3" or "3"; without a name the newest job. Raises `NoSuchJob`."""
    jobs = all_jobs()
    if name is None and jobs:
        return jobs[-1]
    for job in jobs:
        if name in (job.name, job.name.removeprefix("job-")):
            return job
    what = f"{name}: there is no such job" if name else "there is no job"
    existing = f" ({_describe_existing(jobs)})" if jobs else ""
    raise NoSuchJob(
        f"{what} in {runs_folder()}{existing}; change to the folder in which it was launched, or set {RUNS_ENV_VAR} to "
        "its folder runs; to list what is rented: imgnet-cluster ls --cloud"
    )


def _describe_existing(jobs: Sequence[Job]) -> str:
    """Return which jobs exist, in a few words."""
    if len(jobs) == 1:
        return f"there is {jobs[0].name}"
    if len(jobs) <= MAX_JOBS_LISTED:
        return f"there are {', '.join(job.name for job in jobs)}"
    return f"there are {jobs[0].name} to {jobs[-1].name}"


def create_run_folder(reserved_names: set[str]) -> Path:
    """Create the run folder with the next free number, and return its path.

    Two launches may do so at the same time: mkdir fails for the second one, which takes the next number.
    """
    runs_folder().mkdir(parents=True, exist_ok=True)
    number = max((_job_number(job.name) for job in all_jobs()), default=0) + 1
    while True:
        path = runs_folder() / f"job-{number}"
        with contextlib.suppress(FileExistsError):
            if path.name not in reserved_names:
                path.mkdir()
                return path
        number += 1
