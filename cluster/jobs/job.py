"""A job: a run folder, with the operations that read or change it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from cluster.errors import BadInput, ClusterError, JobAdopted, NoCloudAccess
from cluster.machines.user_project import copy_project
from cluster.notifications.notifier import has_untold_end
from cluster.script import secret_values
from cluster.state import result as state_result
from cluster.state import status as state_status
from cluster.state import supervisor_records
from cluster.state.run_folder import SUPERVISOR_LOCK, lock_holder
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.supervisor_records import SupervisorTrouble
from train.tools.filesystem import locked, to_json_bytes, write_atomic
from train.tools.process import command_line

from . import queue_state
from .job_reader import AGENT_START_SECONDS, SUPERVISOR_START_MARKER, JobReader, is_recent, last_change

if TYPE_CHECKING:
    from cluster.planning.resume import ResumePlan

JOB_STOP_TIMEOUT_SECONDS = 45.0
WRITE_RESULT_LOCK_SECONDS = 5.0
WAIT_POLL_SECONDS = 0.2
STOP_POLL_SECONDS = 0.1
START_POLL_SECONDS = 0.05
SUPERVISOR_END_SECONDS = 5.0  # after each signal
ACCESS_CHECK_SECONDS = 10.0  # between two questions to the cloud whether it accepts the credentials


def trouble_of(error: Exception) -> SupervisorTrouble:
    """Return the record of an error that keeps the supervisor from its work."""
    return SupervisorTrouble(
        error=str(error),
        lacks_access=isinstance(error, NoCloudAccess),
        adopted_since=error.since if isinstance(error, JobAdopted) else 0.0,
    )


class JobBusy(ClusterError):
    """Another command is changing the job."""


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
                elif not self.is_supervisor and has_untold_end(self.run) and not self.backend.is_supervised():
                    self._tell_end()
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

    def _tell_end(self) -> None:
        """Start the supervisor of an ended job again: the last one was killed before it told users of the end."""
        start_marker = self.path / SUPERVISOR_START_MARKER
        with contextlib.suppress(JobBusy, ClusterError), self.locked():
            if not is_recent(last_change(start_marker, self.run_folder.result_path)):
                start_marker.touch()
                self.backend.start_session()

    def _ensure_supervisor(self) -> None:
        """Start the supervisor when none is running, for example after a reboot.

        Without credentials for the job's cloud, `access_error` gets the reason and none is started: it would do nothing
        but keep out a supervisor that has them. A supervisor whose credentials the cloud refuses is replaced when the
        cloud accepts those of this process.
        """
        start_marker = self.path / SUPERVISOR_START_MARKER
        with contextlib.suppress(JobBusy), self.locked():
            trouble = supervisor_records.read_trouble(self.path)
            if trouble and trouble.adopted_since:
                self.access_error = trouble.error
                return
            lacked_access = trouble is not None and trouble.lacks_access
            if not lacked_access and (self.is_alive or is_recent(last_change(start_marker))):
                self.access_error = ""
                return
            if time.monotonic() < self.next_access_check:
                return
            self.next_access_check = time.monotonic() + ACCESS_CHECK_SECONDS
            try:
                self.backend.check_access(ask_cloud=lacked_access)
            except ClusterError as error:
                self.access_error = "" if self.is_alive else str(error)
                if isinstance(error, JobAdopted) and self._end_supervisor():
                    supervisor_records.write_trouble(self.path, trouble_of(error))
                return
            self.access_error = ""
            if self._end_supervisor():
                supervisor_records.write_trouble(self.path, None)
                start_marker.touch()
                self.backend.launch()

    def _end_supervisor(self) -> bool:
        """End the job's supervisor, so that this process can start another. Returns whether no supervisor is left.

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
        if adoption := self.adoption:
            raise ClusterError(adoption.error)
        if self.access_error:
            raise ClusterError(f"{self.name}: no supervisor is running: {self.access_error}")

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
        """Take free machines of the hosts file that the jobs of a queue share, or GPUs of this computer.

        Raises `ClusterError` when too few machines are free.
        """
        self._change_spec(queue_state.with_free_machines(self.run))
        self._change_spec(queue_state.with_gpus(self.run))

    def _change_spec(self, spec: JobSpec) -> None:
        if spec != self.spec:
            self.run_folder.write_spec(spec)
            self.run = replace(self.run, spec=spec)
            vars(self).pop("backend", None)  # it works by the old specification

    def _refuse_if_alive(self) -> None:
        if self.is_alive:
            raise ClusterError(f"{self.name} is running; to watch it: imgnet-cluster attach {self.name}")

    def start_locked(self) -> None:
        """Start the job. The caller holds its lock. Raises `ClusterError`."""
        self._refuse_if_alive()
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

    def plan_resume(self, **options: object) -> "ResumePlan":
        """Return the plan of a resume. `options` are changed options of the launch, named with underscores.

        Sends requests to the cloud of a rented job. Raises `ClusterError` as `resume` does, and `BadInput` for wrong
        options.
        """
        from cluster.planning.resume import plan_resume  # late, because most commands plan nothing

        self._require_resumable()
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
        """Start a stopped or failed job again from its newest checkpoint, with the changes of `plan` if given.

        Raises `ClusterError` when the job is running or done, or cannot start; then its specification is unchanged.
        """
        self._require_resumable()
        if plan:
            plan.require_no_obstacle()
        earlier_spec = self.spec
        spec = plan.spec if plan else earlier_spec
        self.backend.check(spec, self.path.parent)
        with self.locked():
            self._refuse_if_alive()
            try:
                self._change_spec(spec)
                self.claim_machines()
                if spec.user_project:  # the user may have corrected it before the resume
                    copy_project(spec.user_project, self.run_folder.user_project)
                self.start_locked()
            except (ClusterError, OSError):
                self._change_spec(earlier_spec)
                raise

    def check_secrets(self, assignments: Sequence[str]) -> dict[str, str]:
        """Return the new values of secret variables that `resume --env` gives.

        Raises `BadInput` for another variable than those of the command, and `ClusterError` when a value is unknown.
        """
        names = self.spec.own_command.secrets if self.spec.own_command else ()
        values = secret_values.collect(assignments, [], os.environ)
        if unknown := sorted(values.keys() - set(names)):
            known = ", ".join(names) or "none"
            raise BadInput(f"--env {unknown[0]}: is no secret variable of {self.name}, which has {known}")
        secret_values.require(names, {**secret_values.kept_values(self.spec.uid), **values}, self.name)
        return values

    def change_secrets(self, values: Mapping[str, str]) -> None:
        """Keep new values of the command's secret variables for the next launch. Raises `ClusterError`."""
        if values:
            secret_values.keep(self.spec.uid, self.path, {**secret_values.kept_values(self.spec.uid), **values})

    def _require_resumable(self) -> None:
        self.refresh()
        if adoption := self.adoption:
            raise ClusterError(adoption.error)
        if not self.has_ended:
            raise ClusterError(f"{self.name} is running; to watch it: imgnet-cluster attach {self.name}")
        if self.state == JobState.DONE:
            raise ClusterError(f"{self.name} is done; there is nothing to resume. Run it again: {self.launch_command}")
