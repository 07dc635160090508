"""Beside a job: brings its files home, replaces lost machines, writes its result and its report.

`python -m cluster.jobs.supervisor RUN`.

It may be killed and started again at any time, and two of them do no harm: every command that looks at the job does the
same step once, and an agent that is at work lets no second one in. The job needs it for neither progress nor recovery.
"""

import contextlib
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from cluster.connectors.local import module_command
from cluster.errors import ClusterError, SetupFailed
from cluster.state import attempts, locks, status
from train.tools.filesystem import locked
from train.tools.process import kill_process_groups, start_process

from .job import Job

SUPERVISOR_POLL_SECONDS, SUPERVISOR_RETRY_SECONDS = 1.0, 5.0
REPORT_TIMEOUT_SECONDS = 90.0  # for a report, of which a job never depends
REPEATED_ERROR_LOG_SECONDS = 60.0  # between two times that the same is said
FIRST_REPLACEMENT_DELAY_SECONDS = (
    1.0  # seconds from the loss of a machine to its replacement, doubled for each loss of the same one
)
MAX_REPLACEMENT_DELAY_SECONDS = 60.0


class MachineReplacer:
    """Starts lost machines again while others go on: soon, but one that keeps dying ever later."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loss_counts: dict[str, int] = {}
        self.replacement_times: dict[str, float] = {}

    def replace_due_machines(self, now: float) -> list[str]:
        """Replace whom it is time for. Returns their names."""
        job, replaced = self.job, []
        for name in self.machines_to_replace():
            if name not in self.replacement_times:
                wait = min(
                    MAX_REPLACEMENT_DELAY_SECONDS, FIRST_REPLACEMENT_DELAY_SECONDS * 2 ** self.loss_counts.get(name, 0)
                )
                self.replacement_times[name], self.loss_counts[name] = now + wait, self.loss_counts.get(name, 0) + 1
            elif now >= self.replacement_times[name]:
                del self.replacement_times[name]
                job.backend.replace(job.spec, job.run_folder, name)
                replaced.append(name)
        return replaced

    def machines_to_replace(self) -> list[str]:
        """Return the machines that are dead and should not be."""
        job = self.job
        spec, folders = job.spec, job.run_folder
        if len(spec.machine_names) == 1 or (folders.shared / "stop").exists():
            return []
        words = status.machine_statuses(folders, spec)
        if attempts.is_finished(folders.shared, folders.launch_id) or any(
            one.get("ended") and one["state"] in ("done", "stopped") for one in words.values()
        ):
            return []
        failed = [name for name, one in words.items() if one.get("ended") and one["state"] == "failed"]
        dead = job.backend.dead_machines(spec, folders)
        if len(dead) == len(spec.machine_names):
            return []
        begun = [
            one for one in dead if one in words or not job.is_booting
        ]  # one that has not spoken yet may only be slow
        return [one for one in begun if one not in failed and not job.is_disabled(one)]


def main() -> int:
    """Follow the run folder's job to its end. Returns 0, or 1 when the folder cannot be written."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the session may end before the result is written
    run = Path(sys.argv[1])
    try:
        with locked(run / locks.SUPERVISOR_LOCK, 2.0):  # someone may just be asking whether we live
            code = supervise(Job(run, is_supervisor=True))
    except BlockingIOError:
        print(f"{run.name}: another supervisor is at work", file=sys.stderr)
        return 0
    if code == 0:  # without the lock: the job may be resumed meanwhile
        write_job_report(Job(run))
    return code


def write_job_report(job: Job) -> None:
    """Write the job's report into its run folder. What goes wrong with it is written down, and passed over."""
    with contextlib.suppress(OSError):
        one = start_process(module_command("cluster.report", str(job.path)), job.path / "supervisor.log")
        try:
            one.wait(REPORT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            kill_process_groups([one])
            log_message(
                job,
                f"the report took longer than {REPORT_TIMEOUT_SECONDS:.0f} s; later: imgnet-cluster report {job.name}",
            )


def supervise(job: Job) -> int:
    """Follow a job to its end. Returns 0, or 1 when that cannot be done here any more."""
    replacer, said, at = MachineReplacer(job), "", 0.0
    while True:
        try:
            _supervise_once(job, replacer)
            said = ""
        except ClusterError as error:
            if str(error) != said or time.monotonic() - at > REPEATED_ERROR_LOG_SECONDS:
                said, at = str(error), time.monotonic()
                log_message(job, said)
            if not job.backend.IS_REMOTE and not job.is_alive:
                return 1
        except Exception:  # of ours, or of a library: written down, and tried again
            log_message(job, traceback.format_exc())
            time.sleep(SUPERVISOR_RETRY_SECONDS)
        if job.has_ended:
            return 0
        if not job.run_folder.spec_path.exists():  # somebody removed the run folder; its machines end by themselves
            return 1
        time.sleep(SUPERVISOR_POLL_SECONDS)


def _supervise_once(job: Job, replacer: MachineReplacer) -> None:
    try:
        job.refresh()
    except SetupFailed as error:
        return job.fail(str(error))
    for name in [] if job.has_ended else replacer.replace_due_machines(time.monotonic()):
        log_message(job, f"machine {name} was lost, and is started again")


def log_message(job: Job, text: str) -> None:
    """Say something in the window, and keep it in <run>/supervisor.log."""
    line = f"{time.strftime('%H:%M:%S')} {text.rstrip()}"
    print(line, flush=True)
    with contextlib.suppress(OSError), (job.path / "supervisor.log").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
