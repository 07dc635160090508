"""The command line of imgnet-cluster, and the life of a job. From Python: `from cluster import launch, jobs`.

job = launch("recipes/quickstart.py")
job.wait()
job.scalars("accuracy/val_top1")
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import jobs
    from .jobs import launch as launch
    from .jobs import run as run

__all__ = ["jobs", "launch", "run"]


def _import_packages_of_this_project() -> None:
    """Import `infra` and `train` from beside this package, before a user's train.py on the search path is found."""
    project_root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, project_root)
    for package in ("infra", "train"):
        import_module(package)
    sys.path.remove(project_root)


_import_packages_of_this_project()


def __getattr__(name: str) -> object:
    """Import `jobs` at its first use, so that `imgnet-cluster --help` does not wait for it."""
    if name in __all__:
        module = import_module(".jobs", __name__)
        return module if name == "jobs" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
