"""Reads a job from the files of its run folder, for commands and for Python. Changes nothing."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from cluster.backends import registry
from cluster.backends.base import Backend
from cluster.errors import BadInput, ClusterError
from cluster.notifications import journal
from cluster.state import status as state_status
from cluster.state import supervisor_records
from cluster.state import timeline as state_timeline
from cluster.state.job_result import JobResult
from cluster.state.run_folder import Run, RunFolder, install_log_path, setup_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.status import JobStatus, MachineRow
from cluster.state.supervisor_records import SupervisorTrouble
from cluster.state.timeline import AttemptRow
from train.metrics.hparams import HParamValue, flat_settings
from train.metrics.records import VAL_SCALARS, EpochRow, StepRow, val_scalars
from train.tools.agent_protocol import RESULT_FILE, rank_log_file
from train.tools.filesystem import NO_FILE_ERRORS
from train.tools.records import MALFORMED_DATA_ERRORS, DamagedRecord, damaged, read_record

from . import queue_state

AGENT_START_SECONDS = 20.0  # for an agent to write its first status
SUPERVISOR_START_MARKER = ".supervised"  # in the run folder; changed whenever a command starts a supervisor


def job_settings(spec: JobSpec) -> dict[str, HParamValue]:
    """Return the settings of a job as one flat row: those of its recipe, or the arguments of its command."""
    world_size = spec.machines * spec.procs
    if command := spec.own_command:
        return command.settings(world_size)
    return flat_settings(spec.recipe_schedule, world_size)


class DamagedJob(ClusterError):
    """A file of the run folder is damaged."""


def is_recent(start: float) -> bool:
    """Whether a process that was started at `start` may not have taken its lock, or written its status, yet."""
    return 0 <= time.time() - start < AGENT_START_SECONDS  # False when the clock was set back


def last_change(*paths: Path) -> float:
    """Return when one of these files was last changed, in seconds since 1970; 0 when there is none."""
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


class JobReader:
    """Reads the state of a job from the files of its run folder. Every property reads the files anew.

    Only the supervisor (`is_supervisor`) talks to machines other than this computer. All other processes read the files
    that it copies into the run folder.
    """

    def __init__(self, path: Path, is_supervisor: bool = False) -> None:
        self.path = path
        self.name = path.name
        self.run_folder = RunFolder(path)
        self.is_supervisor = is_supervisor
        self.access_error = ""  # why this process must not start the supervisor that the job needs, "" if it may

    @cached_property
    def run(self) -> Run:
        """The job's specification with its run folder. Raises `ClusterError` when job.json is missing or damaged."""
        try:
            return replace(Run.read(self.path), folder=self.run_folder)
        except DamagedRecord as error:
            raise self._damage(error) from error
        except OSError as error:
            raise self._damage(damaged(error)) from error

    def _damage(self, error: DamagedRecord) -> DamagedJob:
        """Return the error about a damaged file of the run folder. It names the file and says what to do."""
        return DamagedJob(
            f"{self.path}: a file in it is damaged ({error}); restore the file, or delete the folder to forget the job"
        )

    @property
    def spec(self) -> JobSpec:
        """The job's specification."""
        return self.run.spec

    @cached_property
    def backend(self) -> Backend:
        """The backend that provides the machines."""
        try:
            return registry.open_backend(self.run)
        except BadInput as error:
            raise BadInput(f"{self.run_folder.spec_path}: {error}") from error
        except DamagedRecord as error:
            raise self._damage(error) from error

    @property
    def is_alive(self) -> bool:
        """Whether the job is at work: its agents, or its supervisor if the machines are elsewhere."""
        return self.backend.is_supervised() if self.backend.is_remote else self.backend.agents_alive()

    @property
    def result(self) -> JobResult | None:
        """The content of result.json, None until the job has ended. Raises `ClusterError` when it is damaged."""
        with self.report_damaged_files():
            return read_record(self.run_folder.result_path, JobResult)

    @property
    def has_ended(self) -> bool:
        """Whether the job is done, failed or stopped."""
        return self.run_folder.result_path.exists()

    @property
    def is_waiting(self) -> bool:
        """Whether the job is in a queue and has not been started yet."""
        return not queue_state.has_left_queue(self.run)

    @property
    def hparams(self) -> dict[str, int | float | str]:
        """The hyperparameters, as TensorBoard shows them to compare jobs."""
        with self.report_damaged_files():
            return job_settings(self.spec)

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return self.status().state

    def status(self) -> JobStatus:
        """Return the state and the numbers of the job.

        Raises `ClusterError` when a file of the run folder is damaged.
        """
        with self.report_damaged_files():
            return self._read_status()

    def _read_status(self) -> JobStatus:
        self.run_folder.attempts.check()
        job_status = state_status.job_status(self.run, self.result)
        if self.spec.notify:
            job_status = replace(job_status, notifications=journal.describe_trouble(self.path))
        if self.is_waiting:
            wait = queue_state.describe_wait(self.run)
            return replace(job_status, state=JobState.WAITING, doing=wait)
        if job_status.state == JobState.BOOTING and (wait := self.backend.waits_for()):
            return replace(job_status, state=JobState.WAITING, doing=wait)
        if adoption := self.adoption:
            advice = "all shown here is from before then; whether it still rents machines: imgnet-cluster ls --cloud"
            return replace(job_status, state=JobState.ADOPTED, doing="", warning=f"{adoption.error}; {advice}")
        job_status = replace(job_status, warning=self._describe_trouble())
        # Liveness is read before the agents' statuses: the last status of a dead agent is final.
        is_gone = not self.backend.is_remote and not self.has_ended and not self.is_alive
        if is_gone and self.has_agent_status and not self.is_booting:  # result.json could not be written yet
            has_training_result = (self.run_folder.shared / RESULT_FILE).exists()
            state, reason = state_status.infer_end_state(self.run)
            if not has_training_result:
                job_status = replace(job_status, state=state, reason=reason)
        return job_status

    @property
    def adoption(self) -> SupervisorTrouble | None:
        """What this computer's supervisor found when another computer had adopted the job, None if none has."""
        trouble = None if self.has_ended else supervisor_records.read_trouble(self.path)
        return trouble if trouble and trouble.adopted_since else None

    def _describe_trouble(self) -> str:
        """Return what is wrong with the job's supervisor, and the consequence; "" when nothing is wrong."""
        if self.has_ended:
            return ""
        trouble = supervisor_records.read_trouble(self.path)
        if self.backend.is_supervised() or not self.backend.is_remote:
            if trouble is None or not trouble.lacks_access:
                return trouble.error if trouble else ""
            error, lacks_access = trouble.error, True
        elif self.access_error:
            error, lacks_access = f"no supervisor is running: {self.access_error}", True
        elif trouble:
            error, lacks_access = f"no supervisor is running: {trouble.error}", trouble.lacks_access
        elif is_recent(last_change(self.path / SUPERVISOR_START_MARKER, self.run_folder.launch_path)):
            return ""
        else:
            error, lacks_access = "no supervisor is running", False
        remedy = f"imgnet-cluster status {self.name}"
        if lacks_access:
            remedy += ", in a shell with credentials for the job's machines"
        consequence = "nothing is rented, so lost and broken machines" if self.backend.is_billed else "lost machines"
        return f"{error}; {consequence} are not replaced until you type: {remedy}"

    @contextlib.contextmanager
    def report_damaged_files(self) -> Iterator[None]:
        """Turn the errors that a damaged file causes into `DamagedJob`.

        The supervisor logs errors of other kinds than `DamagedRecord` with their traceback: they may be bugs.
        """
        try:
            yield
        except DamagedRecord as error:
            raise self._damage(error) from error
        except OSError as error:
            if error.errno in NO_FILE_ERRORS:
                raise self._damage(damaged(error)) from error
            raise
        except MALFORMED_DATA_ERRORS as error:
            if self.is_supervisor:  # its log keeps the traceback
                raise
            raise self._damage(DamagedRecord(f"{type(error).__name__}: {error}")) from error

    @property
    def has_agent_status(self) -> bool:
        """Whether an agent of the last launch has written a status."""
        return bool(state_status.machine_statuses(self.run))

    @property
    def is_booting(self) -> bool:
        """Whether the agents of the last launch were started so recently that their first status may still come."""
        return is_recent(state_status.agents_start_time(self.run))

    def epochs(self) -> list[EpochRow]:
        """Return the finished epochs. Those repeated by a later attempt appear once. Each line is read once."""
        return self._epoch_reader.epochs()

    @cached_property
    def _epoch_reader(self) -> state_status.EpochReader:
        return state_status.EpochReader(self.run_folder)

    def steps(self) -> Iterator[StepRow]:
        """Yield the metrics of the steps, about one row a second. Steps repeated by a later attempt appear once."""
        return state_status.iterate_steps(self.run_folder)

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return (images seen, value) of a scalar by its name in TensorBoard: "accuracy/val_top1", "loss/train", ..."""
        values: list[tuple[int, float | None]]
        if name in VAL_SCALARS:
            values = [(row.images, val_scalars(row).get(name)) for row in self.epochs()]
        else:
            values = [(row.images, row.scalars.get(name)) for row in self.steps()]
        return [(images, value) for images, value in values if value is not None]

    @property
    def launch_command(self) -> str:
        """What launches the same job once more: the command as it was typed, or else its recipe alone."""
        if self.spec.command:
            return self.spec.command
        if command := self.spec.own_command:
            return f"imgnet-cluster run -- {command.text}"
        return f"imgnet-cluster launch {self.spec.recipe_file or 'RECIPE'}"

    def log_path(self, rank: int = 0, attempt: int | None = None, machine: str = "0") -> Path:
        """Return the log file of a rank in an attempt (default: the last one).

        Before the first attempt it is the newest log of the machine's set-up.
        """
        number = attempt or self.last_attempt_number
        return rank_log_file(self.path, number, rank) if number else self.setup_logs(machine)[-1]

    def setup_logs(self, machine: str) -> list[Path]:
        """Return the logs of a machine's set-up: over ssh, and by its agent. Those that exist, or the one to come."""
        paths = [install_log_path(self.path, machine), setup_log_path(self.path, machine)]
        return [path for path in paths if path.exists()] or paths[1:]

    @property
    def last_attempt_number(self) -> int:
        """The number of the last attempt that has members, 0 before the first. Costs less than the status."""
        with self.report_damaged_files():
            self.run_folder.attempts.check()
            return self.run_folder.attempts.last_training_number()

    def timeline(self) -> list[AttemptRow]:
        """Return a row for each attempt: machines, time, reason, and what the change cost in seconds and steps."""
        with self.report_damaged_files():
            return state_timeline.attempt_rows(self.run_folder)

    def machine_details(self) -> dict[str, MachineRow]:
        """Return the last status of each machine, with the seconds of each stage up to its first step.

        Raises `ClusterError` when a file of the run folder is damaged.
        """
        with self.report_damaged_files():
            return state_status.machine_rows(self.run)

    @property
    def rank0_machine(self) -> str:
        """The name of the machine of rank 0."""
        newest = self.run_folder.attempts.newest()
        return newest.machine_names[0] if newest and newest.members else "0"

    def resolve_machine(self, machine: int | None) -> str:
        """Return the name of a machine, by default that of rank 0. Raises `BadInput` when there is no such machine."""
        name = self.rank0_machine if machine is None else str(machine)
        if name not in self.spec.machine_names:
            raise BadInput(
                f"{self.name} has the machines {', '.join(self.spec.machine_names)}; there is no machine {name}"
            )
        return name
