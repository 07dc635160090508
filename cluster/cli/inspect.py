"""The commands that look at jobs: ls, status, logs, attach, ssh, top, tensorboard. They change no job."""

import codecs
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.errors import EXIT_UNFINISHED, BadInput, ClusterError

from .options import (
    FaultTolerantCommand,
    ask_regions,
    describe_regions,
    flag,
    open_cloud,
    output_option,
    pluralize,
    print_json,
    print_rows,
    regions_option,
    typed_options,
    warn,
)

if TYPE_CHECKING:
    from cluster.jobs.job import Job
    from cluster.state.status import JobStatus, MachineRow

LOG_POLL_SECONDS = 0.3
PIECE_BYTES = 1 << 20  # of a log, which are read at a time: a line of it may have any length

machine_option = click.option(
    "--machine", metavar="N", type=click.IntRange(0), help="Number of the machine.  [default: the machine of rank 0]"
)


def refresh(job: "Job") -> None:
    """Update a job's files. A failure is a warning: the last known state can be shown. Raises `DamagedJob`."""
    from cluster.jobs.job import DamagedJob

    try:
        job.refresh()
    except DamagedJob:
        raise
    except ClusterError as error:
        warn(error)


@click.command(cls=FaultTolerantCommand)
@flag(
    "Options",
    "--cloud",
    help="List all rented machines with imgnet-cluster's tags, also of other folders and computers.",
)
@flag("Options", "--everywhere", help="List also the jobs of other folders in which a job is running on this computer.")
@regions_option
@output_option
def ls(cloud: bool, everywhere: bool, regions: tuple[str, ...], output: str) -> None:
    """List the jobs of this folder.

    The jobs are in ./runs, or in $IMGNET_RUNS.
    """
    from cluster.display import cloud as display_cloud
    from cluster.display import status as display_status
    from cluster.jobs import store

    if cloud:
        opened_cloud = open_cloud()
        rows_by_region = ask_regions(opened_cloud, regions, opened_cloud.rented_jobs)
        place = describe_regions(rows_by_region)
        machines = [row for rows in rows_by_region.values() for row in rows]
        return print_rows(machines, output, lambda rows: display_cloud.show_rented_machines(rows, place))
    if typed_options({"regions": regions}):
        raise BadInput("--region needs --cloud: the jobs of this folder are listed for all regions")
    folders = [store.runs_folder(), *(store.busy_runs_folders() if everywhere else [])]
    if output == "json":
        return print_json([row for folder in folders for row in _list_jobs(folder)[1]])
    for folder in folders:
        statuses, _ = _list_jobs(folder)
        if everywhere:
            click.echo(f"{folder}:")
        if statuses:
            display_status.show_jobs(statuses)
        else:
            click.echo(f"no jobs in {folder}")
            busy_folders = [] if everywhere else store.busy_runs_folders()
            for busy_folder in busy_folders:
                click.echo(f"jobs are running in {busy_folder}; to list them too: imgnet-cluster ls --everywhere")


def _list_jobs(folder: Path) -> "tuple[dict[str, JobStatus | None], list[dict[str, object]]]":
    """Return the statuses of a runs folder's jobs by name (None: damaged), and the rows of `-o json`."""
    from cluster.display.tables import DAMAGED
    from cluster.jobs import store
    from cluster.state.states import JobState
    from train.tools.records import encode

    statuses: dict[str, JobStatus | None] = {}
    rows: list[dict[str, object]] = []
    for job in store.all_jobs(folder):
        try:
            refresh(job)
            statuses[job.name] = status = job.status()
            rows.append({**encode(status), "hparams": job.hparams})
            if status.warning and status.state != JobState.ADOPTED:
                warn(f"{job.name}: {status.warning}")
        except (ClusterError, OSError) as error:  # one job must not hide the others
            warn(error)
            statuses[job.name] = None
            rows.append({"job": job.name, "state": DAMAGED, "reason": str(error)})
    return statuses, rows


@click.command()
@click.argument("job", required=False)
@flag(
    "Options", "--exit-code", help="Exit with a code for the state: 0 done, 100 failed, 101 not finished, 103 stopped."
)
@output_option
def status(job: str | None, exit_code: bool, output: str) -> None:
    """Show the state and history of JOB (default: the newest job)."""
    from cluster.display import plan as display_plan
    from cluster.display import status as display_status
    from cluster.display.tables import STATE_EXIT_CODES
    from cluster.jobs import store
    from train.metrics.text import describe_image_usage
    from train.tools.records import encode

    found_job = store.find(job)
    refresh(found_job)
    job_status, timeline, machines = found_job.status(), found_job.timeline(), found_job.machine_details()
    result = found_job.result
    if output == "json":
        machines_json = {name: machine.to_json() for name, machine in machines.items()}
        others = {"timeline": timeline, "machines_now": machines_json, "result": result}
        print_json({**encode(job_status), **others})
    else:
        display_status.show_status(job_status, machines, timeline)
        if result and result.ids_wrong is not None:
            click.echo(describe_image_usage(result.ids_wrong))
        elif found_job.spec.train.log_ids:
            click.echo("whether every image was used exactly once (--log-ids) is checked when the job is done")
        if result and result.against:
            constants_source = result.forecast.source if result.forecast else ""
            display_plan.show_forecast_vs_actual(result.against, constants_source, found_job.run.handle)
        elif result and result.constants:
            display_plan.show_missing_forecast(found_job.run.handle, found_job.spec.recipe_file)
    if exit_code:
        sys.exit(STATE_EXIT_CODES.get(job_status.state, EXIT_UNFINISHED))


@click.command()
@click.argument("job", required=False)
@flag("Options", "-f", "--follow", help="Print new lines until the job ends. Ctrl-C stops printing, not the job.")
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
@click.option(
    "--setup",
    "kind",
    flag_value="setup",
    help="Show the logs of a machine's set-up instead: environment and checks, then its images.",
)
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
    printers: dict[Path, LogPrinter] = {}
    note = ""
    while True:
        found_job.refresh()
        adoption = found_job.supervision.adoption
        has_ended = found_job.has_ended or adoption is not None
        paths, new_note = _log_paths(found_job, rank, kind, machine)
        if new_note and new_note != note:
            click.echo(new_note, err=True)
        note = new_note
        # Set-up is followed by the first attempt, then by the next ones.
        printers = {path: printers.get(path) or LogPrinter(path) for path in paths}
        for path, printer in printers.items():
            if not follow and not path.exists():
                raise ClusterError(f"{path}: no such log; {_explain_missing_log(found_job, kind)}")
            printer.print_new_lines(is_complete=has_ended or not follow)
        if has_ended or not follow:
            break
        time.sleep(LOG_POLL_SECONDS)
    if follow:
        if adoption:
            warn(adoption.error)
        sys.exit(STATE_EXIT_CODES.get(found_job.state, EXIT_UNFINISHED))


class LogPrinter:
    """Prints the new lines of a log file. JSON lines are printed as text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.printed_bytes = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def print_new_lines(self, is_complete: bool) -> None:
        """Print the new lines. With `is_complete` nothing more comes, so that also an unfinished line is printed."""
        from train.tools.files import open_regular
        from train.tools.process_log import format_line

        if not self.path.exists():
            return
        if self.path.stat().st_size < self.printed_bytes:  # a log that was full started anew
            self.printed_bytes = 0
        with open_regular(self.path) as file:
            file.seek(self.printed_bytes)
            if self.path.suffix == ".jsonl":
                while line := file.readline(PIECE_BYTES):
                    if line.endswith(b"\n") or is_complete or len(line) == PIECE_BYTES:
                        self._write(line, format_line(line))
            else:
                while chunk := file.read(PIECE_BYTES):
                    self._write(chunk, chunk)

    def _write(self, data: bytes, text: bytes) -> None:
        self.printed_bytes += len(data)
        sys.stdout.write(self.decoder.decode(text))  # cleaned on a pipe too: `logs | tail` ends at a terminal
        sys.stdout.flush()


def _explain_missing_log(job: "Job", kind: str | None) -> str:
    hint = f"see: imgnet-cluster status {job.run.handle}"
    if kind == "supervisor":
        return f"the supervisor of {job.name} has recorded nothing; {hint}"
    if kind == "setup" and job.spec.is_one_computer:
        return f"machines that are this computer need no set-up, and no data was prepared there for {job.name}; {hint}"
    if kind:
        return f"{job.name} is {job.state.phrase}; {hint}"
    trained = [attempt for attempt in job.run_folder.attempts.all() if attempt.members]
    machine_count = len(trained[-1].members) if trained else job.spec.machines
    processes = pluralize(machine_count * job.spec.procs, "training process")
    return f"{job.name} has {processes} and is {job.state.phrase}; {hint}"


def _log_paths(job: "Job", rank: int | None, kind: str | None, machine: int | None) -> tuple[list[Path], str]:
    """Return the log file of a process in the last attempt, or those of the set-up, as before it; and a note.

    The note says when the log is of an earlier attempt, the last one in which the machine took part. It is "" else.
    Raises `BadInput` when the machine takes part in none, `ClusterError` for a rank that the job does not have.
    """
    from cluster.state.run_folder import agent_log_path

    if kind == "supervisor":
        return [job.run_folder.supervisor_log_path], ""
    if kind:
        name = job.rank0_machine if machine is None else str(machine)
        return ([agent_log_path(job.path, name)] if kind == "agent" else job.setup_logs(name)), ""
    number = job.last_attempt_number
    if rank and rank >= (count := job.spec.machines * job.spec.procs):
        raise ClusterError(f"--rank {rank}: {job.name} has {pluralize(count, 'training process')}, from --rank 0 on")
    if machine is None or not number:
        note = "" if number or rank is None else f"{job.name} is {job.state.phrase}, without a process; its set-up:"
        return [job.log_path(rank or 0, machine=str(machine or 0))], note
    attempts = [attempt for attempt in reversed(job.run_folder.attempts.all()) if attempt.members]
    absence = f"machine {machine} takes no part in attempt {number} of {job.name}"
    for attempt in attempts:
        if str(machine) in attempt.machine_names:
            path = job.log_path(attempt.machine_names.index(str(machine)) * job.spec.procs, attempt.number)
            return [path], "" if attempt.number == number else f"{absence}; its log of attempt {attempt.number}:"
    names = attempts[0].machine_names
    raise BadInput(f"{absence}; the {'machine is' if len(names) == 1 else 'machines are'} {', '.join(names)}")


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
            f"imgnet-cluster logs {found_job.run.handle}"
        )
    argv = found_job.backend.attach_command(found_job.resolve_machine(machine))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ClusterError(f"attach needs a terminal; without one: imgnet-cluster logs -f {found_job.run.handle}")
    os.environ.pop("TMUX", None)  # tmux refuses to attach from inside another session, such as the user's own
    os.execvp(argv[0], argv)


@click.command()
@click.argument("job_and_command", metavar="[JOB] [COMMAND]...", nargs=-1)
@machine_option
def ssh(job_and_command: tuple[str, ...], machine: int | None) -> None:
    """Open a shell on a machine of JOB, or run COMMAND there.

    Without JOB, the newest job is taken. A COMMAND of one argument is a line for the shell there. Examples:

    \b
    imgnet-cluster ssh job-3 --machine 2 -- nvidia-smi
    imgnet-cluster ssh job-3 --machine 2 -- 'df -h / | tail -1; uptime'
    """
    from cluster.jobs import store

    has_job = bool(job_and_command) and store.is_job(job_and_command[0])
    found_job = store.find(job_and_command[0] if has_job else None)
    command = job_and_command[has_job:]
    argv = found_job.backend.shell_command(found_job.resolve_machine(machine), command, tty=sys.stdin.isatty())
    os.execvp(argv[0], argv)


@click.command()
@click.argument("job", required=False)
def top(job: str | None) -> None:
    """Show the live activity of each machine of JOB.

    Without JOB, the newest job is taken. The table is updated every second, until Ctrl-C; off a terminal it is printed
    once.
    """
    from cluster.display import top as display_top
    from cluster.jobs import store

    found_job = store.find(job)

    def read() -> tuple["JobStatus", dict[str, "MachineRow"]]:
        refresh(found_job)
        return found_job.status(), found_job.machine_details()

    display_top.show_top(read)


@click.command()
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=6006,
    help="Port of the server. 0 takes a free one.",
)
@flag("Options", "--all", "all_jobs", help="Show all jobs of this folder, also those that start later.")
def tensorboard(jobs: tuple[str, ...], port: int, all_jobs: bool) -> None:
    """Serve the training curves of JOB (default: the newest job).

    Several jobs are shown side by side, with their hyperparameters. TensorBoard listens on 127.0.0.1 until Ctrl-C.
    """
    from cluster.display import tensorboard as display_tensorboard
    from cluster.jobs import store

    if all_jobs and jobs:
        raise BadInput("--all shows every job; leave out the names, or leave out --all")
    if all_jobs:
        title = f"all jobs of {store.find().path.parent}"
        sys.exit(display_tensorboard.serve(store.all_jobs, port, title))
    found_jobs = [store.find(name) for name in dict.fromkeys(jobs)] or [store.find()]
    sys.exit(display_tensorboard.serve(lambda: found_jobs, port, ", ".join(job.name for job in found_jobs)))


COMMANDS = (ls, status, logs, attach, ssh, top, tensorboard)
