"""Launches jobs: creates the run folder and starts the backend. `imgnet-cluster launch` calls these functions."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.backends import catalog
from cluster.backends.planner import Plan
from cluster.connectors import tmux
from cluster.errors import BadInput, ClusterError
from cluster.machines.user_project import copy_project
from cluster.planning.launch_options import LaunchOptions, make_launch_options
from cluster.planning.resolve import load_recipes, load_work, plan, plan_command, plan_work
from cluster.script import secret_values
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec, Workload
from train.recipe.command import Command
from train.tools.host import git_commit
from train.tools.option_fields import OptionSet
from train.tools.text_files import json_roundtrip

from .billing import rented_jobs
from .job import Job
from .queue_state import with_free_machines
from .store import all_jobs, create_run_folder, find, intact_jobs, runs_folder

__all__ = ["Job", "Plan", "all_jobs", "find", "launch", "load_recipes", "plan", "run", "runs_folder"]

# The fields of a command that are no options of a launch, which has machines and types, and names the job.
COMMAND_KEYWORDS = {each.name for each in fields(Command)} - {"argv", "name", "machines", "types"}
# The fields of a spec that differ between two launches of the same command.
FIELDS_NEW_WITH_EACH_LAUNCH = ("name", "uid", "created", "command", "git_commit", "cloud", "hosts", "forecast")


def launch(recipe: str | Path | Workload | Plan, backend: str | None = None, **options: object) -> Job:
    """Start a job and return it as soon as its agent is at work.

    `options` are those of `make_launch_options`: the options of the command line, with underscores. Raises `BadInput`,
    `ClusterError`. A job that could not be started leaves no process and no run folder.
    """
    if isinstance(recipe, str | Path):
        recipes = load_work(str(recipe))
        if len(recipes) > 1:
            raise BadInput(f"{recipe}: has {len(recipes)} recipes; launch one at a time")
        job_plan = plan_work(recipes[0], make_launch_options(backend, **options), recipe_file=str(recipe))
    elif isinstance(recipe, Plan):
        job_plan = recipe
    else:
        job_plan = plan_work(recipe, make_launch_options(backend, **options))
    return launch_plan(job_plan)


def run(
    command: Sequence[str] | Command, backend: str | None = None, *, workdir: str | Path = "", **options: object
) -> Job:
    """Start a job that runs a command as torchrun would, and return it as soon as its agent is at work.

    `options` are the fields of a `Command` and the options of `launch`. The command runs in the copy of `workdir`, by
    default of the current folder. Raises `BadInput`, `ClusterError`.
    """
    own: dict[str, Any] = {  # Any: a field of a command
        name: options.pop(name) for name in COMMAND_KEYWORDS & options.keys()
    }
    try:
        whole = replace(command, **own) if isinstance(command, Command) else Command(argv=command, **own)
    except (TypeError, ValueError) as error:
        raise BadInput(str(error)) from error
    return launch_plan(plan_command(whole, make_launch_options(backend, **options), workdir=str(workdir)))


def launch_plan(job_plan: Plan) -> Job:
    """Start the job of a plan, and return it as soon as its agent is at work. Raises `ClusterError`."""
    job_plan.require_no_obstacle()
    if interrupted_job := find_interrupted_duplicate(job_plan.spec):
        return interrupted_job
    check(job_plan.spec)
    job = create_job(job_plan.spec)
    try:
        job.start()
    except ClusterError:
        if not (job.is_alive or job.has_agent_status):
            tmux.kill_session(job.run_folder.tmux_session, job.path)  # a supervisor that begins would rent unseen
            shutil.rmtree(job.path, ignore_errors=True)
        raise
    return job


def check(spec: JobSpec) -> None:
    """Check that a job can start here, and that no other has its name. Raises `ClusterError`.

    A name belongs to one job for good: else `down NAME` could end a job that the user does not mean. The same launch,
    interrupted and typed again, goes on with its job, so it may have the name.
    """
    for job in intact_jobs() if spec.given_name else []:
        is_again = not job.has_ended and request_fingerprint(job.spec) == request_fingerprint(spec)
        if job.spec.given_name == spec.given_name and not (spec.cloud and is_again and not job.is_alive):
            raise BadInput(f"--name {spec.given_name}: {job.name} has this name already; choose another")
    catalog.backend_class(spec.backend).check(spec, runs_folder())


def find_interrupted_duplicate(spec: JobSpec) -> Job | None:
    """Restart the supervisors of all jobs on rented machines that lack one; return the job with the same request.

    When a launch was killed and is typed again, a second job would rent every machine twice. None without one.
    """
    duplicate = None
    for job in rented_jobs() if spec.cloud else []:
        with contextlib.suppress(ClusterError):
            if not (job.has_ended or job.is_waiting or job.is_alive):
                job.refresh()
                duplicate = job if request_fingerprint(job.spec) == request_fingerprint(spec) else duplicate
    return duplicate


def find_running_duplicate(spec: JobSpec) -> Job | None:
    """Return the newest job on rented machines that runs, or waits, with the same request. None if there is none."""
    for job in reversed(rented_jobs() if spec.cloud else []):
        with contextlib.suppress(ClusterError):
            is_at_work = not job.has_ended and (job.is_waiting or job.is_alive)
            if is_at_work and request_fingerprint(job.spec) == request_fingerprint(spec):
                return job
    return None


def request_fingerprint(spec: JobSpec) -> dict[str, object]:
    """Return what the user asked for, without the fields that are new with each launch: names, times, prices."""
    written_spec = json_roundtrip(spec.to_json())  # a planned one has tuples where one that was read has lists
    rental = written_spec["cloud"] or {}
    # Zones follow from what was asked, and from what EFS and EC2 offer just now.
    places = {(place["region"], place["type"], place["market"]) for place in rental.pop("places", [])}
    for name in ("traffic", "spare_places", "inspection", "network_ids"):  # they follow from the places and the options
        rental.pop(name, None)
    request = {name: value for name, value in written_spec.items() if name not in FIELDS_NEW_WITH_EACH_LAUNCH}
    return {**request, "cloud": rental, "places": places}


def create_job(spec: JobSpec) -> Job:
    """Create the run folder of a job with its spec. Raises `ClusterError` when the disk is full or read-only."""
    path = None
    try:
        path = create_run_folder()
        uid = f"{path.name}-{uuid4().hex[:8]}"
        spec = replace(spec, name=path.name, uid=uid, git_commit=git_commit(), created=time.time())
        run_folder = RunFolder(path)
        run_folder.shared.mkdir(parents=True)
        if spec.user_project:
            copy_project(spec.user_project, run_folder.user_project)
        secret_values.keep(uid, path, spec.secret_values)
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


def _describe_options() -> str:
    titles: dict[str, type[OptionSet]] = {"all": LaunchOptions, **catalog.usable_options()}
    lines = []
    for title, options_class in titles.items():
        lines += ["", f"    Options of {'all launches' if title == 'all' else f'the backend {title}'}:"]
        lines += [f"        {option.name}: {option.full_help()}" for option in options_class.launch_options()]
    return "\n".join(lines)


launch.__doc__ = f"{launch.__doc__}{_describe_options()}\n    "
