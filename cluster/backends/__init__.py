"""Where machines come from. A module in this folder is a backend: it has the functions of the protocol.

A backend returns as soon as there is something to talk to; waiting and following belong to jobs.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol, cast

from ..errors import BadInput
from ..machine import Machine
from ..spec import Folders, Spec


class Backend(Protocol):
    """The verbs of a backend."""

    DESCRIPTION: str

    def check(self, spec: Spec, runs: Path) -> None:
        """Raise `ClusterError` when this job cannot start here: a program, a folder or room on the disk is missing."""

    def taken(self) -> set[str]:
        """Return the job names that are in use here, also those of other folders: a new job takes none of them."""

    def launch(self, spec: Spec, folders: Folders) -> None:
        """Start the job's agent, and whatever it needs; an agent that is at work already is left alone."""

    def machines(self, spec: Spec) -> list[Machine]:
        """Return the job's machines, rank 0 first."""

    def alive(self, folders: Folders) -> bool:
        """Whether an agent is at work on the job."""

    def terminate(self, spec: Spec, folders: Folders) -> None:
        """End everything of the job at once; nothing when there is nothing."""

    def dollars(self, spec: Spec, seconds: float) -> float:
        """Return the price of so many seconds."""


def names() -> list[str]:
    """Return the names of all backends."""
    return sorted(one.name for one in iter_modules([str(Path(__file__).parent)]))


def get(name: str) -> Backend:
    """Return a backend by name. Raises `BadInput` when there is none."""
    if name not in names():
        raise BadInput(f"there is no backend {name!r}; there are {', '.join(names())}")
    return cast(Backend, import_module(f"{__name__}.{name}"))
