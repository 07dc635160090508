"""The verbs over jobs: launch, find, list. What the command line does is a function here first."""

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.backends import registry
from cluster.errors import BadInput, ClusterError
from cluster.planning.plan import Plan
from cluster.planning.resolve import load_recipes, plan
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.recipe.schema import Recipe
from train.tools.provenance import git_commit

from .job import Job
from .queue_state import with_free_machines
from .store import all_jobs, create_run_folder, find, runs_folder

__all__ = ["Job", "Plan", "all_jobs", "find", "launch", "load_recipes", "plan", "runs_folder"]


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
    backend = registry.get_backend(recipe.spec.backend)
    if job := find_interrupted_duplicate(recipe.spec):
        return job
    backend.check(recipe.spec, runs_folder())
    job = create_job(recipe.spec)
    job.start()
    return job


def find_interrupted_duplicate(spec: JobSpec) -> Job | None:
    """Bring jobs on rented machines back that have no supervisor. Returns the one that is just like this, if any.

    Somebody killed its launch, and types it again: a second one would rent everything twice.
    """
    found = None
    for job in all_jobs() if spec.cloud else []:
        with contextlib.suppress(ClusterError):
            if job.spec.cloud and not (job.has_ended or job.is_waiting or job.is_alive):
                job.refresh()
                found = job if request_fingerprint(job.spec) == request_fingerprint(spec) else found
    return found


def request_fingerprint(spec: JobSpec) -> dict[str, Any]:
    """What somebody asked for, without what is new with each launch: names, times, prices."""
    new = ("name", "uid", "created", "git_commit", "cloud", "hosts", "forecast")
    cloud = dict(spec.cloud or {})
    places = {(one["region"], one["zone"], one["type"], one["market"]) for one in cloud.pop("places", [])}
    return {key: value for key, value in spec.to_json().items() if key not in new} | {"cloud": cloud, "places": places}


def create_job(spec: JobSpec) -> Job:
    """Make the run folder with what was asked. Raises `ClusterError` when the disk is full or read-only."""
    run = None
    try:
        run = create_run_folder(registry.get_backend(spec.backend).reserved_names())
        uid = f"{run.name}-{uuid4().hex[:8]}"
        spec = replace(spec, name=run.name, uid=uid, git_commit=git_commit(), created=time.time())
        folders = RunFolder(run)
        folders.shared.mkdir(parents=True)
        folders.write_spec(spec if spec.queue else with_free_machines(folders, spec))
    except OSError as error:
        if run:
            shutil.rmtree(run, ignore_errors=True)
        raise ClusterError(
            f"{error.filename or runs_folder()}: {error.strerror or error}; nothing was started"
        ) from error
    return Job(run)
