"""Finds a backend by its name. A backend is a module with the functions of `base.Backend`."""

from importlib import import_module
from typing import cast

from cluster.errors import BadInput

from .base import Backend

MODULES = {
    "aws": "cluster.backends.aws.backend",
    "local": "cluster.backends.local",
    "ssh": "cluster.backends.ssh",
}


def backend_names() -> list[str]:
    """Return the names of all backends, sorted."""
    return sorted(MODULES)


def get_backend(name: str) -> Backend:
    """Import and return the backend of this name. Raises `BadInput` when there is none."""
    if name not in MODULES:
        raise BadInput(f"no backend {name!r}; the backends are {', '.join(backend_names())}")
    return cast(Backend, import_module(MODULES[name]))
