"""The backends by name."""

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import cast

from cluster.backends.base import Backend
from cluster.errors import BadInput


@cache
def names() -> list[str]:
    """Return the names of all backends."""
    return sorted(one.name for one in iter_modules([str(Path(__file__).parent)]))


def get(name: str) -> Backend:
    """Return a backend by name. Raises `BadInput` when there is none."""
    if name not in names():
        raise BadInput(f"there is no backend {name!r}; there are {', '.join(names())}")
    return cast(Backend, import_module(f"{__name__}.{name}"))
