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

from cluster.connectors.local import python
from cluster.errors import ClusterError, SetupFailed
from cluster.state import attempts, locks, status
from train.tools.filesystem import locked
from train.tools.process import kill, start

from .job import Job

BEAT, RETRY = 1.0, 5.0
REPORT_SECONDS = 90.0  # for a report, of which a job never depends
SAY_SECONDS = 60.0  # between two times that the same is said
FIRST_WAIT = 1.0  # seconds from the loss of a machine to its replacement, doubled for each loss of the same one
LONGEST_WAIT = 60.0


class Replacer:
    """Starts lost machines again while others go on: soon, but one that keeps dying ever later."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lost: dict[str, int] = {}
        self.due: dict[str, float] = {}

    def step(self, now: float) -> list[str]:
        """Replace whom it is time for. Returns their names."""
        job, replaced = self.job, []
        for name in self.wanted():
            if name not in self.due:
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** self.lost.get(name, 0))
                self.due[name], self.lost[name] = now + wait, self.lost.get(name, 0) + 1
            elif now >= self.due[name]:
                del self.due[name]
                job.backend.replace(job.spec, job.folders, name)
                replaced.append(name)
        return replaced

    def wanted(self) -> list[str]:
        """Return the machines that are dead and should not be."""
        job = self.job
        spec, folders = job.spec, job.folders
        if len(spec.names) == 1 or (folders.shared / "stop").exists():
            return []
        words = status.words(folders, spec)
        if attempts.decided(folders.shared, folders.mark) or any(
            one.get("ended") and one["state"] in ("done", "stopped") for one in words.values()
        ):
            return []
        failed = [name for name, one in words.items() if one.get("ended") and one["state"] == "failed"]
        dead = job.backend.dead(spec, folders)
        if len(dead) == len(spec.names):
            return []
        begun = [one for one in dead if one in words or not job.booting]  # one that has not spoken yet may only be slow
        return [one for one in begun if one not in failed and not job.kept_away(one)]


def main() -> int:
    """Follow the run folder's job to its end. Returns 0, or 1 when the folder cannot be written."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the session may end before the result is written
    run = Path(sys.argv[1])
    try:
        with locked(run / locks.SUPERVISOR, 2.0):  # someone may just be asking whether we live
            code = supervise(Job(run, supervising=True))
    except BlockingIOError:
        print(f"{run.name}: another supervisor is at work", file=sys.stderr)
        return 0
    if code == 0:  # without the lock: the job may be resumed meanwhile
        report(Job(run))
    return code


def report(job: Job) -> None:
    """Write the job's report into its run folder. What goes wrong with it is written down, and passed over."""
    with contextlib.suppress(OSError):
        one = start(python("cluster.report", str(job.run)), job.run / "supervisor.log")
        try:
            one.wait(REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            kill([one])
            log(job, f"the report took longer than {REPORT_SECONDS:.0f} s; later: imgnet-cluster report {job.name}")


def supervise(job: Job) -> int:
    """Follow a job to its end. Returns 0, or 1 when that cannot be done here any more."""
    replacer, said, at = Replacer(job), "", 0.0
    while True:
        try:
            _once(job, replacer)
            said = ""
        except ClusterError as error:
            if str(error) != said or time.monotonic() - at > SAY_SECONDS:
                said, at = str(error), time.monotonic()
                log(job, said)
            if not job.backend.REMOTE and not job.alive:
                return 1
        except Exception:  # of ours, or of a library: written down, and tried again
            log(job, traceback.format_exc())
            time.sleep(RETRY)
        if job.ended:
            return 0
        if not job.folders.spec.exists():  # somebody removed the run folder; its machines end by themselves
            return 1
        time.sleep(BEAT)


def _once(job: Job, replacer: Replacer) -> None:
    try:
        job.refresh()
    except SetupFailed as error:
        return job.fail(str(error))
    for name in [] if job.ended else replacer.step(time.monotonic()):
        log(job, f"machine {name} was lost, and is started again")


def log(job: Job, text: str) -> None:
    """Say something in the window, and keep it in <run>/supervisor.log."""
    line = f"{time.strftime('%H:%M:%S')} {text.rstrip()}"
    print(line, flush=True)
    with contextlib.suppress(OSError), (job.run / "supervisor.log").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
