"""What the supervisor of a rented job is doing about its machines: written to the run folder, shown by `status`."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from train.tools.filesystem import to_json_bytes, write_atomic
from train.tools.records import encode, read_record

CLOUD_ACTIVITY_FILE = "cloud.json"


@dataclass(frozen=True, kw_only=True)
class CloudActivity:
    """A step that takes long, such as renting machines."""

    doing: str  # "" when nothing takes long
    time: float  # when it was written, in seconds since 1970


def write_activity(run_path: Path, doing: str) -> None:
    """Write the present activity. A full disk must not end the job, so errors are ignored."""
    activity = CloudActivity(doing=doing, time=time.time())
    with contextlib.suppress(OSError):
        write_atomic(run_path / CLOUD_ACTIVITY_FILE, to_json_bytes(encode(activity)), durable=False)


def read_activity(run_path: Path) -> CloudActivity | None:
    """Return the last activity, None before the first. Raises `DamagedRecord`."""
    return read_record(run_path / CLOUD_ACTIVITY_FILE, CloudActivity)
