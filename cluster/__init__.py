"""The command line of imgnet-cluster, and the life of a job. From Python: `from cluster import launch, jobs`.

job = launch("recipes/quickstart.py")
job.wait()
job.scalars("val/top1")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import jobs
    from .jobs import launch as launch

__all__ = ["jobs", "launch"]


def __getattr__(name: str) -> Any:
    """Import `jobs` at its first use, so that `imgnet-cluster --help` does not wait for it."""
    if name in __all__:
        from importlib import import_module

        module = import_module(".jobs", __name__)
        return module if name == "jobs" else module.launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
