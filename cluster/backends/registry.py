"""Opens backends by name."""

from cluster.errors import BadInput
from cluster.state.run_folder import Run

from .base import Backend
from .catalog import UNKNOWN_MACHINES, load_class
from .planner import MachinePlanner, MachineRequest


def backend_class(name: str) -> type[Backend]:
    """Return the backend of this name. Raises `BadInput` when there is none, or when its package cannot be used."""
    found = load_class(name)
    if not issubclass(found, Backend):
        raise BadInput(f"the backend {name} ({found.__qualname__}) is no subclass of cluster.backends.base.Backend")
    return found


def open_backend(run: Run) -> Backend:
    """Return the backend of a run. Raises `BadInput`, also when an installed backend lacks a method."""
    found = backend_class(run.spec.backend)
    try:
        return found(run)
    except TypeError as error:
        if not found.__abstractmethods__:
            raise
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise BadInput(f"the backend {run.spec.backend} does not implement {missing}") from error


def open_planner(name: str, request: MachineRequest) -> MachinePlanner:
    """Return the planner of a backend, or of unknown machines. Raises `ClusterError`."""
    return MachinePlanner(request) if name == UNKNOWN_MACHINES else backend_class(name).open_planner(request)
