"""The command `imgnet-cluster`, in a module of its own, whose name no file of a user has by chance.

PYTHONPATH precedes this project on the search path: with PYTHONPATH=. a user's cluster.py would be imported instead of
the package `cluster`. So the package is imported from beside this file; it does the same for the other packages.
"""

import sys
from pathlib import Path


def main() -> None:
    """Run the command line and exit."""
    project_root = str(Path(__file__).resolve().parent)
    sys.path.insert(0, project_root)
    from cluster.cli import main as run_command_line

    sys.path.remove(project_root)  # what is imported stays imported
    run_command_line()
