"""Slurm's commands, each with a time limit. A failure is one line."""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.errors import ClusterError

PROGRAMS = ("sbatch", "squeue", "srun", "scancel", "scontrol", "sinfo")
COMMAND_TIMEOUT_SECONDS = 30.0
NO_CONFIGURATION = "Could not establish a configuration source"  # each says so where it has none
PROBE_TIMEOUT_SECONDS = 10.0  # for a node that runs a step of our job to start another one
WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED")
DROPPED_PREFIXES = ("SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")  # of variables
LIVING_STATES = (*WAITING_STATES, "RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING")


class SlurmError(ClusterError):
    """A command of Slurm failed or gave no answer."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job in Slurm's queue, or one that has ended a while ago. Times are in seconds."""

    id: str
    name: str
    state: str
    reason: str  # why it waits
    elapsed: float
    seconds_left: float | None  # None: without limit
    nodes: str  # as Slurm abbreviates them: node[0-2]

    @property
    def is_living(self) -> bool:
        """Whether it has not ended; a job that is being ended has not."""
        return self.state in LIVING_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether it has no running processes yet, or its processes are suspended."""
        return self.state in WAITING_STATES


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """A step of a running job: what one srun has started. A step on a node without power stays listed."""

    id: str
    job_id: str
    name: str
    node: str
    elapsed: float


def outer_job_variables() -> list[str]:
    """Return the variables that our jobs and Slurm's commands must not inherit.

    They are those of a Slurm job in which this process itself may run, and the options by which a user lets Slurm's
    commands show or cancel less. Those of sbatch stay: they are the user's defaults for jobs.
    """
    return [name for name in os.environ if name.startswith(DROPPED_PREFIXES) and not name.startswith("SLURM_CONF")]


def without_outer_job(argv: Sequence[str]) -> list[str]:
    """Return a command for another process to run, without the variables of a job in which this process may run."""
    unset = [word for name in outer_job_variables() for word in ("-u", name)]
    return ["env", *unset, *argv] if unset else [*argv]


def run(*argv: str, input: str = "", timeout: float = COMMAND_TIMEOUT_SECONDS) -> str:
    """Run a command of Slurm to its end and return what it prints. Raises `SlurmError`."""
    dropped = outer_job_variables()
    try:
        completed = subprocess.run(
            argv,
            input=input,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={name: value for name, value in os.environ.items() if name not in dropped},
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{argv[0]}: no answer in {timeout:.0f} s") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]}: {error.strerror}; run this on a login node of the Slurm cluster") from error
    if completed.returncode:
        reason = " ".join((completed.stderr or completed.stdout).split()) or f"ended with code {completed.returncode}"
        if NO_CONFIGURATION in reason:
            raise SlurmError(f"{argv[0]} knows no cluster here; run this on a login node of the Slurm cluster")
        raise SlurmError(f"{argv[0]}: {reason.removeprefix(f'{argv[0]}: error: ')}")
    return completed.stdout


def find_jobs(names: Sequence[str]) -> list[SlurmJob]:
    """Return this user's jobs of these names that Slurm remembers, the oldest first."""
    fields = "%i|%j|%T|%r|%M|%L|%N"
    wanted = ("--all", "--me", "--states=all", f"--name={','.join(names)}")  # --all: also of hidden partitions
    output = run("squeue", "--noheader", *wanted, f"--format={fields}")
    jobs = [
        SlurmJob(
            id=job_id,
            name=name,
            state=state,
            reason=reason,
            elapsed=parse_seconds(elapsed) or 0.0,
            seconds_left=parse_seconds(left),
            nodes=nodes,
        )
        for job_id, name, state, reason, elapsed, left, nodes in _split_lines(output, 7)
    ]
    return sorted(jobs, key=lambda job: int(job.id))


def _split_lines(output: str, count: int) -> list[list[str]]:
    return [line.strip().split("|", count - 1) for line in output.splitlines()]


def find_steps(job_ids: Iterable[str]) -> list[SlurmStep]:
    """Return the steps of running jobs."""
    output = run("squeue", "--noheader", "--all", "--steps", f"--jobs={','.join(job_ids)}", "--format=%i|%j|%N|%M")
    return [
        SlurmStep(id=id, job_id=id.partition(".")[0], name=name, node=node, elapsed=parse_seconds(elapsed) or 0.0)
        for id, name, node, elapsed in _split_lines(output, 4)
    ]


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a time such as 1-02:03:04 or 3:04; None for UNLIMITED and other words."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not (all(part.isdigit() for part in parts) and (days.isdigit() or not days)):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)


def submit(argv: Sequence[str], script: str) -> str:
    """Submit a batch script and return the id of its job."""
    return run("sbatch", "--parsable", *argv, input=script).strip().partition(";")[0]


def step_argv(job_id: str, node: str) -> list[str]:
    """Return the beginning of a command that starts a process on a node of a job, beside those that run there."""
    return ["srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]


def does_node_answer(job_id: str, node: str) -> bool:
    """Whether a node of a job starts a step. A node without power stays in its job for minutes."""
    probe = [*step_argv(job_id, node), "--quiet", "--job-name=probe", "--input=none", "true"]
    with contextlib.suppress(SlurmError):
        run(*probe, timeout=PROBE_TIMEOUT_SECONDS)
        return True
    return False


def kill_step(step_id: str) -> None:
    """Kill all processes of a step."""
    run("scancel", "--signal=KILL", step_id)


def cancel(job_ids: Sequence[str]) -> None:
    """End jobs at once. Jobs that have ended are no error."""
    with contextlib.suppress(SlurmError):  # one of them has just ended, or has not started
        run("scancel", "--quiet", "--full", "--signal=KILL", *job_ids)
    run("scancel", "--quiet", *job_ids)
