"""Where machines come from. A module in this folder is a backend: it has the functions of the protocol.

A backend returns as soon as there is something to talk to; waiting and following belong to jobs.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol, cast

from cluster.errors import BadInput
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec

from .base import Backend
