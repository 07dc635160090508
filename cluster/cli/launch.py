"""The commands that start, stop and change a job: launch, stop, resume, lose, adopt."""

import sys
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_INTERRUPTED, EXIT_OK, AwsNotConfigured, BadInput, ClusterError

from .options import (
    RENTAL_OPTION_NAMES,
    FiniteFloatRange,
    GroupedCommand,
    dry_run_option,
    grouped_option,
    machines_option,
    pluralize,
    recovery_options,
    rental_options,
    schedule_options,
    yes_option,
)
from .plan import make_plan, select_recipes

if TYPE_CHECKING:
    from cluster.jobs.job import Job

detach_option = grouped_option(
    "Output", "-d", "--detach", is_flag=True, help="Return when the job is running; do not follow it."
)


@click.command(cls=GroupedCommand)
@click.argument("recipe")
@machines_option
@grouped_option(
    "Machines", "--local", is_flag=True, help="Train on this computer. With --machines N it acts as N machines."
)
@grouped_option(
    "Machines", "--hosts", metavar="FILE", help="Train on your own machines over ssh. The hosts.toml file lists them."
)
@grouped_option(
    "Training",
    "--target",
    metavar="top5=93",
    help="Stop after the first validation that reaches this accuracy in percent, such as top5=93 or top1=76.1.",
)
@schedule_options
@grouped_option(
    "Machines",
    "--parallel",
    metavar="N",
    type=click.IntRange(1),
    help="Number of recipes to run concurrently, if the file has several.  [default: 1; with --hosts: as many as "
    "the machines in the file suffice for]",
)
@grouped_option(
    "Data",
    "--fetch",
    metavar="DIR",
    help="Copy the packed data set to this folder on each machine's own disk before training.  [default: no copy; for "
    "s3:// on rented machines: ~/.imgnet/data]",
)
@grouped_option(
    "Data", "--copies", metavar="DIR", help="Folder of the resized copies.  [default: the data folder's name with -sz]"
)
@grouped_option(
    "Data",
    "--workers",
    metavar="N",
    type=click.IntRange(0),
    help="Loader processes per training process.  [default: from the number of CPU cores]",
)
@grouped_option("Data", "--skip-bad", is_flag=True, help="Leave out files that are not images, instead of failing.")
@recovery_options
@grouped_option(
    "Recovery",
    "--save-seconds",
    metavar="SECONDS",
    type=FiniteFloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds between checkpoints.",
)
@grouped_option(
    "Limits",
    "--max-hours",
    metavar="HOURS",
    type=FiniteFloatRange(0, min_open=True),
    help="Stop after this many hours (saves a checkpoint first).  [default: 2 on rented machines, else no limit]",
)
@rental_options
@detach_option
@dry_run_option
@yes_option
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    recipe: str,
    local: bool,
    hosts: str | None,
    parallel: int | None,
    detach: bool,
    dry_run: bool,
    yes: bool,
    only: tuple[str, ...],
    **options: Any,
) -> None:
    """Train RECIPE and follow the job.

    Without --local and --hosts, the machines are rented from AWS. The plan and its price are shown first. Ctrl-C stops
    following; the job keeps running. Exit code: 0 done, 100 failed, 103 stopped.
    """
    from cluster.backends import registry
    from cluster.display import plan as display_plan
    from cluster.display import progress
    from cluster.jobs import queue, store, submit

    if local and hosts:
        raise BadInput("--local and --hosts are mutually exclusive; give one, or neither to rent machines from AWS")
    backend = "local" if local else "ssh" if hosts else "aws"
    rental_params = [
        param
        for param in ctx.command.params
        if param.name in RENTAL_OPTION_NAMES and is_given_on_command_line(ctx, param.name)
    ]
    if rental_params and backend != "aws":
        first_name = rental_params[0].name
        flags = " or ".join(param.opts[0] for param in rental_params if param.name == first_name)
        raise BadInput(f"{flags}: only for machines rented from AWS, not for --{'local' if local else 'hosts'}")
    rental = {name: options.pop(name) for name in RENTAL_OPTION_NAMES}
    rental = {**rental, "offline": dry_run} if backend == "aws" else {}
    plan_options = {**options, "hosts": hosts, "rental_options": rental}
    try:
        plans = [
            make_plan(selected_recipe, recipe, plan_options, backend)
            for selected_recipe in select_recipes(recipe, only)
        ]
    except AwsNotConfigured as error:
        raise AwsNotConfigured(
            f"{error}; without AWS: --local (this computer) or --hosts FILE (your own machines)"
        ) from error
    max_parallel = queue.resolve_parallel(plans, parallel) if len(plans) > 1 else 1
    for plan in plans:
        if dry_run:  # before the plan: the requests are long, and the plan should be the last thing on the screen
            display_plan.show_rental_requests(plan)
        display_plan.show_plan(plan)
        if not dry_run or backend != "aws":
            registry.get_backend(backend).check(plan.spec, store.runs_folder())
    if dry_run:
        click.echo(f"would launch {pluralize(len(plans), 'job')} in {store.runs_folder()}; nothing was started")
        return
    if not yes and sys.stdin.isatty() and not click.confirm("launch?", default=False):
        raise ClusterError("nothing was started")
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


def is_given_on_command_line(ctx: click.Context, name: str) -> bool:
    """Whether the user typed an option."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


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
            f"\ndetached; {job.name} keeps running. Return to it: imgnet-cluster attach {job.name}; "
            f"stop it: imgnet-cluster stop {job.name}",
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
@click.option("--for-good", is_flag=True, help="Do not replace the machine.")
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
@click.option("--hosts", required=True, metavar="FILE", help="The machines of the job: a hosts.toml file.")
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
