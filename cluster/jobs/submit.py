"""Launches jobs: creates the run folder and starts the backend. `imgnet-cluster launch` calls these functions."""

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from cluster.backends import registry
from cluster.errors import BadInput, ClusterError
from cluster.planning.launch_options import make_launch_options
from cluster.planning.plan import Plan
from cluster.planning.resolve import load_recipes, plan
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from train.recipe.schema import Recipe
from train.tools.provenance import git_commit

from .job import Job
from .queue_state import with_free_machines
from .store import all_jobs, create_run_folder, find, runs_folder

__all__ = ["Job", "Plan", "all_jobs", "find", "launch", "load_recipes", "plan", "runs_folder"]

# The fields of a spec that differ between two launches of the same command.
FIELDS_NEW_WITH_EACH_LAUNCH = ("name", "uid", "created", "git_commit", "cloud", "hosts", "forecast")


def launch(recipe: str | Path | Recipe | Plan, backend: str | None = None, **options: object) -> Job:
    """Start a job and return it as soon as its agent is at work.

    `options` are those of `make_launch_options`: the options of the command line, with underscores. Raises `BadInput`,
    `ClusterError`. A job that could not start leaves a state that `ls` shows, and no process.
    """
    if isinstance(recipe, str | Path):
        recipes = load_recipes(str(recipe))
        if len(recipes) > 1:
            raise BadInput(f"{recipe}: has {len(recipes)} recipes; launch one at a time")
        job_plan = plan(recipes[0], make_launch_options(backend, **options), recipe_file=str(recipe))
    elif isinstance(recipe, Recipe):
        job_plan = plan(recipe, make_launch_options(backend, **options))
    else:
        job_plan = recipe
    backend_class = registry.backend_class(job_plan.spec.backend)
    if interrupted_job := find_interrupted_duplicate(job_plan.spec):
        return interrupted_job
    backend_class.check(job_plan.spec, runs_folder())
    job = create_job(job_plan.spec)
    job.start()
    return job


def find_interrupted_duplicate(spec: JobSpec) -> Job | None:
    """Restart the supervisors of all jobs on rented machines that lack one; return the job with the same request.

    When a launch was killed and is typed again, a second job would rent every machine twice. None when no such job is
    like this one.
    """
    duplicate = None
    for job in all_jobs() if spec.cloud else []:
        with contextlib.suppress(ClusterError):
            if job.spec.cloud and not (job.has_ended or job.is_waiting or job.is_alive):
                job.refresh()
                if request_fingerprint(job.spec) == request_fingerprint(spec):
                    duplicate = job
    return duplicate


def request_fingerprint(spec: JobSpec) -> dict[str, object]:
    """Return what the user asked for, without the fields that are new with each launch: names, times, prices."""
    rental = dict(spec.cloud or {})
    places = {(place["region"], place["zone"], place["type"], place["market"]) for place in rental.pop("places", [])}
    request = {key: value for key, value in spec.to_json().items() if key not in FIELDS_NEW_WITH_EACH_LAUNCH}
    return {**request, "cloud": rental, "places": places}


def create_job(spec: JobSpec) -> Job:
    """Create the run folder of a job with its spec. Raises `ClusterError` when the disk is full or read-only."""
    path = None
    try:
        path = create_run_folder(registry.backend_class(spec.backend).reserved_names())
        uid = f"{path.name}-{uuid4().hex[:8]}"
        spec = replace(spec, name=path.name, uid=uid, git_commit=git_commit(), created=time.time())
        run_folder = RunFolder(path)
        run_folder.shared.mkdir(parents=True)
        run_folder.write_spec(spec if spec.queue else with_free_machines(Run(spec, run_folder)))
    except BaseException as error:
        if path:
            shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise ClusterError(
            f"{error.filename or runs_folder()}: {error.strerror or error}; nothing was started"
        ) from error
    return Job(path)
