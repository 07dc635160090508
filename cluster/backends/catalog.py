"""The names of all backends, and their options: those of this project, and those that other packages register.

A package registers its backend in its pyproject.toml:

    [project.entry-points."imgnet_cluster.backends"]
    podman = "imgnet_podman:PodmanBackend"

Light: `launch --help` needs names and options of the backends, and not the backends themselves. Two parts of a cloud
are used without its backend: its object store, on the machines of a job, and its table of machine types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cluster.errors import BadInput

from .options import BackendOptions

if TYPE_CHECKING:
    from . import rentals

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
    "local": "cluster.backends.options:LocalOptions",
    "ssh": "cluster.backends.options:SshOptions",
    "slurm": "cluster.backends.slurm.options:SlurmOptions",
    "aws": "cluster.backends.aws.terms.options:AwsOptions",
}
BUILTIN_OBJECT_STORES = {"s3": "cluster.backends.aws.s3_source:S3Source"}  # by the scheme of their URLs
BUILTIN_MACHINE_TYPES = {"aws": "cluster.backends.aws.shipped_tables:find_machine_type"}
# Functions that return known names, by what `--help` calls the value of an option.
BUILTIN_NAMES = {
    "TYPE": "cluster.backends.aws.shipped_tables:machine_types",
    "REGION": "cluster.backends.aws.shipped_tables:regions",
    "ZONE": "cluster.backends.aws.shipped_tables:zones",
}
OBJECT_STORE_GROUP = "imgnet_cluster.object_stores"
MACHINE_TYPE_GROUP = "imgnet_cluster.machine_types"


@dataclass(frozen=True)
class MachineType:
    """A machine type with its hardware and its price."""

    name: str
    gpus: int  # GPUs per machine; 1 where there is none, because a process then trains on the CPUs
    gpu: str  # GPU model, such as "A100"
    network_gbps: float
    vcpus: float | None
    on_demand_price: float | None  # dollars per hour, None: unknown
    retired_reason: str = ""  # why the type can no longer be rented; "" if it can


def _with_other_packages(builtin: dict[str, str], group: str) -> dict[str, str]:
    """Add what other packages register under an entry point group. What this project has cannot be replaced."""
    from importlib.metadata import entry_points  # takes 30 ms

    return builtin | {entry.name: entry.value for entry in entry_points(group=group) if entry.name not in builtin}


def _find(builtin: dict[str, str], group: str, name: str) -> str | None:
    """Return "module:name" of what is registered under a name. Other packages are asked only when it is not ours."""
    return builtin.get(name) or _with_other_packages(builtin, group).get(name)


def backend_names() -> list[str]:
    """Return the names of all backends."""
    return list(_with_other_packages(BUILTIN_BACKENDS, ENTRY_POINT_GROUP))


def load_class(name: str) -> type:
    """Return the class of a backend. Raises `BadInput` when there is none, or when its package cannot be used."""
    class_path = _find(BUILTIN_BACKENDS, ENTRY_POINT_GROUP, name)
    if class_path is None:
        raise BadInput(f"no backend {name!r}; the backends are {', '.join(backend_names())}")
    found = _import(class_path, f"the backend {name}")
    if not isinstance(found, type):
        raise BadInput(f"the backend {name} ({class_path}) is no class")
    return found


def open_object_store(url: str) -> "rentals.ObjectStore":
    """Open a location such as s3://my-bucket/data. Raises `ClusterError`."""
    scheme = url.partition("://")[0]
    path = _find(BUILTIN_OBJECT_STORES, OBJECT_STORE_GROUP, scheme)
    if path is None:
        raise BadInput(f"{url}: not in an object store; a location looks like s3://my-bucket/data")
    store: rentals.ObjectStore = _import(path, f"the object store {scheme}://")(url)
    return store


@cache
def find_machine_type(name: str) -> MachineType | None:
    """Return a machine type from the built-in tables of all clouds, without a request; None when no table has it."""
    for cloud, path in _with_other_packages(BUILTIN_MACHINE_TYPES, MACHINE_TYPE_GROUP).items():
        found: MachineType | None = _import(path, f"the table of machine types {cloud}")(name)
        if found:
            return found
    return None


def known_names(kind: str) -> list[str]:
    """Return the names that a "TYPE", "REGION" or "ZONE" of a cloud may have, without a request."""
    return list(_import(BUILTIN_NAMES[kind], f"the names of a {kind}")())


def _import(class_path: str, what: str) -> Callable[..., Any]:
    """Return the class or function that "module:name" names.

    Raises `BadInput` when it is none, or when the code of another package cannot be imported.
    """
    module_name, _, name = class_path.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module_name), name)
    except Exception as error:  # the code of another package: anything may happen
        if module_name.startswith("cluster."):
            raise
        raise BadInput(
            f"{what} ({class_path}) cannot be imported: {type(error).__name__}: {error}; "
            "repair or uninstall the package that registers it"
        ) from error
    if not callable(found):
        raise BadInput(f"{what} ({class_path}) is no class or function")
    return found


def options_class(name: str) -> type[BackendOptions]:
    """Return the class of the options that only this backend has. Raises `BadInput` as `load_class` does."""
    found: object
    if name in BUILTIN_OPTIONS:
        found = _import(BUILTIN_OPTIONS[name], f"the backend {name}")
    else:
        found = getattr(load_class(name), "options", None)
    if not (isinstance(found, type) and issubclass(found, BackendOptions)):
        raise BadInput(f"the options of the backend {name} are no subclass of cluster.backends.options.BackendOptions")
    return found


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
        usable[name] = options
        owners |= dict.fromkeys(flags, f"the backend {name}")
    return usable, reasons
