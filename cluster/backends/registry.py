"""Opens backends by name."""

from cluster.errors import BadInput
from cluster.state.run_folder import Run

from .base import Backend
from .catalog import UNKNOWN_MACHINES, load_class
from .planner import MachinePlanner, MachineRequest


def backend_class(name: str) -> type[Backend]:
    """Return the backend of this name. Raises `BadInput` when there is none, or when it cannot be used."""
    found = load_class(name)
    if not issubclass(found, Backend):
        raise BadInput(f"the backend {name} ({found.__qualname__}) is no subclass of cluster.backends.base.Backend")
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise BadInput(f"the backend {name} ({found.__qualname__}) does not implement {missing}")
    return found


def open_backend(run: Run) -> Backend:
    """Return the backend of a run. Raises `BadInput` when it cannot be used."""
    return backend_class(run.spec.backend)(run)


def open_planner(name: str, request: MachineRequest) -> MachinePlanner:
    """Return the planner of a backend, or of unknown machines. Raises `ClusterError`."""
    planner_class = MachinePlanner if name == UNKNOWN_MACHINES else backend_class(name).planner_class
    return planner_class(request)
