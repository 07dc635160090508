"""A run: one job as its files describe it. Backends and the supervisor work on it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .run_folder import RunFolder
from .spec import JobSpec


@dataclass(frozen=True)
class Run:
    """The specification of a job, its run folder, and the clock by which it is timed (seconds since 1970)."""

    spec: JobSpec
    folder: RunFolder
    clock: Callable[[], float] = time.time

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in a run folder.

        Raises `OSError` without a job.json, and `ValueError`, `TypeError`, `KeyError` or `AttributeError` for a damaged
        one.
        """
        folder = RunFolder(path)
        return cls(JobSpec.from_json(json.loads(folder.spec_path.read_text())), folder)
