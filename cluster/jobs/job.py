"""A job: a run folder, with the operations that read or change it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from cluster.backends import registry
from cluster.backends.base import Backend
from cluster.errors import BadInput, ClusterError
from cluster.state import result as state_result
from cluster.state import status as state_status
from cluster.state import supervisor_records
from cluster.state import timeline as state_timeline
from cluster.state.job_result import JobResult
from cluster.state.run_folder import SUPERVISOR_LOCK, Run, RunFolder, lock_holder, setup_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.status import JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from train.metrics.hparams import flat_settings
from train.metrics.records import EpochRow, StepRow, val_scalars
from train.recipe.schedule import Schedule, scaled_image_count
from train.tools.agent_protocol import RESULT_FILE, rank_log_file
from train.tools.filesystem import NO_FILE_ERRORS, locked, to_json_bytes, write_atomic
from train.tools.process import command_line
from train.tools.records import MALFORMED_DATA_ERRORS, DamagedRecord, damaged, read_record

from . import queue_state

AGENT_START_SECONDS = 20.0  # for an agent to write its first status
JOB_STOP_TIMEOUT_SECONDS = 45.0
WRITE_RESULT_LOCK_SECONDS = 5.0
WAIT_POLL_SECONDS = 0.2
STOP_POLL_SECONDS = 0.1
START_POLL_SECONDS = 0.05
SUPERVISOR_END_SECONDS = 5.0  # after each signal
ACCESS_CHECK_SECONDS = 10.0  # between two questions to the cloud whether it accepts the credentials
SUPERVISOR_START_MARKER = ".supervised"  # in the run folder; changed whenever a command starts a supervisor


class JobBusy(ClusterError):
    """Another command is changing the job."""


class DamagedJob(ClusterError):
    """A file of the run folder is damaged."""


def _is_recent(start: float) -> bool:
    """Whether a process that was started at `start` may not have taken its lock, or written its status, yet."""
    return 0 <= time.time() - start < AGENT_START_SECONDS  # False when the clock was set back


def _last_change(*paths: Path) -> float:
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
            images = scaled_image_count(self.spec.recipe.data.train, self.spec.train.scale)
            schedule = Schedule(self.spec.recipe, images, self.spec.schedule_gpus)
            return flat_settings(schedule, self.spec.machines * self.spec.procs)

    @property
    def state(self) -> JobState:
        """The state."""
        return self.status().state

    def status(self) -> JobStatus:
        """Return what is known now.

        Raises `ClusterError` when a file of the run folder is damaged.
        """
        with self.report_damaged_files():
            return self._read_status()

    def _read_status(self) -> JobStatus:
        self.run_folder.attempts.check()
        job_status = state_status.job_status(self.run, self.result)
        if self.is_waiting:
            wait = queue_state.describe_wait(self.run)
            return replace(job_status, state=JobState.WAITING, doing=wait)
        if job_status.state == JobState.BOOTING and (wait := self.backend.waits_for()):
            return replace(job_status, state=JobState.WAITING, doing=wait)
        job_status = replace(job_status, warning=self._describe_trouble())
        # Liveness is read before the agents' statuses: the last status of a dead agent is final.
        is_gone = not self.backend.is_remote and not self.has_ended and not self.is_alive
        if is_gone and self.has_agent_status and not self.is_booting:  # result.json could not be written yet
            has_training_result = (self.run_folder.shared / RESULT_FILE).exists()
            state, reason = state_status.infer_end_state(self.run)
            if not has_training_result:
                job_status = replace(job_status, state=state, reason=reason)
        return job_status

    def _describe_trouble(self) -> str:
        """Return what is wrong with the job's supervisor and what that means, "" when nothing is."""
        if self.has_ended:
            return ""
        trouble = supervisor_records.read_trouble(self.path)
        if self.backend.is_supervised() or not self.backend.is_remote:
            if trouble is None or not trouble.lacks_access:
                return trouble.error if trouble else ""
            error, lacks_access = trouble.error, True
        elif self.access_error:
            error, lacks_access = f"no supervisor is at work: {self.access_error}", True
        elif trouble:
            error, lacks_access = f"no supervisor is at work: {trouble.error}", trouble.lacks_access
        elif _is_recent(_last_change(self.path / SUPERVISOR_START_MARKER, self.run_folder.launch_path)):
            return ""
        else:
            error, lacks_access = "no supervisor is at work", False
        remedy = f"imgnet-cluster status {self.name}"
        if lacks_access:
            remedy += ", in a shell with credentials for the job's machines"
        return f"{error}; lost machines are not replaced until you type: {remedy}"

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
        return _is_recent(state_status.agents_start_time(self.run))

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
        """Return (images seen, value) of a scalar such as "val/top1" or "train/loss", as TensorBoard shows it."""
        values: list[tuple[int, float | None]]
        if name.startswith("val/"):
            values = [(row.images, val_scalars(row).get(name)) for row in self.epochs()]
        else:
            values = [(row.images, row.scalars.get(name)) for row in self.steps()]
        return [(images, value) for images, value in values if value is not None]

    def log_path(self, rank: int = 0, attempt: int | None = None, machine: str = "0") -> Path:
        """Return the log file of a rank in an attempt (default: the last one).

        Before the first attempt it is the log of the machine's set-up.
        """
        number = attempt or self.last_attempt_number
        return rank_log_file(self.path, number, rank) if number else setup_log_path(self.path, machine)

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


class Job(JobReader):
    """A job in its run folder, with the commands that change it."""

    next_access_check = 0.0  # monotonic seconds

    def refresh(self) -> None:
        """Copy new files into the run folder; if the agents are gone, write the result.

        A waiting job gets its queue process, and a job on other machines its supervisor, if they have died.

        Raises `ClusterError` when the run folder cannot be written (disk full or read-only) or has a damaged file.
        """
        try:
            with self.report_damaged_files():
                if not self.has_ended:
                    self._advance()
        except OSError as error:
            reason = error.strerror or error
            raise ClusterError(
                f"{self.path}: {reason}; until then the files of the job cannot be copied here"
            ) from error

    def _advance(self) -> None:
        if self.is_waiting:
            return queue_state.ensure_queue_process(self.path.parent, self.spec.queue)
        if self.backend.is_remote and not self.is_supervisor:
            return self._ensure_supervisor()
        # Read before the backend is asked: a first status that arrives meanwhile means that the job is alive, and a
        # launch that begins meanwhile is not the one that has ended.
        launch_id = self.run_folder.launch_id
        may_have_ended = self.has_agent_status or not self.is_booting
        if not self.backend.poll() and may_have_ended:
            self._write_result(launch_id)

    def _ensure_supervisor(self) -> None:
        """Start the supervisor when none is running, for example after a reboot.

        Without credentials for the job's cloud, `access_error` gets the reason and none is started: it would do nothing
        but keep out a supervisor that has them. A supervisor whose credentials the cloud refuses is replaced when the
        cloud accepts those of this process.
        """
        start_marker = self.path / SUPERVISOR_START_MARKER
        with contextlib.suppress(JobBusy), self.locked():
            trouble = supervisor_records.read_trouble(self.path)
            lacked_access = trouble is not None and trouble.lacks_access
            if not lacked_access and (self.is_alive or _is_recent(_last_change(start_marker))):
                self.access_error = ""
                return
            if time.monotonic() < self.next_access_check:
                return
            self.next_access_check = time.monotonic() + ACCESS_CHECK_SECONDS
            try:
                self.backend.check_access(ask_cloud=lacked_access)
            except ClusterError as error:
                self.access_error = "" if self.is_alive else str(error)
                return
            self.access_error = ""
            if self._end_supervisor():
                supervisor_records.write_trouble(self.path, None)
                start_marker.touch()
                self.backend.launch()

    def _end_supervisor(self) -> bool:
        """End the job's supervisor, so that this process can start another. Returns whether none is at work any more.

        The holder of the lock is left alone if it is another program: on a shared disk, the ID may be that of a process
        of another computer.
        """
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            pid = lock_holder(self.path / SUPERVISOR_LOCK)
            if pid is None or not command_line(pid).endswith(" ".join(self.backend.supervisor_argv()[-2:])):
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal_number)
            deadline = time.monotonic() + SUPERVISOR_END_SECONDS
            while self.backend.is_supervised() and time.monotonic() < deadline:
                time.sleep(START_POLL_SECONDS)
        return not self.backend.is_supervised()

    def _require_supervisor(self) -> None:
        """Raise `ClusterError` when no supervisor is at work and `refresh` could start none: nothing would change."""
        if self.access_error:
            raise ClusterError(f"{self.name}: no supervisor is at work: {self.access_error}")

    def _write_result(self, launch_id: str) -> None:
        """Write the result of a launch whose agents are gone, once all its processes are gone. Idempotent.

        Does nothing when the job was launched again meanwhile.
        """
        with contextlib.suppress(JobBusy), self.locked(timeout_seconds=WRITE_RESULT_LOCK_SECONDS):
            is_same_launch = self.run_folder.launch_id == launch_id
            has_no_agents = not self.is_alive or (self.is_supervisor and self.backend.is_remote)
            if is_same_launch and has_no_agents and not self.has_ended:
                state, _ = state_status.infer_end_state(self.run)
                end_reason = self.backend.explain_end()
                silent_machines = self.backend.terminate()
                state_result.write_result(self.run, self.backend, silent_machines, end_reason, end_state=state)

    def fail(self, reason: str) -> None:
        """End a job that cannot start or was stopped before it started, with its processes and rented machines."""
        end_state = JobState.STOPPED if (self.run_folder.shared / "stop").exists() else JobState.FAILED
        with self.locked(timeout_seconds=WRITE_RESULT_LOCK_SECONDS):
            silent_machines = self.backend.terminate()
            state_result.write_result(self.run, self.backend, silent_machines, reason, end_state)

    def wait(self, timeout_seconds: float | None = None) -> JobState:
        """Wait until the job has ended and return its final state. Raises `ClusterError` after the timeout."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self.refresh()
            if self.has_ended:
                return self.state
            self._require_supervisor()
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.name}: not finished after {timeout_seconds:g} s; see: imgnet-cluster status {self.name}"
                )
            time.sleep(WAIT_POLL_SECONDS)

    def start(self) -> None:
        """Start the job. Raises `ClusterError`; a job that had ended before then keeps its result."""
        with self.locked():
            self.claim_machines()
            self.start_locked()

    def claim_machines(self) -> None:
        """Take free machines of the hosts file that the jobs of a queue share.

        Raises `ClusterError` when too few are free.
        """
        spec = queue_state.with_free_machines(self.run)
        if spec != self.spec:
            self.run_folder.write_spec(spec)
            self.run = replace(self.run, spec=spec)
            vars(self).pop("backend", None)  # it works by the old specification

    def start_locked(self) -> None:
        """Start the job. The caller holds its lock. Raises `ClusterError`."""
        if self.is_alive:
            raise ClusterError(f"{self.name} is running; to watch it: imgnet-cluster attach {self.name}")
        (self.run_folder.shared / "stop").unlink(missing_ok=True)
        for name in self.spec.machine_names:
            self.run_folder.disabled_marker(name).unlink(missing_ok=True)
        previous_result = self.run_folder.result_path.read_bytes() if self.has_ended else b""
        self.run_folder.result_path.unlink(missing_ok=True)
        try:
            supervisor_records.write_trouble(self.path, None)
            write_atomic(self.run_folder.launch_path, uuid4().hex.encode())
            self.backend.launch()
        except (ClusterError, OSError):
            if previous_result:
                write_atomic(self.run_folder.result_path, previous_result)
            raise
        self.run_folder.started_marker.touch()
        deadline = time.monotonic() + (0 if self.backend.is_remote else AGENT_START_SECONDS)
        while not (self.has_agent_status or self.backend.waits_for()) and time.monotonic() < deadline:
            time.sleep(START_POLL_SECONDS)

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = 0) -> Iterator[None]:
        """Hold the job's lock. Raises `JobBusy` when another command still holds it after the timeout."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", timeout_seconds))
            except BlockingIOError:
                raise JobBusy(f"{self.name}: another command is changing the job; try again in a moment") from None
            yield

    def stop(self) -> None:
        """Save a checkpoint, stop the job, and return when all its processes are gone.

        A waiting job leaves its queue. Raises `ClusterError` when the job has ended already.
        """
        if self.is_waiting and self._leave_queue():
            return
        self.refresh()
        if self.has_ended:
            raise ClusterError(f"{self.name} is {self.state} already; there is nothing to stop")
        self._require_supervisor()
        write_atomic(self.run_folder.shared / "stop", to_json_bytes({"time": time.time(), "pid": os.getpid()}))
        if wait := self.backend.waits_for():  # no agent will obey the request
            return self.fail(f"stopped while {wait}")
        deadline = time.monotonic() + JOB_STOP_TIMEOUT_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(STOP_POLL_SECONDS)
            self.refresh()
        self.backend.terminate()
        self.wait(10)

    def _leave_queue(self) -> bool:
        """Leave the queue for good. Returns False when the job was started meanwhile."""
        with self.locked(AGENT_START_SECONDS):
            if not self.is_waiting:
                return False
            if self.run_folder.launch_path.exists():  # the queue process was killed while it started the job
                self.backend.terminate()
            state_result.write_result(
                self.run,
                self.backend,
                end_reason="stopped while it waited",
                end_state=JobState.STOPPED,
            )
            return True

    def kill_machine(self, machine: str, notice_seconds: float | None = None, is_permanent: bool = False) -> None:
        """Kill a machine to rehearse a recovery: at once, as in a power cut, or after a notice of `notice_seconds`.

        The supervisor replaces the machine, unless `is_permanent`. Raises `ClusterError` when the job has no such
        machine at work.
        """
        self.refresh()
        if self.has_ended or self.is_waiting:
            raise ClusterError(f"{self.name} is {self.state}; it has no machine that could be lost")
        name = self.resolve_machine(int(machine))
        if is_permanent:
            self.run_folder.disabled_marker(name).touch()
        self.backend.kill_machine(name, notice_seconds)

    def resume(self) -> None:
        """Start a stopped or failed job again, from its newest complete checkpoint.

        Raises `ClusterError` when the job is running or done, or cannot start.
        """
        self.refresh()
        if not self.has_ended:
            raise ClusterError(f"{self.name} is running; to watch it: imgnet-cluster attach {self.name}")
        if self.state == JobState.DONE:
            raise ClusterError(f"{self.name} is done; there is nothing to resume. Run it again: imgnet-cluster launch")
        self.backend.check(self.spec, self.path.parent)
        self.start()
