"""Where machines come from. A module in this folder is a backend: it has the functions of the protocol.

A backend returns as soon as there is something to talk to; waiting and following belong to jobs.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol, cast

from cluster.errors import BadInput
from cluster.state.spec import Folders, Spec


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


@dataclass(frozen=True)
class Shipped:
    """A type of machine as the program's own table has it. `on_demand` dollars an hour, None: unknown; `gone`: why
    nobody can rent it.
    """

    name: str
    gpus: int
    gpu: str
    gbit: float
    vcpus: float | None
    on_demand: float | None
    gone: str = ""


def shipped(name: str) -> Shipped | None:
    """Return what is known of a type of machine without asking anybody, None when that is nothing."""
    from infra.aws.market import instance_types

    kind = instance_types.shipped(name) or instance_types.HISTORIC.get(name)
    if kind is None:
        return None
    price = instance_types.ON_DEMAND.get(name, instance_types.HISTORIC_PRICES.get(name))
    gone = "" if name in instance_types.SHIPPED else instance_types.RETIRED.get(name, "")
    return Shipped(name, max(1, kind.gpus), kind.gpu, kind.gbit, kind.vcpus, price, gone)


@cache
def names() -> list[str]:
    """Return the names of all backends."""
    return sorted(one.name for one in iter_modules([str(Path(__file__).parent)]))


def get(name: str) -> Backend:
    """Return a backend by name. Raises `BadInput` when there is none."""
    if name not in names():
        raise BadInput(f"there is no backend {name!r}; there are {', '.join(names())}")
    return cast(Backend, import_module(f"{__name__}.{name}"))
