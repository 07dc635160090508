"""The interface of a backend: where machines come from."""

from pathlib import Path
from typing import Protocol

from cluster.state.run_folder import Folders
from cluster.state.spec import Spec


class Backend(Protocol):
    """The verbs of a backend."""

    DESCRIPTION: str
    REMOTE: bool  # only the supervisor talks to the machines; everybody else looks at what is home

    def check(self, spec: Spec, runs: Path) -> None:
        """Raise `ClusterError` when this job cannot start here: a program, a folder or room on the disk is missing."""

    def taken(self) -> set[str]:
        """Return the job names that are in use here, also those of other folders: a new job takes none of them."""

    def launch(self, spec: Spec, folders: Folders) -> None:
        """Start the job's agent, and whatever it needs; an agent that is at work already is left alone."""

    def step(self, spec: Spec, folders: Folders) -> bool:
        """Bring home what is new, and do what else a supervisor does all the time. Returns what `alive` would.

        Raises `OSError` when the disk here is full, `ClusterError` when the job cannot start.
        """

    def alive(self, spec: Spec, folders: Folders) -> bool:
        """Whether an agent is at work on the job."""

    def dead(self, spec: Spec, folders: Folders) -> list[str]:
        """Return the machines that certainly have no agent at work; one that cannot be reached is not among them."""

    def replace(self, spec: Spec, folders: Folders, name: str) -> None:
        """Start the agent of a machine that was lost, or of another in its place."""

    def lose(self, spec: Spec, folders: Folders, name: str, notice: float | None) -> None:
        """Take a machine away, for rehearsal: as if its power was cut, or with so many seconds of notice."""

    def terminate(self, spec: Spec, folders: Folders) -> list[str]:
        """End everything of the job at once; nothing when there is nothing. Returns machines that did not answer."""

    def dollars(self, spec: Spec, folders: Folders) -> float:
        """Return what the job has cost until now."""

    def dollars_until(self, spec: Spec, folders: Folders, moment: float) -> float | None:
        """Return what the job had cost at a moment; None when nobody knows what its machines cost."""
