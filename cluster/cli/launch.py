"""The commands that start, stop and change a job: launch, stop, resume, lose, adopt."""

import sys
from typing import TYPE_CHECKING

import click

from cluster.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, NoCloudAccess

from .options import (
    DEFAULT_BACKEND,
    FiniteFloatRange,
    GroupedCommand,
    GroupedOption,
    dataclass_options,
    deferred_options,
    dry_run_option,
    given_options,
    grouped_option,
    only_option,
    pluralize,
    yes_option,
)
from .plan import make_plan, select_recipes

if TYPE_CHECKING:
    from cluster.jobs.job import Job

detach_option = grouped_option(
    "Output", "-d", "--detach", is_flag=True, help="Return when the job is running; do not follow it."
)


def backend_choices() -> list[GroupedOption]:
    """Return the options by which a backend is chosen: `--NAME`, with a value where the backend declares that."""
    from cluster.backends import catalog
    from cluster.planning.launch_options import switch_name

    choices = []
    for name, options_class in catalog.usable_options().items():
        help_text = options_class.switch_help or f"Train on {options_class.machines_title}."
        switch = GroupedOption([f"--{name}", switch_name(name)], is_flag=True, help=help_text, help_group="Machines")
        own_options = dataclass_options(options_class)
        choices.append(next((option for option in own_options if f"--{name}" in option.opts), switch))
    return choices


def shared_options() -> list[GroupedOption]:
    """Return the options that every backend has."""
    from cluster.planning.launch_options import LaunchOptions

    return dataclass_options(LaunchOptions)


def backend_options() -> list[GroupedOption]:
    """Return the other options that only one backend has."""
    from cluster.backends import catalog

    return [
        option
        for name, options_class in catalog.usable_options().items()
        for option in dataclass_options(options_class)
        if f"--{name}" not in option.opts
    ]


@click.command(cls=GroupedCommand)
@click.argument("recipe")
@deferred_options(backend_choices)
@deferred_options(shared_options)
@grouped_option(
    "Machines",
    "--parallel",
    metavar="N",
    type=click.IntRange(1),
    help="Number of recipes to run concurrently, if the file has several.  [default: 1; with --ssh: as many as "
    "the machines in the file suffice for]",
)
@only_option
@deferred_options(backend_options)
@detach_option
@dry_run_option
@yes_option
def launch(
    recipe: str,
    parallel: int | None,
    detach: bool,
    dry_run: bool,
    yes: bool,
    only: tuple[str, ...],
    **options: object,
) -> None:
    """Train RECIPE and follow the job.

    Without a choice such as --local or --ssh, the machines are rented from AWS. The plan and its price are shown first.
    Ctrl-C stops following; the job keeps running. Exit code: 0 done, 100 failed, 103 stopped.
    """
    from cluster.backends import registry
    from cluster.backends.base import BilledBackend
    from cluster.display import plan as display_plan
    from cluster.display import progress
    from cluster.jobs import queue, store, submit
    from cluster.planning.launch_options import choose_backend, make_launch_options

    keywords = given_options(options)
    backend = choose_backend(keywords, DEFAULT_BACKEND)
    launch_options = make_launch_options(backend, **keywords)
    try:
        plans = [
            make_plan(selected_recipe, recipe, launch_options, offline=dry_run)
            for selected_recipe in select_recipes(recipe, only)
        ]
    except NoCloudAccess as error:
        raise NoCloudAccess(
            f"{error}; without AWS: --local (this computer) or --ssh FILE (your own machines)"
        ) from error
    max_parallel = queue.resolve_parallel(plans, parallel) if len(plans) > 1 else 1
    for plan in plans:
        if dry_run:  # before the plan: the requests are long, and the plan should be the last thing on the screen
            display_plan.show_rental_requests(plan)
        display_plan.show_plan(plan)
        backend_class = registry.backend_class(backend)
        if not (dry_run and issubclass(backend_class, BilledBackend)):  # a dry run shows the price from any computer
            backend_class.check(plan.spec, store.runs_folder())
    if dry_run:
        click.echo(f"would launch {pluralize(len(plans), 'job')} in {store.runs_folder()}; nothing was started")
        return
    if not yes and sys.stdin.isatty() and not click.confirm("launch?", default=False):
        click.echo("nothing was started", err=True)
        sys.exit(EXIT_ERROR)
    if len(plans) > 1:
        sys.exit(_follow_all(queue.enqueue(plans, max_parallel), max_parallel, detach))
    existing_names = {job.name for job in store.all_jobs()}
    job = submit.launch(plans[0])
    if job.name in existing_names:
        click.echo(f"resuming interrupted {job.name}, run folder {job.path} (run again to launch a new job)")
    else:
        click.echo(f"{job.name} launched, run folder {job.path}")
    progress.print_next_commands(job)
    sys.exit(EXIT_OK if detach else _follow(job))


def _follow_all(launched_jobs: "list[Job]", max_parallel: int, detach: bool) -> int:
    """Follow the jobs of a sweep one after the other. Returns the largest exit code."""
    names = ", ".join(job.name for job in launched_jobs)
    click.echo(f"{names} launched, {max_parallel} at a time\n  list         imgnet-cluster ls")
    click.echo("  all curves   imgnet-cluster tensorboard --all")
    code = EXIT_OK
    for job in [] if detach else launched_jobs:
        code = max(code, _follow(job))
        if code == EXIT_INTERRUPTED:
            break
    return code


def _follow(job: "Job") -> int:
    """Follow a job until it ends. Returns its exit code; Ctrl-C only detaches."""
    from cluster.display import progress

    try:
        return progress.follow(job)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; {job.name} keeps running. Follow it: imgnet-cluster logs -f {job.name}; "
            f"its session: imgnet-cluster attach {job.name}; stop it: imgnet-cluster stop {job.name}",
            err=True,
        )
        return EXIT_INTERRUPTED


@click.command()
@click.argument("job")
def stop(job: str) -> None:
    """Save a checkpoint of JOB and stop it.

    `imgnet-cluster resume JOB` continues from the checkpoint.
    """
    from cluster.jobs import store
    from cluster.state.states import JobState

    stopped_job = store.find(job)
    stopped_job.stop()
    state = stopped_job.state
    hint = "" if state == JobState.DONE else f"; continue: imgnet-cluster resume {stopped_job.name}"
    click.echo(f"{stopped_job.name} {state}{hint}")


@click.command(cls=GroupedCommand)
@click.argument("job")
@detach_option
def resume(job: str, detach: bool) -> None:
    """Continue JOB from its newest checkpoint, and follow it.

    Ctrl-C stops following; the job keeps running.
    """
    from cluster.jobs import store

    resumed_job = store.find(job)
    resumed_job.resume()
    click.echo(f"{resumed_job.name} resumed")
    sys.exit(EXIT_OK if detach else _follow(resumed_job))


@click.command()
@click.argument("job")
@click.option("--machine", metavar="N", required=True, type=click.IntRange(0), help="Number of the machine.")
@click.option(
    "--notice",
    type=FiniteFloatRange(0),
    metavar="SECONDS",
    help="Warn the machine this long in advance, as a spot interruption notice does.",
)
@click.option("--for-good", is_flag=True, help="Do not replace the killed machine.")
def lose(job: str, machine: int, notice: float | None, for_good: bool) -> None:
    """Kill a machine of JOB, to rehearse a recovery.

    Without --notice it fails at once, as in a power cut.
    """
    from cluster.jobs import store

    running_job = store.find(job)
    running_job.kill_machine(str(machine), notice, for_good)
    outcome = "has received the notice" if notice is not None else "was killed"
    click.echo(f"machine {machine} of {running_job.name} {outcome}")
    click.echo(f"  recovery     imgnet-cluster status {running_job.name}")


@click.command()
@click.argument("uid", required=False)
@click.option("--ssh", "hosts", required=True, metavar="FILE", help="The machines of the job: a hosts.toml file.")
def adopt(uid: str | None, hosts: str) -> None:
    """Supervise a job that another computer launched.

    Its files are copied here, and lost machines are replaced from here. UID is the name of the job on its machines,
    such as job-3-9073e811; it is needed when several jobs are unfinished.
    """
    from cluster.display import progress
    from cluster.jobs.adopt import adopt as adopt_job

    job = adopt_job(hosts, uid)
    click.echo(f"{job.name} is {job.spec.uid}, run folder {job.path}")
    progress.print_next_commands(job)


COMMANDS = (launch, stop, resume, lose, adopt)
