"""The interface of a backend, the source of a job's machines."""

from pathlib import Path
from typing import Protocol

from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec


class Backend(Protocol):
    """Functions that every backend module implements. They take the job's spec and its local run folder."""

    DESCRIPTION: str  # one line
    # True if the machines are reached over ssh. Then only the supervisor talks to them, and all other commands read
    # the files that it has copied to the local run folder.
    IS_REMOTE: bool

    def check(self, spec: JobSpec, runs_folder: Path) -> None:
        """Check that the job can start here.

        Raises `ClusterError` when a program, a folder or disk space is missing, and its subclass `BadInput` when an
        option has to change.
        """

    def reserved_names(self) -> set[str]:
        """Return the job names that are in use on this computer, in any runs folder. A new job takes none of them."""

    def launch(self, spec: JobSpec, run_folder: RunFolder) -> None:
        """Start the job's agents and what they need. An agent that already runs is left alone."""

    def poll(self, spec: JobSpec, run_folder: RunFolder) -> bool:
        """Do one round of the supervisor's work: copy new files to the run folder and handle changes of the machines.

        Returns what `agents_alive` would. Raises `OSError` when the local disk is full, `ClusterError` when the job
        cannot start.
        """

    def agents_alive(self, spec: JobSpec, run_folder: RunFolder) -> bool:
        """Whether at least one agent of the job is running, as far as this computer can tell."""

    def dead_machines(self, spec: JobSpec, run_folder: RunFolder) -> list[str]:
        """Return the machines that certainly have no running agent. An unreachable machine is not among them."""

    def replace(self, spec: JobSpec, run_folder: RunFolder, name: str) -> None:
        """Start the agent of a lost machine again, or rent another machine under the same name."""

    def kill_machine(self, spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
        """Take a machine away to rehearse a failure.

        `notice_seconds` is the advance notice in seconds, as with a spot interruption; None acts like a power cut.
        Raises `ClusterError` when the machine is not there.
        """

    def terminate(self, spec: JobSpec, run_folder: RunFolder) -> list[str]:
        """End everything that belongs to the job at once. Idempotent. Returns the machines that did not answer."""

    def cost_dollars(self, spec: JobSpec, run_folder: RunFolder) -> float:
        """Return the job's cost until now, in dollars."""

    def cost_dollars_until(self, spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
        """Return the job's cost in dollars until `moment` (seconds since 1970), None when a price is unknown."""
