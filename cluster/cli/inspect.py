"""The commands that look at jobs: ls, status, logs, attach, ssh, top, tensorboard. None of them changes one."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import EXIT_UNFINISHED, BadInput, ClusterError

from .options import output_option, print_json

if TYPE_CHECKING:
    from cluster.jobs.submit import Job

machine_option = click.option("--machine", type=click.IntRange(0), help="Which of its machines. [default: the head]")


def refresh(job: "Job") -> None:
    """Bring a job up to date as far as that can be; what is known is shown in any case. Raises `ClusterError`."""
    _ = job.spec  # a damaged one is an error, and not a warning as well
    try:
        job.refresh()
    except ClusterError as error:
        click.echo(f"warning: {error}", err=True)


@click.command()
@click.option("--cloud", is_flag=True, help="All that is rented, of other folders and computers too, by its tags.")
@click.option("--region", "regions", multiple=True, metavar="REGION", help="With --cloud: where.")
@output_option
def ls(cloud: bool, regions: tuple[str, ...], output: str) -> None:
    """List the jobs of this folder."""
    from cluster.display import status as display_status
    from cluster.jobs import store

    if cloud:
        return _ls_cloud(regions, output)
    if regions:
        raise BadInput("--region goes with --cloud: the jobs of this folder are listed wherever they are")
    found = []
    for job in store.all_jobs():
        try:
            refresh(job)
            found.append({**job.status(), "hparams": job.hparams})
        except ClusterError as error:
            click.echo(f"warning: {error}", err=True)
    if output == "json":
        return print_json(found)
    display_status.show_jobs(found)


def _ls_cloud(regions: tuple[str, ...], output: str) -> None:
    from cluster.backends.aws import admin
    from cluster.display import cloud as display_cloud

    rows = [
        row for region in admin.resolve_regions(regions) for row in admin.summarize_by_job(admin.list_instances(region))
    ]
    if output == "json":
        print_json(rows)
    else:
        display_cloud.show_rented_machines(rows)


@click.command()
@click.argument("job", required=False)
@click.option("--exit-code", is_flag=True, help="Exit with 0 done, 100 failed, 101 not finished, 103 stopped.")
@output_option
def status(job: str | None, exit_code: bool, output: str) -> None:
    """Show how JOB stands, and what happened to it (default: the newest)."""
    from cluster.display import forecast
    from cluster.display import status as display_status
    from cluster.display import tables as display_status_tables
    from cluster.jobs import store

    found = store.find(job)
    refresh(found)
    said = found.status()
    if output == "json":
        print_json(
            {**said, "timeline": found.timeline(), "machines_now": found.machine_details(), "result": found.result}
        )
    else:
        display_status.show_status(said, found.machine_details(), found.timeline())
        result = found.result or {}
        if against := result.get("against"):
            forecast.show_forecast_vs_actual(against, (result.get("forecast") or {}).get("source", ""))
    if exit_code:
        sys.exit(display_status_tables.STATE_EXIT_CODES.get(said["state"], EXIT_UNFINISHED))


@click.command()
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends. Ctrl-C leaves it running.")
@click.option("--rank", type=click.IntRange(0), help="Which trainer of all. [default: 0]")
@click.option("--agent", is_flag=True, help="A machine's changes of state instead.")
@click.option("--machine", type=click.IntRange(0), help="The first trainer, or the agent, of this machine.")
def logs(job: str | None, follow: bool, rank: int | None, agent: bool, machine: int | None) -> None:
    """Print what a trainer of JOB has written (default: the newest job, rank 0)."""
    from cluster.display import tables as display_status_tables
    from cluster.jobs import store

    if rank is not None and (agent or machine is not None):
        raise BadInput("--rank counts over all machines; say it alone, or --machine, or --machine and --agent")
    found, shown, before = store.find(job), 0, None
    while True:
        found.refresh()
        ended, path = found.has_ended, _log_path(found, rank, agent, machine)
        shown = shown if path == before else 0  # from the set-up's to the first attempt's, and to the next
        before = path
        if not follow and not path.exists():
            count = found.spec.procs * found.spec.machines
            raise ClusterError(
                f"{path}: there is no such log; {found.name} has {count} trainers, and is {found.state}; "
                f"why: imgnet-cluster status {found.name}"
            )
        if path.exists():
            with path.open("rb") as file:
                file.seek(shown)
                while part := file.read(1 << 20):
                    shown += len(part)
                    sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        if ended or not follow:
            break
        time.sleep(0.3)
    if follow:
        sys.exit(display_status_tables.STATE_EXIT_CODES[found.state])


def _log_path(job: "Job", rank: int | None, agent: bool, machine: int | None) -> Path:
    """Return the file that is meant: a trainer's of the last attempt, or before the first that of a set-up."""
    from cluster.state import attempts

    if agent:
        return job.log_path(None, machine=job.rank0_machine if machine is None else str(machine))
    number = int(job.status()["attempt"])
    if machine is None or not number:
        return job.log_path(rank or 0, machine=str(machine or 0))
    last = attempts.read_attempt(job.run_folder.shared, number)
    names = list(last.machine_names) if last else []
    if str(machine) not in names:
        raise BadInput(f"machine {machine} trains nothing in attempt {number} of {job.name}: {', '.join(names)} do")
    return job.log_path(names.index(str(machine)) * job.spec.procs)


@click.command()
@click.argument("job", required=False)
@machine_option
def attach(job: str | None, machine: int | None) -> None:
    """Show the tmux session of JOB on this terminal. Ctrl-b d leaves it running."""
    from cluster.jobs import store

    found = store.find(job)
    found.refresh()
    if found.has_ended:
        raise ClusterError(
            f"{found.name} is {found.state}; its session is gone. What it wrote: imgnet-cluster logs {found.name}"
        )
    words = found.attach_command(machine)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ClusterError(f"attach needs a terminal; without one: imgnet-cluster logs -f {found.name}")
    os.environ.pop("TMUX", None)  # a session inside the user's own tmux is meant
    os.execvp(words[0], words)


@click.command()
@click.argument("job")
@click.argument("command", nargs=-1)
@machine_option
def ssh(job: str, command: tuple[str, ...], machine: int | None) -> None:
    """Open a shell on a machine of JOB, or run COMMAND there: imgnet-cluster ssh job-3 --machine 2 -- nvidia-smi."""
    from cluster.jobs import store

    words = store.find(job).ssh_command(machine, command, tty=sys.stdin.isatty())
    os.execvp(words[0], words)


@click.command()
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print it once.")
def top(job: str | None, once: bool) -> None:
    """Show what each machine of JOB is doing, each second, until Ctrl-C (default: the newest)."""
    from cluster.display import top as display_top
    from cluster.jobs import store

    found = store.find(job)

    def read() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        refresh(found)
        return found.status(), found.machine_details()

    display_top.show_top(read, once)


@click.command()
@click.argument("job", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=6006, show_default=True, help="0 takes a free one.")
@click.option("--all", "everything", is_flag=True, help="All jobs of this folder side by side, with their settings.")
def tensorboard(job: str | None, port: int, all_jobs: bool) -> None:
    """Serve the curves of JOB on 127.0.0.1 until Ctrl-C (default: the newest)."""
    from cluster.display import tensorboard as board
    from cluster.jobs import store

    if all_jobs:
        sys.exit(board.serve_all(port))
    sys.exit(board.serve(store.find(job), port))


COMMANDS = (ls, status, logs, attach, ssh, top, tensorboard)
