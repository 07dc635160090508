"""The run folders of this computer: find, list and create jobs."""

import contextlib
import os
import re
from pathlib import Path

from cluster.errors import NoSuchJob

from .job import Job

RUNS_ENV_VAR = "IMGNET_RUNS"


def runs_folder() -> Path:
    """Return the folder of all run folders: $IMGNET_RUNS, else ./runs."""
    return Path(os.environ.get(RUNS_ENV_VAR) or "runs").absolute()


def all_jobs() -> list[Job]:
    """Return the jobs of this folder, oldest first. A folder without job.json is of a launch that was killed."""
    found = [
        path.parent
        for path in runs_folder().glob("job-*/job.json")
        if re.fullmatch("job-[1-9][0-9]*", path.parent.name)
    ]
    return [Job(path) for path in sorted(found, key=lambda path: int(path.name[4:]))]


def find(name: str | None = None) -> Job:
    """Return the job called "job-3" or "3", without a name the newest. Raises `NoSuchJob`."""
    jobs = all_jobs()
    if name is None and jobs:
        return jobs[-1]
    for job in jobs:
        if name in (job.name, job.name.removeprefix("job-")):
            return job
    known = (
        f"there are {', '.join(job.name for job in jobs)}"
        if 1 < len(jobs) < 6
        else f"there are {jobs[0].name} to {jobs[-1].name}"
        if len(jobs) > 1
        else f"there is {jobs[0].name}"
        if jobs
        else "there are none"
    )
    raise NoSuchJob(
        f"{name or 'no job'}: no such job in {runs_folder()} ({known}); what is rented: imgnet-cluster ls --cloud"
    )


def create_run_folder(reserved_names: set[str]) -> Path:
    """Claim the next free number. mkdir fails for the second of two that start at once, who takes the one after."""
    runs_folder().mkdir(parents=True, exist_ok=True)
    number = max((int(job.name[4:]) for job in all_jobs()), default=0) + 1
    while True:
        path = runs_folder() / f"job-{number}"
        with contextlib.suppress(FileExistsError):
            if path.name not in reserved_names:
                path.mkdir()
                return path
        number += 1
