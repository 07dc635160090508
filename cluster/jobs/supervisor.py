"""The supervisor of a job: copies its files to the run folder, replaces lost machines, writes result and report.

`python -m cluster.jobs.supervisor RUN`. It may be killed and started again, and two of them do no harm: each
does the same step once, and no agent starts where another one runs. The job trains and recovers without it.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cluster.connectors.local import module_command
from cluster.errors import ClusterError, SetupFailed
from cluster.notifications.events import SupervisorView
from cluster.notifications.notifier import Notifier
from cluster.state import status, supervisor_records
from cluster.state.run_folder import SUPERVISOR_LOCK, Run, RunFolder
from cluster.state.states import MachineState
from cluster.state.supervisor_records import SupervisorTrouble
from train.tools import host, process_log
from train.tools.files import locked
from train.tools.process import kill_process_groups, leave_terminal, start_process
from train.tools.records import DamagedRecord

from .job import Job
from .supervision import trouble_of

logger = logging.getLogger(
    "cluster.jobs.supervisor"
)  # not `__name__`, "__main__" here: the log file takes only the project's loggers

SUPERVISOR_POLL_SECONDS = 1.0
SUPERVISOR_RETRY_SECONDS = 5.0
HEARTBEAT_SECONDS = 5.0
LOCK_TIMEOUT_SECONDS = 2.0
REPORT_LOG = "report.log"  # in the run folder: what the process that writes the report prints
REPORT_TIMEOUT_SECONDS = 90.0  # the report is a convenience; it must not delay anything
REPEATED_ERROR_LOG_SECONDS = 60.0  # an error that repeats is logged once in this time
# From the loss of a machine to its replacement. Doubled with each loss of the same machine, up to the maximum.
FIRST_REPLACEMENT_DELAY_SECONDS = 1.0
MAX_REPLACEMENT_DELAY_SECONDS = 60.0
START_ANEW = 2  # result of `supervise`: the job has other machines now, so it has to be read again

# Ctrl-C, Ctrl-\ and Ctrl-Z, which users press to leave the tmux session of the supervisor.
KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)

unlogged_hangups: list[int] = []  # changed by a signal handler, which must take no lock


@dataclass
class MachineReplacer:
    """Replaces lost machines while the others continue. The delay doubles each time a machine is lost again."""

    job: Job
    loss_counts: dict[str, int] = field(default_factory=dict)
    replacement_times: dict[str, float] = field(default_factory=dict)
    dead_machines: list[str] = field(default_factory=list)  # those that will be replaced

    def replace_due_machines(self, now: float) -> list[str]:
        """Replace the machines whose delay is over. Returns their names. `now` is in seconds of a monotonic clock."""
        replaced = []
        self.dead_machines = self.machines_to_replace()
        for name in self.dead_machines:
            if name not in self.replacement_times:
                loss_count = self.loss_counts.get(name, 0)
                delay = min(MAX_REPLACEMENT_DELAY_SECONDS, FIRST_REPLACEMENT_DELAY_SECONDS * 2**loss_count)
                self.replacement_times[name] = now + delay
                self.loss_counts[name] = loss_count + 1
            elif now >= self.replacement_times[name]:
                del self.replacement_times[name]
                self.job.backend.replace(name)
                replaced.append(name)
        return replaced

    def machines_to_replace(self) -> list[str]:
        """Return the machines that are dead and should be replaced.

        None when the job ends, all are dead or it has only one; not those that failed, were removed or still boot.
        """
        run_folder = self.job.run_folder
        statuses = status.machine_statuses(self.job.run)
        end_states = {name: each.state for name, each in statuses.items() if each.ended}
        is_ending = run_folder.stop_path.exists() or run_folder.attempts.is_finished(run_folder.launch_id)
        if is_ending or not {MachineState.DONE, MachineState.STOPPED}.isdisjoint(end_states.values()):
            return []
        dead_machines = self.job.backend.dead_machines()
        if len(dead_machines) == len(self.job.spec.machine_names):
            return []
        # While the job boots, a machine without a status may only be slow.
        return [
            name
            for name in dead_machines
            if (name in statuses or not self.job.is_booting)
            and end_states.get(name) != MachineState.FAILED
            and not run_folder.disabled_marker(name).exists()
        ]


def main() -> int:
    """Follow the job of the run folder in argv to its end. Returns 0, or 1 when the folder cannot be written."""
    path = Path(sys.argv[1])
    process_log.log_to_file(RunFolder(path).supervisor_log_path)
    for signal_number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signal_number, log_signal)
    for signal_number in KEYBOARD_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    print(f"supervisor of {path.name}: copies its files here, replaces lost machines, writes the result", flush=True)
    try:
        # With a timeout: a command may hold the lock for a moment, to see whether the supervisor is alive.
        with locked(path / SUPERVISOR_LOCK, LOCK_TIMEOUT_SECONDS), heartbeats(path):
            job = Job(path, is_supervisor=True)
            notifier = Notifier(job.run)
            exit_code = supervise(job, notifier)
    except BlockingIOError:
        print(f"{path.name}: another supervisor is running", file=sys.stderr)
        return 0
    except BaseException:  # the log must say why no supervisor is at work
        logger.exception("the supervisor ended")
        raise
    if exit_code == 0:  # without the lock, so that the job can be resumed meanwhile
        notifier.finish()
        write_job_report(Job(path))
    if exit_code == START_ANEW:
        os.execv(sys.executable, sys.orig_argv)
    return exit_code


@contextlib.contextmanager
def heartbeats(path: Path) -> Iterator[None]:
    """Write heartbeats to the run folder meanwhile, by the clock of the job's last supervisor.

    A thread writes them, because one round of the supervisor may take hours. It logs each jump of the wall clock.
    """
    if last := supervisor_records.read_heartbeat(path):
        host.steady_clock.go_on_from(last.boot_id, last.clock_offset, last.clock_jump, last.time)
    supervisor_records.write_heartbeat(path)
    is_over = threading.Event()

    def write_all() -> None:
        while not is_over.wait(HEARTBEAT_SECONDS):
            if jump := host.steady_clock.new_jump():
                logger.warning("the clock of this computer jumped by %+.0f s; the job's times go on as before", jump)
            supervisor_records.write_heartbeat(path)

    writer = threading.Thread(target=write_all, daemon=True)
    writer.start()
    try:
        yield
    finally:
        is_over.set()
        writer.join(HEARTBEAT_SECONDS)  # the disk may hang


def log_signal(signal_number: int, _: FrameType | None) -> None:
    """Log a signal, of which nothing else keeps a trace. SIGTERM ends the process as if there were no handler.

    After SIGHUP it goes on: its tmux session may end before the result is written. `supervise` logs that.
    """
    if signal_number == signal.SIGHUP:
        return unlogged_hangups.append(signal_number)
    name = signal.Signals(signal_number).name
    logger.warning("%s: the supervisor was ended by another process or a shutdown of this computer", name)
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)


def write_job_report(job: Job) -> None:
    """Write the report in a process of its own, unless IMGNET_NO_REPORT is set. Errors are logged and ignored."""
    if os.environ.get("IMGNET_NO_REPORT"):
        return
    with contextlib.suppress(OSError):
        process = start_process(module_command("cluster.report.page", str(job.path)), job.path / REPORT_LOG)
        try:
            process.wait(REPORT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            kill_process_groups([process])
            logger.warning(
                "the report took longer than %.0f s and was given up; to write it: imgnet-cluster report %s",
                REPORT_TIMEOUT_SECONDS,
                job.name,
            )


def supervise(job: Job, notifier: Notifier | None = None) -> int:
    """Follow a job to its end. Returns 0, or 1 when this process cannot follow it any longer, or `START_ANEW`.

    A supervisor ends when it has had no access to the job's cloud since its start, because it must not keep out a
    supervisor with access, and when another computer has adopted the job.
    """
    replacer = MachineReplacer(job)
    notifier = notifier or Notifier(job.run)
    last_error = ""
    last_error_time = 0.0
    has_worked = False
    spec_stamp = 0
    known_trouble: SupervisorTrouble | None = None
    supervisor_records.write_trouble(job.path, None)
    while True:
        trouble: SupervisorTrouble | None = None
        try:
            _supervise_once(job, replacer)
            last_error = ""
            has_worked = True
            if access_error := job.backend.access_error():
                trouble = SupervisorTrouble(error=access_error, lacks_access=True)
            elif replacement_error := job.backend.replacement_error():
                trouble = SupervisorTrouble(error=replacement_error)
        except (ClusterError, DamagedRecord) as error:
            trouble = trouble_of(error)
            if str(error) != last_error or time.monotonic() - last_error_time > REPEATED_ERROR_LOG_SECONDS:
                last_error = str(error)
                last_error_time = time.monotonic()
                logger.warning(last_error)
            if trouble.adopted_since or (trouble.lacks_access and not has_worked):
                supervisor_records.write_trouble(job.path, trouble)
                return 1
            if not job.backend.is_remote and not job.is_alive:
                return 1
        except Exception as error:  # a bug, here or in a library: log it and try again
            logger.exception("an unexpected error; the supervisor tries again")
            trouble = SupervisorTrouble(error=f"{type(error).__name__}: {error}")
            time.sleep(SUPERVISOR_RETRY_SECONDS)
        dollars = 0.0
        with contextlib.suppress(ClusterError, DamagedRecord):
            dollars = job.backend.job_cost().dollars if job.spec.cloud and job.spec.notify else 0.0
        dead_machines = () if job.has_ended else tuple(replacer.dead_machines)
        notifier.update(SupervisorView(dead_machines=dead_machines, dollars=dollars))
        if trouble != known_trouble and supervisor_records.write_trouble(job.path, trouble):
            known_trouble = trouble
        if job.has_ended:
            return 0
        with contextlib.suppress(OSError, DamagedRecord):
            if (stamp := job.run_folder.spec_path.stat().st_mtime_ns) != spec_stamp:
                spec_stamp = stamp
                if Run.read(job.path).spec.joining != job.spec.joining:
                    return START_ANEW  # `join` has added machines, or one of them is ready
        if unlogged_hangups:
            unlogged_hangups.clear()
            logger.info("SIGHUP: the supervisor's session was closed; the supervisor goes on")
        if not job.run_folder.spec_path.exists():  # the user deleted the run folder; the machines obey their limits
            return 1
        time.sleep(SUPERVISOR_POLL_SECONDS)


def _supervise_once(job: Job, replacer: MachineReplacer) -> None:
    try:
        job.refresh()
    except SetupFailed as error:
        return job.fail(str(error))
    for name in [] if job.has_ended else replacer.replace_due_machines(time.monotonic()):
        logger.info("machine %s was lost; a replacement was started", name)


if __name__ == "__main__":
    leave_terminal()
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A regular exit would wait for all threads, and a thread tries to reach a lost machine for 15 s.
    os._exit(exit_code)
