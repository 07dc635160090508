"""The names of all backends, and their options: those of this project, and those that other packages register.

A package registers its backend in its pyproject.toml:

    [project.entry-points."imgnet_cluster.backends"]
    podman = "imgnet_podman:PodmanBackend"

Light: `launch --help` needs names and options of the backends, and not the backends themselves.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from cluster.errors import BadInput

from .backend_options import BackendOptions

if TYPE_CHECKING:
    from cluster.state.run_folder import Run

    from .base import Backend
    from .planner import MachinePlanner, MachineRequest

ClassT = TypeVar("ClassT")
ENTRY_POINT_GROUP = "imgnet_cluster.backends"
UNKNOWN_MACHINES = "plan"  # in place of a backend's name: a plan for machines of which nothing is known
# Named here, because on the machines of a job the project is a folder of code and is not installed.
BUILTIN_BACKENDS = {
    "local": "cluster.backends.local:LocalBackend",
    "ssh": "cluster.backends.ssh:SshBackend",
    "slurm": "cluster.backends.slurm.backend:SlurmBackend",
    "aws": "cluster.backends.aws.backend:AwsBackend",
}
BUILTIN_OPTIONS = {
    "local": "cluster.backends.backend_options:LocalOptions",
    "ssh": "cluster.backends.backend_options:SshOptions",
    "slurm": "cluster.backends.backend_options:SlurmOptions",
    "aws": "cluster.backends.aws.terms.aws_options:AwsOptions",
}


def _backends() -> dict[str, str]:
    """Return "module:name" of all backends by name. Other packages cannot replace a backend of this project."""
    from importlib.metadata import entry_points  # takes 30 ms

    others = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return {**BUILTIN_BACKENDS, **others, **BUILTIN_BACKENDS}


def backend_names() -> list[str]:
    """Return the names of all backends."""
    return list(_backends())


def backend_class(name: str) -> type["Backend"]:
    """Return the backend of this name. Raises `BadInput` when there is none, or when it cannot be used."""
    from .base import Backend

    class_path = BUILTIN_BACKENDS.get(name) or _backends().get(name)
    if class_path is None:
        raise BadInput(f"no backend {name!r}; the backends are {', '.join(backend_names())}")
    return _import(class_path, name, Backend)  # type: ignore[type-abstract]  # no object is made of it here


def open_backend(run: "Run") -> "Backend":
    """Return the backend of a run. Raises `BadInput` when it cannot be used."""
    return backend_class(run.spec.backend)(run)


def open_planner(name: str, request: "MachineRequest") -> "MachinePlanner":
    """Return the planner of a backend, or of unknown machines. Raises `ClusterError`."""
    from .planner import MachinePlanner

    planner_class = MachinePlanner if name == UNKNOWN_MACHINES else backend_class(name).planner_class
    return planner_class(request)


def _import(class_path: str, name: str, base: type[ClassT]) -> type[ClassT]:
    """Return the subclass that "module:name" names, which belongs to a backend. Raises `BadInput`."""
    module_name, _, class_name = class_path.partition(":")
    try:
        found: type[ClassT] = getattr(import_module(module_name), class_name)
        if not issubclass(found, base):
            raise TypeError(f"it is no subclass of {base.__name__}")
        if missing := getattr(found, "__abstractmethods__", ()):
            raise TypeError(f"it does not implement {', '.join(sorted(missing))}")
    except Exception as error:  # the code of another package: anything may happen
        if module_name.startswith("cluster."):
            raise
        raise BadInput(
            f"the backend {name} ({class_path}) cannot be used: {type(error).__name__}: {error}; "
            "repair or uninstall the package that registers it"
        ) from error
    return found


def options_class(name: str) -> type[BackendOptions]:
    """Return the class of the options that only this backend has. Raises `BadInput` as `backend_class` does."""
    if name in BUILTIN_OPTIONS:
        return _import(BUILTIN_OPTIONS[name], name, BackendOptions)
    return backend_class(name).options


def usable_options() -> dict[str, type[BackendOptions]]:
    """Return the option classes of all backends by name. Those that the command line cannot offer are left out."""
    return _sort_backends()[0]


def why_unusable(name: str) -> str:
    """Return why the command line does not offer a backend, "" when it does or when there is no such backend."""
    return _sort_backends()[1].get(name, "")


@cache
def _sort_backends() -> tuple[dict[str, type[BackendOptions]], dict[str, str]]:
    """Return the option classes of usable backends, and the reasons why the other backends cannot be used."""
    usable: dict[str, type[BackendOptions]] = {}
    reasons: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in backend_names():
        try:
            options = options_class(name)
            flags = [flag for option in options.launch_options() for flag in option.all_flags]
        except BadInput as error:
            reasons[name] = str(error)
            continue
        clashes = [flag for flag in flags if flag in owners]
        if clashes:
            reasons[name] = f"the backend {name} has the flag {clashes[0]}, which {owners[clashes[0]]} has too"
            continue
        if not options.choice(name):
            reasons[name] = f"the backend {name} has no option --{name}, which would choose it"
            continue
        usable[name] = options
        owners |= dict.fromkeys(flags, f"the backend {name}")
    return usable, reasons
