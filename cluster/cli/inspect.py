"""The commands that look at jobs: ls, status, logs, attach, ssh, top, tensorboard. They change no job."""

import codecs
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.errors import EXIT_UNFINISHED, BadInput, ClusterError

from .options import cloud_option, open_cloud, output_option, print_json, warn

if TYPE_CHECKING:
    from cluster.backends.rentals import CloudAdministration
    from cluster.jobs.job import Job
    from cluster.state.status import JobStatus, MachineRow

LOG_POLL_SECONDS = 0.3

machine_option = click.option(
    "--machine", metavar="N", type=click.IntRange(0), help="Number of the machine.  [default: the machine of rank 0]"
)


def refresh(job: "Job") -> None:
    """Update the files of a job. When that fails, print a warning: the last known state can still be shown.

    Raises `DamagedJob`.
    """
    from cluster.jobs.job_reader import DamagedJob

    try:
        job.refresh()
    except DamagedJob:
        raise
    except ClusterError as error:
        warn(error)


@click.command()
@click.option(
    "--cloud",
    is_flag=True,
    help="List all rented machines with imgnet-cluster's tags, also of other folders and computers.",
)
@click.option(
    "--region", "regions", multiple=True, metavar="REGION", help="With --cloud: AWS region. Can be given several times."
)
@cloud_option
@output_option
def ls(cloud: bool, regions: tuple[str, ...], backend: str | None, output: str) -> None:
    """List the jobs of this folder."""
    from cluster.display import status as display_status
    from cluster.jobs import store
    from train.tools.records import encode

    if cloud:
        return _ls_cloud(open_cloud(backend), regions, output)
    if regions:
        raise BadInput("--region needs --cloud: the jobs of this folder are listed for all regions")
    statuses: dict[str, JobStatus | None] = {}
    rows: list[dict[str, object]] = []
    for job in store.all_jobs():
        try:
            refresh(job)
            statuses[job.name] = job.status()
            rows.append({**encode(statuses[job.name]), "hparams": job.hparams})
        except (ClusterError, OSError) as error:  # one job must not hide the others
            warn(error)
            statuses[job.name] = None
            rows.append({"job": job.name, "state": display_status.DAMAGED, "reason": str(error)})
    if output == "json":
        return print_json(rows)
    display_status.show_jobs(statuses)


def _ls_cloud(cloud: "CloudAdministration", regions: tuple[str, ...], output: str) -> None:
    from cluster.display import cloud as display_cloud
    from train.tools.records import encode

    rows = [row for region in cloud.resolve_regions(regions) for row in cloud.rented_jobs(region)]
    if output == "json":
        print_json([encode(row) for row in rows])
    else:
        display_cloud.show_rented_machines(rows)


@click.command()
@click.argument("job", required=False)
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit with a code for the state: 0 done, 100 failed, 101 not finished, 103 stopped.",
)
@output_option
def status(job: str | None, exit_code: bool, output: str) -> None:
    """Show the state and history of JOB (default: the newest job)."""
    from cluster.display import forecast as display_forecast
    from cluster.display import status as display_status
    from cluster.display.tables import STATE_EXIT_CODES
    from cluster.jobs import store
    from train.tools.records import encode

    found_job = store.find(job)
    refresh(found_job)
    job_status, timeline, machines = found_job.status(), found_job.timeline(), found_job.machine_details()
    result = found_job.result
    if output == "json":
        machines_json = {name: machine.to_json() for name, machine in machines.items()}
        others = {"timeline": encode(timeline), "machines_now": machines_json, "result": encode(result)}
        print_json({**encode(job_status), **others})
    else:
        display_status.show_status(job_status, machines, timeline)
        if result and result.against:
            constants_source = result.forecast.source if result.forecast else ""
            display_forecast.show_forecast_vs_actual(result.against, constants_source, found_job.name)
    if exit_code:
        sys.exit(STATE_EXIT_CODES.get(job_status.state, EXIT_UNFINISHED))


@click.command()
@click.argument("job", required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until the job ends. Ctrl-C stops printing, not the job."
)
@click.option(
    "--rank", metavar="N", type=click.IntRange(0), help="Rank of the process, counted over all machines.  [default: 0]"
)
@click.option(
    "--machine",
    metavar="N",
    type=click.IntRange(0),
    help="Show the first process of this machine; with --agent its agent, with --setup its set-up.",
)
@click.option(
    "--supervisor",
    "kind",
    flag_value="supervisor",
    help="Show the log of the supervisor instead: losses, replacements, rented machines, errors.",
)
@click.option("--agent", "kind", flag_value="agent", help="Show the state changes of a machine's agent instead.")
@click.option("--setup", "kind", flag_value="setup", help="Show the log of a machine's set-up instead.")
def logs(job: str | None, follow: bool, rank: int | None, kind: str | None, machine: int | None) -> None:
    """Print the log of a training process of JOB.

    By default it is the log of rank 0, of the newest job.
    """
    from cluster.display.tables import STATE_EXIT_CODES
    from cluster.jobs import store

    if rank is not None and (kind or machine is not None):
        raise BadInput("--rank counts over all machines; leave out --machine, --agent, --setup and --supervisor")
    if kind == "supervisor" and machine is not None:
        raise BadInput("--supervisor: a job has one supervisor; leave out --machine")
    found_job = store.find(job)
    printer = None
    while True:
        found_job.refresh()
        has_ended = found_job.has_ended
        path = _log_path(found_job, rank, kind, machine)
        if printer is None or path != printer.path:  # set-up is followed by the first attempt, then by the next ones
            printer = LogPrinter(path)
        if not follow and not path.exists():
            raise ClusterError(f"{path}: no such log; {_describe_logs(found_job)}")
        printer.print_new_lines(is_complete=has_ended or not follow)
        if has_ended or not follow:
            break
        time.sleep(LOG_POLL_SECONDS)
    if follow:
        sys.exit(STATE_EXIT_CODES[found_job.state])


class LogPrinter:
    """Prints what is new in a log file. JSON lines are printed as text."""

    def __init__(self, path: Path) -> None:
        from train.tools.process_log import format_line

        self.path = path
        self.format_line = format_line
        self.printed_bytes = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def print_new_lines(self, is_complete: bool) -> None:
        """Print the new lines. With `is_complete` nothing more comes, so that also an unfinished line is printed."""
        from train.tools.filesystem import open_regular

        if not self.path.exists():
            return
        if self.path.stat().st_size < self.printed_bytes:  # a log that was full started anew
            self.printed_bytes = 0
        with open_regular(self.path) as file:
            file.seek(self.printed_bytes)
            if self.path.suffix == ".jsonl":
                for line in file:
                    if line.endswith(b"\n") or is_complete:
                        self._write(line, self.format_line(line))
            else:
                while chunk := file.read(1 << 20):
                    self._write(chunk, chunk)
        sys.stdout.buffer.flush()

    def _write(self, data: bytes, text: bytes) -> None:
        self.printed_bytes += len(data)
        if sys.stdout.isatty():  # a terminal would obey control characters; a file gets the log as it is
            sys.stdout.write(self.decoder.decode(text))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(text)


def _describe_logs(job: "Job") -> str:
    process_count = job.spec.procs * job.spec.machines
    return (
        f"{job.name} has {process_count} training processes and is {job.state}; see: imgnet-cluster status {job.name}"
    )


def _log_path(job: "Job", rank: int | None, kind: str | None, machine: int | None) -> Path:
    """Return the log file of a process in the last attempt, or of the set-up before the first attempt.

    Raises `BadInput` when the machine takes no part in the last attempt.
    """
    from cluster.state import attempts
    from cluster.state.run_folder import agent_log_path, setup_log_path

    if kind == "supervisor":
        return job.run_folder.supervisor_log_path
    if kind:
        name = job.rank0_machine if machine is None else str(machine)
        return agent_log_path(job.path, name) if kind == "agent" else setup_log_path(job.path, name)
    number = job.last_attempt_number
    if machine is None or not number:
        return job.log_path(rank or 0, machine=str(machine or 0))
    attempt = attempts.read_attempt(job.run_folder.shared, number)
    machine_names = list(attempt.machine_names) if attempt else []
    if str(machine) not in machine_names:
        raise BadInput(
            f"machine {machine} takes no part in attempt {number} of {job.name}; "
            f"the machines are {', '.join(machine_names)}"
        )
    return job.log_path(machine_names.index(str(machine)) * job.spec.procs)


@click.command()
@click.argument("job", required=False)
@machine_option
def attach(job: str | None, machine: int | None) -> None:
    """Show the tmux session of JOB on this terminal.

    Without JOB, the newest job is taken. Ctrl-b d leaves the session; the job keeps running. On Slurm the trainer's log
    is shown, and Ctrl-C leaves it.
    """
    from cluster.jobs import store

    found_job = store.find(job)
    found_job.refresh()
    if found_job.has_ended:
        raise ClusterError(
            f"{found_job.name} is {found_job.state}, so its session has ended; read its log: "
            f"imgnet-cluster logs {found_job.name}"
        )
    argv = found_job.backend.attach_command(found_job.resolve_machine(machine))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ClusterError(f"attach needs a terminal; without one: imgnet-cluster logs -f {found_job.name}")
    os.environ.pop("TMUX", None)  # tmux refuses to attach from inside another session, such as the user's own
    os.execvp(argv[0], argv)


@click.command()
@click.argument("job")
@click.argument("command", nargs=-1)
@machine_option
def ssh(job: str, command: tuple[str, ...], machine: int | None) -> None:
    """Open a shell on a machine of JOB, or run COMMAND there.

    A COMMAND of one argument is a line for the shell there. Examples:

    \b
    imgnet-cluster ssh job-3 --machine 2 -- nvidia-smi
    imgnet-cluster ssh job-3 --machine 2 -- 'df -h / | tail -1; uptime'
    """
    from cluster.jobs import store

    found_job = store.find(job)
    argv = found_job.backend.shell_command(found_job.resolve_machine(machine), command, tty=sys.stdin.isatty())
    os.execvp(argv[0], argv)


@click.command()
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print the table once and exit.")
def top(job: str | None, once: bool) -> None:
    """Show the live activity of each machine of JOB.

    Without JOB, the newest job is taken. The table is updated every second, until Ctrl-C.
    """
    from cluster.display import top as display_top
    from cluster.jobs import store

    found_job = store.find(job)

    def read() -> tuple["JobStatus", dict[str, "MachineRow"]]:
        refresh(found_job)
        return found_job.status(), found_job.machine_details()

    display_top.show_top(read, once)


@click.command()
@click.argument("job", required=False)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=6006,
    show_default=True,
    help="Port of the server. 0 takes a free one.",
)
@click.option(
    "--all", "all_jobs", is_flag=True, help="Show all jobs of this folder side by side, with their hyperparameters."
)
def tensorboard(job: str | None, port: int, all_jobs: bool) -> None:
    """Serve the training curves of JOB (default: the newest job).

    TensorBoard listens on 127.0.0.1 until Ctrl-C.
    """
    from cluster.display import tensorboard as display_tensorboard
    from cluster.jobs import store

    if all_jobs:
        sys.exit(display_tensorboard.serve_all(port))
    sys.exit(display_tensorboard.serve(store.find(job), port))


COMMANDS = (ls, status, logs, attach, ssh, top, tensorboard)
