"""Finds backends by name: those of this project, and those of other packages that register an entry point.

A package registers its backend in its pyproject.toml:

    [project.entry-points."imgnet_cluster.backends"]
    podman = "imgnet_podman:PodmanBackend"
"""

import contextlib
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cluster.errors import BadInput

from .aws.options import AwsOptions
from .options import BackendOptions, LocalOptions, SshOptions
from .slurm.options import SlurmOptions

if TYPE_CHECKING:
    from cluster.state.run import Run

    from .base import Backend
    from .planner import MachinePlanner, MachineRequest

UNKNOWN_MACHINES = "plan"  # in place of a backend's name: a plan for machines of which nothing is known
ENTRY_POINT_GROUP = "imgnet_cluster.backends"
# Named here too, because on the machines of a job the project is a folder of code and is not installed.
BUILTIN_BACKENDS = {
    "local": "cluster.backends.local:LocalBackend",
    "ssh": "cluster.backends.ssh:SshBackend",
    "slurm": "cluster.backends.slurm.backend:SlurmBackend",
    "aws": "cluster.backends.aws.backend:AwsBackend",
}
# Known without the backends' modules, which are slow to import: `launch --help` shows them.
BUILTIN_OPTIONS: dict[str, type[BackendOptions]] = {
    "local": LocalOptions,
    "ssh": SshOptions,
    "slurm": SlurmOptions,
    "aws": AwsOptions,
}


@cache
def _class_paths() -> dict[str, str]:
    """Return "module:class" for each backend, by name. Backends of this project cannot be replaced by others."""
    from importlib.metadata import entry_points  # takes 30 ms

    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)} | BUILTIN_BACKENDS


def backend_names() -> list[str]:
    """Return the names of all backends, sorted."""
    return sorted(_class_paths())


def backend_class(name: str) -> "type[Backend]":
    """Return the backend of this name. Raises `BadInput` when there is none, or when its package cannot be used."""
    from .base import Backend

    class_path = BUILTIN_BACKENDS.get(name) or _class_paths().get(name)
    if class_path is None:
        raise BadInput(f"no backend {name!r}; the backends are {', '.join(backend_names())}")
    module_name, _, class_name = class_path.partition(":")
    try:
        found: Any = getattr(import_module(module_name), class_name)
    except Exception as error:  # the code of another package: anything may happen
        if name in BUILTIN_BACKENDS:
            raise
        raise BadInput(
            f"the backend {name} ({class_path}) cannot be imported: {type(error).__name__}: {error}; "
            "repair or uninstall the package that registers it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BadInput(f"the backend {name} ({class_path}) is no subclass of cluster.backends.base.Backend")
    return found


def open_backend(run: "Run") -> "Backend":
    """Return the backend of a run. Raises `BadInput`, also when an installed backend lacks a method."""
    found = backend_class(run.spec.backend)
    try:
        return found(run)
    except TypeError as error:
        if not found.__abstractmethods__:
            raise
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise BadInput(f"the backend {run.spec.backend} does not implement {missing}") from error


def open_planner(name: str, request: "MachineRequest") -> "MachinePlanner":
    """Return the planner of a backend, or of unknown machines. Raises `ClusterError`."""
    from .planner import MachinePlanner

    return MachinePlanner(request) if name == UNKNOWN_MACHINES else backend_class(name).open_planner(request)


def options_class(name: str) -> type[BackendOptions]:
    """Return the class of the options that only this backend has. Raises `BadInput` as `backend_class` does."""
    return BUILTIN_OPTIONS.get(name) or backend_class(name).options


def usable_options() -> dict[str, type[BackendOptions]]:
    """Return the option classes of all backends by name. A backend that cannot be imported is left out.

    So is a backend with an option that another backend has too: one command line cannot have both.
    """
    found: dict[str, type[BackendOptions]] = dict(BUILTIN_OPTIONS)
    taken = {flag for known in found.values() for option in known.launch_options() for flag in option.all_flags}
    for name in backend_names():
        if name not in found:
            with contextlib.suppress(BadInput):
                flags = {flag for option in options_class(name).launch_options() for flag in option.all_flags}
                if not flags & taken:
                    found[name] = options_class(name)
                    taken |= flags
    return found
