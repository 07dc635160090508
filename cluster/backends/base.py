"""The interface of a backend: where machines come from."""

from pathlib import Path
from typing import Protocol

from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec


class Backend(Protocol):
    """The verbs of a backend."""

    DESCRIPTION: str
    IS_REMOTE: bool  # only the supervisor talks to the machines; everybody else looks at what is home

    def check(self, spec: JobSpec, runs_folder: Path) -> None:
        """Raise `ClusterError` when this job cannot start here: a program, a folder or room on the disk is missing."""

    def reserved_names(self) -> set[str]:
        """Return the job names that are in use here, also those of other folders: a new job takes none of them."""

    def launch(self, spec: JobSpec, run_folder: RunFolder) -> None:
        """Start the job's agent, and whatever it needs; an agent that is at work already is left alone."""

    def poll(self, spec: JobSpec, run_folder: RunFolder) -> bool:
        """Bring home what is new, and do what else a supervisor does all the time. Returns what `alive` would.

        Raises `OSError` when the disk here is full, `ClusterError` when the job cannot start.
        """

    def agents_alive(self, spec: JobSpec, run_folder: RunFolder) -> bool:
        """Whether an agent is at work on the job."""

    def dead_machines(self, spec: JobSpec, run_folder: RunFolder) -> list[str]:
        """Return the machines that certainly have no agent at work; one that cannot be reached is not among them."""

    def replace(self, spec: JobSpec, run_folder: RunFolder, name: str) -> None:
        """Start the agent of a machine that was lost, or of another in its place."""

    def kill_machine(self, spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
        """Take a machine away, for rehearsal: as if its power was cut, or with so many seconds of notice."""

    def terminate(self, spec: JobSpec, run_folder: RunFolder) -> list[str]:
        """End everything of the job at once; nothing when there is nothing. Returns machines that did not answer."""

    def cost_dollars(self, spec: JobSpec, run_folder: RunFolder) -> float:
        """Return what the job has cost until now."""

    def cost_dollars_until(self, spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
        """Return what the job had cost at a moment; None when nobody knows what its machines cost."""
