"""Where machines come from. A module in this folder is a backend: it has the functions of the protocol.

A backend returns as soon as there is something to talk to; waiting and following belong to jobs.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol, cast

from cluster.backends.base import Backend
from cluster.errors import BadInput
from cluster.state.spec import Folders, Spec


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
