"""The Python interface to jobs: `from cluster import launch, jobs`, then `jobs.find("job-1")`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Job as Job
    from .store import all_jobs as all_jobs
    from .store import find as find
    from .store import runs_folder as runs_folder
    from .submit import launch as launch
    from .submit import run as run

__all__ = ["Job", "all_jobs", "find", "launch", "run", "runs_folder"]


def __getattr__(name: str) -> object:
    """Import a public name late: `python -m cluster.jobs.supervisor` must not import that module twice."""
    if name in __all__:
        return getattr(import_module(".submit", __name__), name)  # which imports all of them
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
