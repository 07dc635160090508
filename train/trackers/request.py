"""The protocol between a trainer and its tracker process: the known trackers, and the settings of the process."""

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from train.tools.files import create_once, read_file

RUN_ID_FILE = "tracker_id"  # in the folder that all attempts share
JOB_VARIABLE = "IMGNET_JOB"  # the unique name of the job whose agent started the trainer


@dataclass(frozen=True, kw_only=True)
class TrackerRequest:
    """What a tracker process logs: the rows of a file of metrics, to the run of this id, which is its name too.

    A later attempt goes on with the same run. `folder` is for what the library writes itself.
    """

    tracker: str
    run_id: str
    folder: str
    metrics: str
    settings: dict[str, int | float | str] = field(default_factory=dict)


def run_id(out: Path) -> str:
    """Return the id of the run that is trained in a folder: the same for all attempts on all machines.

    Raises `OSError`.
    """
    if job := os.environ.get(JOB_VARIABLE):
        return job
    path = out / RUN_ID_FILE
    create_once(path, f"run-{uuid4().hex[:8]}".encode())
    return read_file(path).decode()


def is_installed(tracker: str) -> bool:
    """Whether the library of a tracker is installed here."""
    return find_spec(tracker) is not None
