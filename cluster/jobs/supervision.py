"""Keeps a supervisor at work for a job on other machines, says why there is none, and holds the job's lock."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.backends.base import Backend
from cluster.errors import ClusterError
from cluster.state import supervisor_records
from cluster.state.run_folder import JOB_LOCK, SUPERVISOR_LOCK, RunFolder, lock_holder
from cluster.state.supervisor_records import TROUBLE_FILE, SupervisorHeartbeat, SupervisorTrouble
from infra.errors import AdoptedElsewhere, NoAnswer, NoCredentials
from train.tools.files import locked
from train.tools.process import command_line
from train.tools.records import read_record

PROCESS_START_SECONDS = 20.0  # for a new agent to write its first status, for a new supervisor to take its lock
START_MARKER = ".supervised"  # in the run folder; changed whenever a command starts a supervisor
END_SECONDS = 5.0  # for a supervisor to end, after each signal
END_POLL_SECONDS = 0.05
SILENCE_SECONDS = 60.0  # after so long without a heartbeat, `status` warns that the supervisor does not answer
FROZEN_SECONDS = 300.0  # after so long without one, the supervisor is killed, and another one started
ACCESS_CHECK_SECONDS = 10.0  # between two questions to the cloud whether it accepts the credentials


class JobBusy(ClusterError):
    """Another command is changing the job."""


@contextlib.contextmanager
def job_lock(path: Path, timeout_seconds: float = 0) -> Iterator[None]:
    """Hold the lock of the job in a run folder. Raises `JobBusy` when another command still holds it at the end."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path / JOB_LOCK, timeout_seconds))
        except BlockingIOError:
            raise JobBusy(f"{path.name}: another command is changing the job; try again in a moment") from None
        yield


def is_recent(start: float) -> bool:
    """Whether a process that was started at `start` may not have taken its lock, or written its status, yet."""
    return 0 <= time.time() - start < PROCESS_START_SECONDS  # False when the clock was set back


def trouble_of(error: Exception) -> SupervisorTrouble:
    """Return the record of an error that keeps the supervisor from its work."""
    return SupervisorTrouble(
        error=str(error),
        lacks_access=isinstance(error, NoCredentials),
        adopted_since=error.since if isinstance(error, AdoptedElsewhere) else 0.0,
    )


def terminate_machines(backend: Backend) -> list[str]:
    """Terminate a job's machines for a command of the user. Returns those that did not answer.

    Raises `ClusterError` with what is left, and with what is billed meanwhile when the cloud cannot be asked.
    """
    try:
        return backend.terminate()
    except (NoCredentials, NoAnswer) as error:
        name = backend.run.spec.name
        raise ClusterError(
            f"{error}; {name} is ending: {backend.rented_now() or 'its machines are not known'}; to end it, in a "
            f"shell with credentials for the job's machines: imgnet-cluster down {backend.run.handle}"
        ) from error


class Supervision:
    """The supervisor of a job, as the commands see and start it."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.run_folder = run_folder
        self.path = run_folder.path
        self.access_error = ""  # why this process must not start the supervisor that the job needs, "" if it may
        self.next_access_check = 0.0  # monotonic seconds

    @property
    def adoption(self) -> SupervisorTrouble | None:
        """What this computer's supervisor found when another computer had adopted the job, None if none has."""
        trouble = self._trouble()
        return trouble if trouble and trouble.adopted_since else None

    def _trouble(self) -> SupervisorTrouble | None:
        has_ended = self.run_folder.result_path.exists()
        return None if has_ended else read_record(self.path / TROUBLE_FILE, SupervisorTrouble)

    def _was_started_recently(self, *other_signs: Path) -> bool:
        signs = [path.stat().st_mtime for path in (self.path / START_MARKER, *other_signs) if path.exists()]
        return is_recent(max(signs, default=0.0))

    def _heartbeat(self) -> SupervisorHeartbeat | None:
        """Return the last heartbeat of the process that holds the supervisor's lock, None without one."""
        heartbeat = supervisor_records.read_heartbeat(self.path)
        is_holder = heartbeat is not None and heartbeat.pid == lock_holder(self.path / SUPERVISOR_LOCK)
        return heartbeat if is_holder else None

    @property
    def _is_frozen(self) -> bool:
        """Whether the supervisor's process is alive, and has not written a heartbeat for long."""
        heartbeat = self._heartbeat()
        return heartbeat is not None and heartbeat.silent_seconds >= FROZEN_SECONDS

    def _describe_silence(self, backend: Backend) -> str:
        """Return a warning that the supervisor does not answer, with what to type; "" if it answers."""
        heartbeat = self._heartbeat()
        if heartbeat is None or heartbeat.silent_seconds < SILENCE_SECONDS:
            return ""
        pid = heartbeat.pid
        since = time.strftime("%H:%M %Z", time.localtime(time.time() - heartbeat.silent_seconds))
        return (
            f"the supervisor (process {pid}) does not answer since {since}; lost machines are not replaced. If it was "
            f"suspended, type: kill -CONT {pid}. After {FROZEN_SECONDS / 60:.0f} minutes of silence this replaces it: "
            f"imgnet-cluster status {backend.run.handle}"
        )

    def describe_trouble(self, backend: Backend, is_ending: bool) -> str:
        """Return what is wrong with the supervisor of an unfinished job, and the consequence; "": nothing is wrong.

        `is_ending`: the job needs no other machines, only the end of those that it has.
        """
        if silence := self._describe_silence(backend):
            return silence
        trouble = self._trouble()
        if backend.is_supervised() or not backend.is_remote:
            if trouble is None or not trouble.lacks_access:
                return trouble.error if trouble else ""
            error, lacks_access = trouble.error, True
        elif self.access_error:
            error, lacks_access = f"no supervisor is running: {self.access_error}", True
        elif trouble:
            error, lacks_access = f"no supervisor is running: {trouble.error}", trouble.lacks_access
        elif self._was_started_recently(self.run_folder.launch_path):
            return ""
        else:
            error, lacks_access = "no supervisor is running", False
        place = ", in a shell with credentials for the job's machines" if lacks_access else ""
        if is_ending:
            return f"{error}; to end its machines now, type: imgnet-cluster down {backend.run.handle}{place}"
        remedy = f"imgnet-cluster status {backend.run.handle}{place}"
        are_rented = backend.is_billed
        consequence = "nothing is rented, so lost and broken machines" if are_rented else "lost machines"
        return f"{error}; {consequence} are not replaced until you type: {remedy}"

    def require(self) -> None:
        """Raise `ClusterError` when no supervisor is at work and `ensure` could start none: nothing would change."""
        if adoption := self.adoption:
            raise ClusterError(adoption.error)
        if self.access_error:
            raise ClusterError(f"{self.path.name}: no supervisor is running: {self.access_error}")

    def ensure(self, backend: Backend) -> None:
        """Start the supervisor when none is running, for example after a reboot.

        Without credentials for the job's cloud, `access_error` gets the reason and none is started: it would do nothing
        but keep out one that has them. It is replaced when it is frozen, and when only this process has access.
        """
        with contextlib.suppress(JobBusy), job_lock(self.path):
            trouble = self._trouble()
            if trouble and trouble.adopted_since:
                self.access_error = trouble.error
                return
            lacked_access = trouble is not None and trouble.lacks_access
            is_at_work = backend.is_supervised() and not self._is_frozen
            if not lacked_access and (is_at_work or self._was_started_recently()):
                self.access_error = ""
                return
            if time.monotonic() < self.next_access_check:
                return
            self.next_access_check = time.monotonic() + ACCESS_CHECK_SECONDS
            try:
                backend.check_access(ask_cloud=lacked_access)
            except ClusterError as error:
                self.access_error = "" if backend.is_supervised() else str(error)
                if isinstance(error, AdoptedElsewhere) and self._end(backend):
                    supervisor_records.write_trouble(self.path, trouble_of(error))
                return
            self.access_error = ""
            if self._end(backend):
                supervisor_records.write_trouble(self.path, None)
                (self.path / START_MARKER).touch()
                backend.launch()

    def end_frozen(self, backend: Backend) -> None:
        """Kill the supervisor if it has been frozen for long. The backend starts another one if the job needs one."""
        if self._is_frozen:
            with contextlib.suppress(JobBusy), job_lock(self.path):
                self._end(backend)

    def ensure_end_is_told(self, backend: Backend) -> None:
        """Start the supervisor of an ended job again: the last one was killed before it told users of the end."""
        with contextlib.suppress(JobBusy, ClusterError), job_lock(self.path):
            if not backend.is_supervised() and not self._was_started_recently(self.run_folder.result_path):
                (self.path / START_MARKER).touch()
                backend.start_session()

    def _end(self, backend: Backend) -> bool:
        """End the job's supervisor, so that this process can start another. Returns whether no supervisor is left.

        One that is frozen is killed at once: were it asked to end, it would do so only when it goes on. Another program
        that holds the lock is left alone: on a shared disk, the ID may be of another computer.
        """
        for signal_number in (signal.SIGKILL,) if self._is_frozen else (signal.SIGTERM, signal.SIGKILL):
            pid = lock_holder(self.path / SUPERVISOR_LOCK)
            if pid is None or not command_line(pid).endswith(" ".join(backend.supervisor_argv()[-2:])):
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal_number)
            deadline = time.monotonic() + END_SECONDS
            while backend.is_supervised() and time.monotonic() < deadline:
                time.sleep(END_POLL_SECONDS)
        return not backend.is_supervised()
