"""The run folders of this computer: find, list and create jobs."""

import contextlib
import itertools
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.hosts_file import Host
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.state.run_folder import RUNS_ENV_VAR, run_folders
from cluster.state.run_folder import runs_folder as runs_folder

from .job import Job

MAX_JOBS_LISTED = 5  # in an error message


def busy_runs_folders() -> list[Path]:
    """Return the other runs folders in which jobs of this user run now, by the tmux sessions on this computer."""
    paths: set[Path] = set()
    with contextlib.suppress(ClusterError):  # no tmux, or its server does not answer
        paths = {Path(owner) for name in tmux.session_names() if (owner := tmux.session_owner(name))}
    # The session of a queue belongs to the runs folder itself.
    folders = {path.parent if is_job_id(path.name) else path for path in paths}
    return sorted(folder for folder in folders - {runs_folder()} if folder.is_dir())


def all_jobs(folder: Path | None = None) -> list[Job]:
    """Return the jobs of a runs folder (default: `runs_folder`), oldest first."""
    return [Job(each.path) for each in run_folders(folder or runs_folder())]


def intact_jobs(folder: Path | None = None) -> list[Job]:
    """Return the jobs of a runs folder (default: `runs_folder`), oldest first, without those of damaged run folders."""
    jobs = []
    for job in all_jobs(folder):
        with contextlib.suppress(ClusterError):
            if job.spec:
                jobs.append(job)
    return jobs


def jobs_on_machines(hosts: Collection[Host]) -> list[Job]:
    """Return the jobs of this user, from any runs folder, that have not ended and are on any of these machines."""
    endpoints = {host.endpoint for host in hosts}
    return [
        job
        for folder in (runs_folder(), *busy_runs_folders())
        for job in intact_jobs(folder)
        if not (job.has_ended or job.is_waiting) and any(host.endpoint in endpoints for host in job.spec.host_list)
    ]


def is_job_id(text: str) -> bool:
    """Whether a text has the form of a job's ID, "job-3" or "3". The job need not exist."""
    return bool(re.fullmatch(r"(job-)?[0-9]+", text))


def is_job(text: str) -> bool:
    """Whether a text has the form of a job's ID, is the name that its user gave a job here, or a run folder."""
    return is_job_id(text) or bool(_named_jobs(text)) or _is_run_folder(text)


def _is_run_folder(text: str) -> bool:
    return "/" in text and (Path(text) / "job.json").is_file()


def _named_jobs(name: str | None) -> list[Job]:
    """Return the jobs to which their users gave a name: several when one was adopted from another folder."""
    return [job for job in intact_jobs() if name and job.spec.given_name == name]


def find(name: str | None = None) -> Job:
    """Return the job with the ID "job-3" or "3", with this name or run folder; without one the newest job.

    Raises `NoSuchJob`, and `BadInput` when several jobs have the name.
    """
    if name and _is_run_folder(name):
        return Job(Path(name).resolve())
    jobs = all_jobs()
    if name is None and jobs:
        return jobs[-1]
    found = [job for job in jobs if name in (job.name, job.name.removeprefix("job-"))] or _named_jobs(name)
    if len(found) > 1:
        raise BadInput(f"{name}: is the name of {' and '.join(job.name for job in found)}; type one of these instead")
    if found:
        return found[0]
    what = f"{name}: there is no such job" if name else "there is no job"
    existing = f" ({_describe_existing(jobs)})" if jobs else ""
    raise NoSuchJob(
        f"{what} in {runs_folder()}{existing}; change to the folder in which it was launched, or set {RUNS_ENV_VAR} to "
        "its folder runs; to list all: imgnet-cluster ls --everywhere; what is rented: imgnet-cluster ls --cloud"
    )


def _describe_existing(jobs: Sequence[Job]) -> str:
    if len(jobs) <= MAX_JOBS_LISTED:
        titles = {job.name: job.spec.title for job in intact_jobs()}
        verb = "is" if len(jobs) == 1 else "are"
        return f"there {verb} {', '.join(titles.get(job.name, job.name) for job in jobs)}"
    return f"there are {jobs[0].name} to {jobs[-1].name}"


def create_run_folder(wanted_name: str = "") -> Path:
    """Create and return a run folder: `wanted_name`, or with the next free number; two launches get different ones."""
    runs_folder().mkdir(parents=True, exist_ok=True)
    number = max((each.number for each in run_folders(runs_folder())), default=0) + 1
    wanted_names = [wanted_name] if re.fullmatch("job-[1-9][0-9]{0,5}", wanted_name) else []
    for name in itertools.chain(wanted_names, (f"job-{number + offset}" for offset in itertools.count())):
        path = runs_folder() / name
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)  # other users could hold its locks, and read the secret of an attempt
            return path
    raise AssertionError("there are infinitely many names")
