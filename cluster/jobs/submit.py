"""The verbs over jobs: launch, find, list. What the command line does is a function here first."""

import contextlib
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.backends import registry
from cluster.errors import BadInput, ClusterError, NoSuchJob
from cluster.planning.plan import Plan, load_recipes, plan
from cluster.state.spec import Folders, Spec
from train.recipe.schema import Recipe
from train.tools.provenance import git_commit

from .job import Job
from .queue_state import with_machines

RUNS = "IMGNET_RUNS"

__all__ = ["Job", "Plan", "all_jobs", "find", "launch", "load_recipes", "plan", "runs"]


def runs() -> Path:
    """Return the folder of all run folders: $IMGNET_RUNS, else ./runs."""
    return Path(os.environ.get(RUNS) or "runs").absolute()


def all_jobs() -> list[Job]:
    """Return the jobs of this folder, oldest first. A folder without job.json is of a launch that was killed."""
    found = [path.parent for path in runs().glob("job-*/job.json") if re.fullmatch("job-[1-9][0-9]*", path.parent.name)]
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
    raise NoSuchJob(f"{name or 'no job'}: no such job in {runs()} ({known}); what is rented: imgnet-cluster ls --cloud")


def make_folder(taken: set[str]) -> Path:
    """Claim the next free number. mkdir fails for the second of two that start at once, who takes the one after."""
    runs().mkdir(parents=True, exist_ok=True)
    number = max((int(job.name[4:]) for job in all_jobs()), default=0) + 1
    while True:
        path = runs() / f"job-{number}"
        with contextlib.suppress(FileExistsError):
            if path.name not in taken:
                path.mkdir()
                return path
        number += 1


def launch(recipe: str | Path | Recipe | Plan, **options: Any) -> Job:
    """Start a job and return it as soon as its agent is at work. `options` are those of `plan`.

    Raises `BadInput`, `ClusterError`; a job that could not start leaves a state that `ls` shows, and nothing that runs.
    """
    if isinstance(recipe, str | Path):
        found = load_recipes(str(recipe))
        if len(found) > 1:
            raise BadInput(f"{recipe}: has {len(found)} recipes; launch them one by one")
        recipe = plan(found[0], recipe_file=str(recipe), **options)
    elif isinstance(recipe, Recipe):
        recipe = plan(recipe, **options)
    backend = registry.get(recipe.spec.backend)
    if job := _interrupted(recipe.spec):
        return job
    backend.check(recipe.spec, runs())
    job = _create(recipe.spec)
    job.start()
    return job


def _interrupted(spec: Spec) -> Job | None:
    """Bring jobs on rented machines back that have no supervisor. Returns the one that is just like this, if any.

    Somebody killed its launch, and types it again: a second one would rent everything twice.
    """
    found = None
    for job in all_jobs() if spec.cloud else []:
        with contextlib.suppress(ClusterError):
            if job.spec.cloud and not (job.ended or job.waiting or job.alive):
                job.refresh()
                found = job if _asked(job.spec) == _asked(spec) else found
    return found


def _asked(spec: Spec) -> dict[str, Any]:
    """What somebody asked for, without what is new with each launch: names, times, prices."""
    new = ("name", "uid", "created", "git_commit", "cloud", "hosts", "forecast")
    cloud = dict(spec.cloud or {})
    places = {(one["region"], one["zone"], one["type"], one["market"]) for one in cloud.pop("places", [])}
    return {key: value for key, value in spec.to_json().items() if key not in new} | {"cloud": cloud, "places": places}


def _create(spec: Spec) -> Job:
    """Make the run folder with what was asked. Raises `ClusterError` when the disk is full or read-only."""
    run = None
    try:
        run = make_folder(registry.get(spec.backend).taken())
        uid = f"{run.name}-{uuid4().hex[:8]}"
        spec = replace(spec, name=run.name, uid=uid, git_commit=git_commit(), created=time.time())
        folders = Folders(run)
        folders.shared.mkdir(parents=True)
        folders.describe(spec if spec.queue else with_machines(folders, spec))
    except OSError as error:
        if run:
            shutil.rmtree(run, ignore_errors=True)
        raise ClusterError(f"{error.filename or runs()}: {error.strerror or error}; nothing was started") from error
    return Job(run)
