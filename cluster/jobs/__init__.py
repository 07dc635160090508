"""The Python interface to jobs: `from cluster import launch, jobs`, then `jobs.find("job-1")`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import Job as Job
    from .store import all_jobs as all_jobs
    from .store import find as find
    from .store import runs_folder as runs_folder
    from .submit import launch as launch

MODULES = {"Job": "job", "all_jobs": "store", "find": "store", "launch": "submit", "runs": "store"}
__all__ = ["Job", "all_jobs", "find", "launch", "runs_folder"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that a submodule run by `python -m` is not imported twice."""
    if name in MODULES:
        return getattr(import_module(f".{MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
