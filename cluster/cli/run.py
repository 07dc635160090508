"""`imgnet-cluster run`: runs any command that torchrun could run, with all that a launch has."""

from typing import Any

import click

from cluster.errors import BadInput, ClusterError

from .launch import START_OPTIONS, backend_options, carry_out, read_options, start_options
from .options import GroupedCommand, GroupedOption, click_options, deferred_options, grouped_option, launch_options


def command_options() -> list[GroupedOption]:
    """Return the options that are fields of a `Command`."""
    from train.recipe.command import Command

    return click_options(Command.options())


@click.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@deferred_options(backend_options)
@launch_options(  # those that make sense without a recipe
    *("name", "max_hours", "notify", "spares", "max_exchanges"),
    machines="Number of machines.  [default: 1; --ssh: all that the file lists, without --spares]",
    data="Folder of images or other data that the processes find as $IMGNET_DATA. It must be on the machines.",
    min_machines="Run the command with at least this many machines; pause with fewer.  [default: 1]",
    lost_seconds="Give up a machine that has sent no heartbeat for this long.  [default: 5.0]",
)
@grouped_option(
    "Command",
    "--workdir",
    metavar="DIR",
    help="Run the command in the copy of this folder. Its git repository travels to the machines; outside git, the "
    "folder itself.  [default: the current folder]",
)
@grouped_option(
    "Command",
    "--env",
    multiple=True,
    metavar="NAME=VALUE|NAME",
    help="Environment variable of the processes. NAME alone takes the value of this shell and keeps it secret: it is "
    "in no file of the job. Can be given several times.",
)
@grouped_option(
    "Command", "--env-file", multiple=True, metavar="FILE", help="File of secret variables, a line NAME=VALUE for each."
)
@deferred_options(command_options)
@start_options
def run(
    command: tuple[str, ...],
    workdir: str | None,
    env: tuple[str, ...],
    env_file: tuple[str, ...],
    **options: Any,  # Any: those of `Command`, and of a launch
) -> None:
    """Run your own training script as torchrun would.

    COMMAND comes after --, such as: imgnet-cluster run --local --machines 2 -- python train.py --lr 0.1. Each process
    is one rank and gets the environment variables of torchrun. It runs in a copy of the project in the current folder.
    When a machine is lost, the command starts again on the others; it should save to $IMGNET_CHECKPOINTS, and save and
    exit at SIGTERM. Without --local or another choice, the machines are rented from AWS, after a yes. Exit code: 0
    done, 100 failed, 103 stopped.
    """
    import functools

    from cluster.planning.resolve import plan_command, read_environment
    from train.recipe.command import Command

    if not command:
        raise BadInput("no command is given; type it after --, such as: imgnet-cluster run --local -- python train.py")
    start = {name: options.pop(name) for name in START_OPTIONS}
    variables, secrets = read_environment(env, env_file)
    given = {option.name: options.pop(option.name) for option in Command.options()}
    values = {name: value for name, value in given.items() if value is not None}
    try:
        own_command = Command(argv=command, env=variables, secrets=tuple(secrets), **values)
    except ValueError as error:
        raise BadInput(str(error)) from error
    plan = functools.partial(plan_command, own_command, read_options(options), workdir=workdir or "", secrets=secrets)
    carry_out([plan], **start)


@click.command()
@click.argument("job_and_hosts", nargs=-1, required=True, metavar="[JOB] HOST...")
def join(job_and_hosts: tuple[str, ...]) -> None:
    """Add machines to JOB while it trains on machines of your own.

    Without JOB, the newest job is taken. HOST is a machine of the job's hosts file: one that was added to it, is free
    again or was repaired. It is set up as at the launch, and trains with the others as soon as it is ready; where all
    are there, it waits to take the place of a lost one. After Ctrl-C it joins nevertheless.
    """
    from cluster.jobs import join as joining
    from cluster.jobs import store

    has_job = store.is_job(job_and_hosts[0])
    job = store.find(job_and_hosts[0] if has_job else None)
    joined = joining.begin_join(job, job_and_hosts[has_job:])
    for name, host in joined.items():
        click.echo(f"{host} is being set up as machine {name}; its log: imgnet-cluster logs {job.run.handle} --setup")
    for name, reason in joining.wait_for_join(job, joined).items():
        if reason:
            raise ClusterError(f"{joined[name]} does not join {job.name}, which goes on without it: {reason}")
        click.echo(f"machine {name} is ready and joins {job.name}; see: imgnet-cluster status {job.run.handle}")


COMMANDS = (run, join)
