"""The commands that start, stop and change a job: launch, lose, stop, resume, adopt."""

import sys
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_INTERRUPTED, EXIT_OK, AwsNotConfigured, BadInput, ClusterError

from .options import (
    RENTAL_OPTION_NAMES,
    FiniteFloatRange,
    machines_option,
    recovery_options,
    rental_options,
    schedule_options,
    yes_option,
)
from .plan import make_plan, select_recipes

if TYPE_CHECKING:
    from cluster.jobs.submit import Job
from .app import cli


@cli.command()
@click.argument("recipe")
@click.option("--local", is_flag=True, help="On this computer, with --machines as so many machines.")
@click.option("--hosts", metavar="FILE", help="On your own machines over ssh: those of a hosts.toml.")
@machines_option
@schedule_options
@click.option(
    "--copies", metavar="DIR", help="Prepared copies of the images. [default: the data folder's name with -sz]"
)
@click.option(
    "--fetch", metavar="DIR", help="Copy the packed --data to this folder of each machine's own disk first. "
    "[default: rented, s3://: ~/.imgnet/data, on the fast disk]",
)  # fmt: skip
@click.option(
    "--max-hours", type=FiniteFloatRange(0, min_open=True), help="Save and end after so long. [default: rented: 2]"
)
@click.option("--target", metavar="top5=93", help="End after the validation that reaches it; or top1=76.1.")
@click.option(
    "--save-seconds", type=FiniteFloatRange(0), default=30.0, show_default=True, help="A checkpoint so often."
)
@recovery_options
@rental_options
@click.option("--skip-bad", is_flag=True, help="Leave out files that are not images instead of ending.")
@click.option(
    "--workers", type=click.IntRange(0), help="Loader processes of each trainer. [default: by the processors]"
)
@click.option(
    "--parallel", type=click.IntRange(1),
    help="Of several recipes so many at once. [default: 1, or as many as the hosts file has machines for]",
)  # fmt: skip
@click.option("-d", "--detach", is_flag=True, help="Do not follow it.")
@click.option("--dry-run", "--dryrun", is_flag=True, help="Show what would be done.")
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
    """Train RECIPE on machines rented from AWS, and follow it. Ctrl-C leaves it running. --local, --hosts: elsewhere.

    Exit code: 0 done, 100 failed, 103 stopped.
    """
    from cluster.backends import registry
    from cluster.display import plan, progress
    from cluster.jobs import queue, store, submit

    if local and hosts:
        raise BadInput("--local and --hosts are two places; say one, or neither to rent machines from AWS")
    backend = "local" if local else "ssh" if hosts else "aws"
    given = [
        one for one in ctx.command.params if one.name in RENTAL_OPTION_NAMES and is_given_on_command_line(ctx, one.name)
    ]
    if given and backend != "aws":
        words = " or ".join(one.opts[0] for one in given if one.name == given[0].name)
        raise BadInput(f"{words}: for machines rented from AWS, not for --{backend}")
    rent = {name: options.pop(name) for name in RENTAL_OPTION_NAMES}
    rent = {**rent, "offline": dry_run} if backend == "aws" else {}
    try:
        more = {**options, "hosts": hosts, "rent": rent}
        plans = [make_plan(one, recipe, more, backend) for one in select_recipes(recipe, only)]
    except AwsNotConfigured as error:
        raise AwsNotConfigured(
            f"{error}; without AWS: --local (here) or --hosts FILE (machines of your own)"
        ) from error
    at_once = queue.resolve_parallel(plans, parallel) if len(plans) > 1 else 1
    for one in plans:
        if dry_run:  # first, for they are long
            plan.show_rental_requests(one)
        plan.show_plan(one)
        if not dry_run or backend != "aws":
            registry.get_backend(backend).check(one.spec, store.runs_folder())
    if dry_run:
        click.echo(
            f"would launch {len(plans)} job{'s' * (len(plans) > 1)} in {store.runs_folder()}; nothing was started"
        )
        return
    if not yes and sys.stdin.isatty() and not click.confirm("launch?", default=False):
        raise ClusterError("nothing was started")
    if len(plans) > 1:
        sys.exit(_follow_all(queue.enqueue(plans, at_once), at_once, detach))
    known = {one.name for one in store.all_jobs()}
    job = submit.launch(plans[0])
    how = "was interrupted and goes on; once more for another one" if job.name in known else "launched"
    click.echo(f"{job.name} {how}, run folder {job.path}")
    progress.print_next_commands(job)
    sys.exit(EXIT_OK if detach else _follow(job))


def is_given_on_command_line(ctx: click.Context, name: str) -> bool:
    """Whether an option was typed."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _follow_all(launched_jobs: "list[Job]", max_parallel: int, detach: bool) -> int:
    """Follow a sweep's jobs one after the other. Returns the worst exit code."""
    names = ", ".join(job.name for job in launched_jobs)
    click.echo(f"{names} launched, {max_parallel} at a time\n  see them all  imgnet-cluster ls")
    click.echo("  side by side  imgnet-cluster tensorboard --all")
    code = EXIT_OK
    for job in [] if detach else launched_jobs:
        code = max(code, _follow(job))
        if code == EXIT_INTERRUPTED:
            break
    return code


def _follow(job: "Job") -> int:
    from cluster.display import progress

    try:
        return progress.follow(job)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; {job.name} goes on. Come back: imgnet-cluster attach {job.name}; "
            f"end it: imgnet-cluster stop {job.name}",
            err=True,
        )
        return EXIT_INTERRUPTED


@cli.command()
@click.argument("job")
@click.option("--machine", required=True, type=click.IntRange(0), help="Which of its machines.")
@click.option(
    "--notice", type=FiniteFloatRange(0), metavar="SECONDS", help="Tell it so long ahead, as a spot notice does."
)
@click.option("--for-good", is_flag=True, help="Do not start it again.")
def lose(job: str, machine: int, notice: float | None, for_good: bool) -> None:
    """Take a machine away from JOB, to see it recover: at once, as if its power was cut."""
    from cluster.jobs import store

    found = store.find(job)
    found.kill_machine(str(machine), notice, for_good)
    click.echo(f"machine {machine} of {found.name} is {'told to leave' if notice is not None else 'lost'}")
    click.echo(f"  what it costs  imgnet-cluster status {found.name}")


@cli.command()
@click.argument("job")
def stop(job: str) -> None:
    """Save JOB and end it; `resume` goes on from there."""
    from cluster.jobs import store

    found = store.find(job)
    found.stop()
    more = "" if found.state == "done" else f"; go on: imgnet-cluster resume {found.name}"
    click.echo(f"{found.name} {found.state}{more}")


@cli.command()
@click.argument("job")
@click.option("-d", "--detach", is_flag=True, help="Return as soon as the job is at work.")
def resume(job: str, detach: bool) -> None:
    """Go on with JOB from its newest whole checkpoint, and follow it. Ctrl-C leaves it running."""
    from cluster.jobs import store

    found = store.find(job)
    found.resume()
    click.echo(f"{found.name} resumed")
    sys.exit(EXIT_OK if detach else _follow(found))


@cli.command()
@click.argument("uid", required=False)
@click.option("--hosts", required=True, metavar="FILE", help="The machines it runs on: a hosts.toml.")
def adopt(uid: str | None, hosts: str) -> None:
    """Look after a job that was launched from another computer: bring everything home, replace lost machines.

    UID is its name on the machines, such as job-3-9073e811, when there are several.
    """
    from cluster.display import progress
    from cluster.jobs import adopt as jobs_adopt

    job = jobs_adopt.adopt(hosts, uid)
    click.echo(f"{job.name} is {job.spec.uid}, run folder {job.path}")
    progress.print_next_commands(job)
