"""The command line `imgnet-cluster`."""

from .app import main

__all__ = ["main"]
