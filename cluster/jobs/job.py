"""A job: a run folder, with the operations that read or change it."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.backends import catalog
from cluster.backends.base import Backend
from cluster.errors import BadInput, ClusterError
from cluster.machines.user_project import copy_project
from cluster.notifications import notifier
from cluster.state import result as state_result
from cluster.state import status as state_status
from cluster.state import supervisor_records
from cluster.state import timeline as state_timeline
from cluster.state.run_folder import Run, RunFolder, install_log_path, setup_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.status import JobResult, JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from train.metrics.hparams import HParamValue
from train.metrics.records import VAL_SCALARS, val_scalars
from train.tools import host
from train.tools.agent_protocol import RESULT_FILE, rank_log_file
from train.tools.files import NO_FILE_ERRORS, write_atomic
from train.tools.records import MALFORMED_DATA_ERRORS, DamagedRecord, damaged, read_record

from . import queue_state
from .supervision import PROCESS_START_SECONDS, JobBusy, Supervision, is_recent, job_lock, terminate_machines

if TYPE_CHECKING:
    from cluster.planning.resume import ResumePlan

JOB_STOP_TIMEOUT_SECONDS = 45.0
WRITE_RESULT_LOCK_SECONDS = 5.0
WAIT_POLL_SECONDS = 0.2
STOP_POLL_SECONDS = 0.1
START_POLL_SECONDS = 0.05


class DamagedJob(ClusterError):
    """A file of the run folder is damaged."""


class Job:
    """A job in its run folder, and the commands that change it. Every property reads the files anew.

    Only the supervisor (`is_supervisor`) talks to other machines; other processes read the files that it copies.
    """

    def __init__(self, path: Path, is_supervisor: bool = False) -> None:
        self.path = path
        self.name = path.name
        self.run_folder = RunFolder(path)
        self.is_supervisor = is_supervisor
        self.supervision = Supervision(self.run_folder)

    @cached_property
    def run(self) -> Run:
        """The job's specification with its run folder. Raises `ClusterError` when job.json is missing or damaged."""
        try:
            clock = host.unix_time if self.is_supervisor else supervisor_records.home_clock(self.path)
            return replace(Run.read(self.path), folder=self.run_folder, clock=clock)
        except (DamagedRecord, OSError) as error:
            raise self._damage(error) from error

    def _damage(self, error: DamagedRecord | OSError) -> DamagedJob:
        """Return the error about a damaged file of the run folder. It names the file and says what to do."""
        what = damaged(error) if isinstance(error, OSError) else error
        return DamagedJob(
            f"{self.path}: a file in it is damaged ({what}); restore the file; when none of its processes runs, you "
            "may delete the folder to forget the job"
        )

    @property
    def spec(self) -> JobSpec:
        """The job's specification."""
        return self.run.spec

    @cached_property
    def backend(self) -> Backend:
        """The backend that provides the machines."""
        try:
            return catalog.open_backend(self.run)
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
        return bool(self.spec.queue) and not (self.run_folder.started_marker.exists() or self.has_ended)

    @property
    def hparams(self) -> dict[str, HParamValue]:
        """The hyperparameters, as TensorBoard shows them to compare jobs."""
        with self.report_damaged_files():
            return self.spec.settings

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return self.status().state

    def status(self) -> JobStatus:
        """Return the state and the numbers of the job. Raises `ClusterError` when a file of it is damaged."""
        with self.report_damaged_files():
            return self._read_status()

    def _read_status(self) -> JobStatus:
        self.run_folder.attempts.check()
        job_status = state_status.job_status(self.run, self.result)
        if self.spec.notify:
            job_status = replace(job_status, notifications=notifier.describe_trouble(self.path))
        if self.is_waiting:
            wait = queue_state.describe_wait(self.run)
            return replace(job_status, state=JobState.WAITING, doing=wait)
        if job_status.state == JobState.BOOTING and (wait := self.backend.waits_for()):
            return replace(job_status, state=JobState.WAITING, doing=wait)
        if adoption := self.supervision.adoption:
            advice = "all shown here is from before then; whether it still rents machines: imgnet-cluster ls --cloud"
            return replace(job_status, state=JobState.ADOPTED, doing="", warning=f"{adoption.error}; {advice}")
        if not self.has_ended:
            # Without a result it only waits for the end of its rented machines: then it has not stopped yet.
            is_over = job_status.state in (JobState.STOPPED, JobState.FAILED) or bool(self.run_folder.end_reason())
            if is_ending := self.backend.is_billed and is_over:
                rented = self.backend.rented_now()
                doing = rented.describe(self.run.handle) if rented else ""
                job_status = replace(job_status, state=JobState.ENDING, doing=doing)
            trouble = self.supervision.describe_trouble(self.backend, is_ending)
            left_out = state_result.LEFT_OUT if self.run_folder.is_history_cut else ""
            leader = state_status.read_setup_record(self.run_folder).leader
            job_status = replace(job_status, warning="; ".join(filter(None, (trouble, leader, left_out))))
        # Liveness is read before the agents' statuses: the last status of a dead agent is final.
        is_gone = not self.backend.is_remote and not self.has_ended and not self.is_alive
        if is_gone and self.has_agent_status and not self.is_booting:  # result.json could not be written yet
            state, reason = state_status.infer_end_state(self.run)
            if not (self.run_folder.shared / RESULT_FILE).exists():
                job_status = replace(job_status, state=state, reason=reason)
        return job_status

    @contextlib.contextmanager
    def report_damaged_files(self) -> Iterator[None]:
        """Turn the errors of a damaged file into `DamagedJob`; the supervisor logs others, which may be bugs."""
        try:
            yield
        except DamagedRecord as error:
            raise self._damage(error) from error
        except OSError as error:
            if error.errno in NO_FILE_ERRORS:
                raise self._damage(error) from error
            raise
        except MALFORMED_DATA_ERRORS as error:
            if self.is_supervisor:  # its log keeps the traceback
                raise
            raise DamagedJob(
                f"{self.path}: cannot be shown ({type(error).__name__}: {error}): a file in it is damaged, or this is "
                "an error of imgnet-cluster; leave the folder as it is, and report it"
            ) from error

    @property
    def has_agent_status(self) -> bool:
        """Whether an agent of the last launch has written a status."""
        return bool(state_status.machine_statuses(self.run))

    @property
    def is_booting(self) -> bool:
        """Whether the agents of the last launch were started so recently that their first status may still come."""
        return is_recent(state_status.agents_start_time(self.run))

    def scalars(self, name: str) -> list[tuple[int, float]]:
        """Return (images seen, value) of a scalar by its name in TensorBoard: "accuracy/val_top1", "loss/train", ..."""
        values: list[tuple[int, float | None]]
        if name in VAL_SCALARS:
            values = [(row.images, val_scalars(row).get(name)) for row in self.run_folder.epochs()]
        else:
            values = [(row.images, row.scalars.get(name)) for row in self.run_folder.steps()]
        return [(images, value) for images, value in values if value is not None]

    @property
    def launch_command(self) -> str:
        """What launches the same job once more, unnamed: the command as it was typed, or else its recipe alone."""
        if self.spec.command:
            return re.sub(rf" --name[ =]{re.escape(self.spec.given_name)}(?!\S)", "", self.spec.command, count=1)
        if command := self.spec.own_command:
            return f"imgnet-cluster run -- {command.text}"
        return f"imgnet-cluster launch {self.spec.recipe_file or 'RECIPE'}"

    def log_path(self, rank: int = 0, attempt: int | None = None, machine: str = "0") -> Path:
        """Return the log of a rank in an attempt (default: the last); before the first, of the machine's set-up."""
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
            return state_timeline.read_timeline(self.run_folder, self.spec.own_command is not None).rows

    def machine_details(self) -> dict[str, MachineRow]:
        """Return each machine's last status, with the seconds of each step of its start. Raises `ClusterError`."""
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

    def refresh(self) -> None:
        """Copy new files into the run folder; if the agents are gone, write the result.

        A waiting job gets its queue process, and a job on other machines its supervisor, if they have died.

        Raises `ClusterError` when the run folder cannot be written (disk full or read-only) or has a damaged file.
        """
        try:
            with self.report_damaged_files():
                if not self.has_ended:
                    self._advance()
                elif not self.is_supervisor and notifier.has_untold_end(self.run):
                    self.supervision.ensure_end_is_told(self.backend)
        except OSError as error:
            reason = error.strerror or error
            raise ClusterError(
                f"{self.path}: {reason}; the files of the job cannot be copied here until that is mended"
            ) from error

    def _advance(self) -> None:
        if self.is_waiting:
            return queue_state.ensure_queue_process(self.path.parent, self.spec.queue)
        if not self.is_supervisor:
            if self.backend.is_remote:
                return self.supervision.ensure(self.backend)
            self.supervision.end_frozen(self.backend)
        # Read before the backend is asked: a first status that arrives meanwhile means that the job is alive, and a
        # launch that begins meanwhile is not the one that has ended.
        launch_id = self.run_folder.launch_id
        may_have_ended = self.has_agent_status or not self.is_booting
        if not self.backend.poll() and may_have_ended:
            self._write_result(launch_id)

    def _write_result(self, launch_id: str) -> None:
        """Write the result once a launch's agents are gone, unless the job was launched again. Idempotent."""
        with contextlib.suppress(JobBusy), job_lock(self.path, WRITE_RESULT_LOCK_SECONDS):
            is_same_launch = self.run_folder.launch_id == launch_id
            has_no_agents = not self.is_alive or (self.is_supervisor and self.backend.is_remote)
            if is_same_launch and has_no_agents and not self.has_ended:
                state, _ = state_status.infer_end_state(self.run)
                self._end(self.backend.explain_end(), state)

    def _end(self, reason: str, state: JobState) -> None:
        """End the job's processes and rented machines, and write its result. The caller holds the lock."""
        silent_machines = self.backend.terminate()
        state_result.write_result(self.run, self.backend, silent_machines, reason, state)

    def fail(self, reason: str) -> None:
        """End a job that cannot start or was stopped before it started, with its processes and rented machines."""
        was_stopped = self.run_folder.stop_path.exists()
        with job_lock(self.path, WRITE_RESULT_LOCK_SECONDS):
            self._end(reason, JobState.STOPPED if was_stopped else JobState.FAILED)

    def wait(self, timeout_seconds: float | None = None) -> JobState:
        """Wait until the job has ended and return its final state. Raises `ClusterError` after the timeout."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self.refresh()
            if self.has_ended:
                return self.state
            self.supervision.require()
            if deadline is not None and time.monotonic() > deadline:
                hint = f"see: imgnet-cluster status {self.run.handle}"
                raise ClusterError(f"{self.name}: not finished after {timeout_seconds:g} s; {hint}")
            time.sleep(WAIT_POLL_SECONDS)

    def start(self) -> None:
        """Start the job. Raises `ClusterError`; a job that had ended before then keeps its result."""
        with job_lock(self.path):
            self.claim_machines()
            self.start_locked()

    def claim_machines(self) -> None:
        """Take free machines of a queue's hosts file, or GPUs of this computer. Raises `ClusterError` for too few."""
        self._change_spec(queue_state.with_free_machines(self.run))
        self._change_spec(queue_state.with_gpus(self.run))

    def _change_spec(self, spec: JobSpec) -> None:
        if spec != self.spec:
            self.run_folder.write_spec(spec)
            self.run = replace(self.run, spec=spec)
            vars(self).pop("backend", None)  # it works by the old specification

    def _refuse_if(self, is_running: bool) -> None:
        if is_running:
            raise ClusterError(f"{self.name} is running; to watch it: imgnet-cluster attach {self.run.handle}")

    def start_locked(self) -> None:
        """Start the job. The caller holds its lock. Raises `ClusterError`."""
        self._refuse_if(self.is_alive)
        self.run_folder.stop_path.unlink(missing_ok=True)
        for name in self.spec.machine_names:
            self.run_folder.disabled_marker(name).unlink(missing_ok=True)
            self.run_folder.join_marker(name).unlink(missing_ok=True)
        previous_result = self.run_folder.result_path.read_bytes() if self.has_ended else b""
        self.run_folder.result_path.unlink(missing_ok=True)
        try:
            supervisor_records.write_trouble(self.path, None)
            (self.path / supervisor_records.HEARTBEAT_FILE).unlink(missing_ok=True)  # its clock is of the last launch
            self.run_folder.begin_launch()
            self.backend.launch()
        except (ClusterError, OSError):
            if previous_result:
                write_atomic(self.run_folder.result_path, previous_result)
            raise
        self.run_folder.started_marker.touch()
        deadline = time.monotonic() + (0 if self.backend.is_remote else PROCESS_START_SECONDS)
        while not (self.has_agent_status or self.backend.waits_for()) and time.monotonic() < deadline:
            time.sleep(START_POLL_SECONDS)

    def stop(self) -> None:
        """Save and stop, or leave the queue; return when all is over. Raises `ClusterError` if it had ended already."""
        if self.is_waiting and self._leave_queue():
            return
        self.refresh()
        if self.has_ended:
            raise ClusterError(f"{self.name} is {self.state} already; which jobs run: imgnet-cluster ls")
        self.supervision.require()
        self.run_folder.request_stop()
        if wait := self.backend.waits_for():  # no agent will obey the request
            return self.fail(f"stopped while {wait}")
        deadline = time.monotonic() + JOB_STOP_TIMEOUT_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(STOP_POLL_SECONDS)
            self.refresh()
        terminate_machines(self.backend)
        self.wait(10)

    def _leave_queue(self) -> bool:
        """Leave the queue for good. Returns False when the job was started meanwhile."""
        with job_lock(self.path, PROCESS_START_SECONDS):
            if not self.is_waiting:
                return False
            if self.run_folder.launch_path.exists():  # the queue process was killed while it started the job
                self.backend.terminate()
            state_result.write_result(self.run, self.backend, (), "stopped while it waited", JobState.STOPPED)
            return True

    def kill_machine(self, machine: str, notice_seconds: float | None = None, is_permanent: bool = False) -> None:
        """Kill a machine to rehearse a recovery: at once, as in a power cut, or after a notice of `notice_seconds`.

        The supervisor replaces it, unless `is_permanent`. Raises `ClusterError` when no such machine is at work.
        """
        self.refresh()
        if self.has_ended or self.is_waiting:
            hint = "which jobs run: imgnet-cluster ls"
            raise ClusterError(f"{self.name} is {self.state.phrase}; it has no machine that could be lost; {hint}")
        name = self.resolve_machine(int(machine))
        if is_permanent:
            self.run_folder.disabled_marker(name).touch()
        self.backend.kill_machine(name, notice_seconds)

    def plan_resume(self, **options: object) -> "ResumePlan":
        """Return the plan of a resume with changed options of the launch. Asks the cloud. Raises `ClusterError`."""
        from cluster.planning.resume import plan_resume  # late, because most commands plan nothing

        self._require_resumable(adds_epochs=options.get("epochs") is not None)
        self.backend.check_access(ask_cloud=True)
        with self.report_damaged_files():
            cost = self.backend.job_cost()
            types = {machine.type for machine in cost.machines}
            return plan_resume(
                self.run,
                self.status().step or 0,
                cost.dollars,
                rented_type=types.pop() if len(types) == 1 else "",
                **options,
            )

    def resume(self, plan: "ResumePlan | None" = None) -> None:
        """Continue a job from its newest checkpoint. `plan`, if given, has the options that change.

        Raises `ClusterError` when the job is running or done, or cannot start; then its specification is unchanged.
        """
        adds_epochs = plan is not None and plan.adds_epochs
        self._require_resumable(adds_epochs)
        if plan:
            plan.require_no_obstacle()
        earlier_spec = self.spec
        spec = plan.spec if plan else earlier_spec
        self.backend.check(spec, self.path.parent)
        with job_lock(self.path):
            self._refuse_if(self.is_alive)
            # The result and the network that is trained on stay under another name.
            outputs = (self.run_folder.shared / RESULT_FILE, self.run_folder.network_folder) if adds_epochs else ()
            old, epochs = [path for path in outputs if path.exists()], spec.train.extended_at
            outcome = {path: path.with_name(f"{path.stem}-{epochs}{path.suffix}") for path in old}
            try:
                self._change_spec(spec)
                self.claim_machines()
                if spec.user_project:  # the user may have corrected it before the resume
                    copy_project(spec.user_project, self.run_folder.user_project)
                for path, kept_path in outcome.items():
                    path.rename(kept_path)
                self.start_locked()
            except (ClusterError, OSError):
                self._change_spec(earlier_spec)
                for path, kept_path in outcome.items():
                    with contextlib.suppress(FileNotFoundError):
                        kept_path.rename(path)
                raise

    def _require_resumable(self, adds_epochs: bool = False) -> None:
        self.refresh()
        if adoption := self.supervision.adoption:
            raise ClusterError(adoption.error)
        if adds_epochs and not self.has_ended:
            raise BadInput(f"--epochs: {self.name} is {self.state.phrase}; it can get more of them when it has ended")
        self._refuse_if(not self.has_ended)
        if self.state == JobState.DONE and not adds_epochs:
            train_on = f"To train it on: imgnet-cluster resume {self.run.handle} --epochs +N. "
            hint = "" if self.spec.own_command else train_on
            text = f"{self.name} is done; there is nothing to resume. {hint}Run it again: {self.launch_command}"
            raise ClusterError(text)
