"""Checkpoint files of a job on one machine: find the newest and copy it home."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.connectors.local import Connector
from train.tools.filesystem import newest_intact_file, read_with_checksum, write_atomic

if TYPE_CHECKING:
    pass


CHECKPOINT_PATTERNS = ("step-*.pt", "resume-*.pt")  # what an attempt saved, and what it began with


CHECKPOINT_NAME = re.compile(r"(\d+)/(step|resume)-(\d+)[\w-]*\.pt")


DownloadProgress = Callable[[int, int], None]


def newest_local_checkpoint(shared: Path) -> Path | None:
    """Return the newest whole checkpoint in a shared folder: the last attempt's that has any."""
    for attempt in sorted((shared / "checkpoints").glob("[0-9]*"), reverse=True):
        for pattern in CHECKPOINT_PATTERNS:
            if found := newest_intact_file(attempt, pattern):
                return found
    return None


def download_checkpoint(
    machine: Connector | Any, remote_shared: str, local_shared: Path, progress: DownloadProgress
) -> Path | None:
    """Bring the newest whole checkpoint of a machine's `shared` folder to that at `home`; None: there is none.

    Raises `ClusterError` when the machine does not answer, `OSError` when the disk here is full.
    """
    there = {
        name: size
        for name, size in machine.list_files(f"{remote_shared}/checkpoints").items()
        if CHECKPOINT_NAME.fullmatch(name)
    }
    for name in sorted(there, key=_recency, reverse=True):
        target, data = local_shared / "checkpoints" / name, bytearray()
        if not target.exists():
            while len(data) < there[name] and (
                part := machine.read_from(f"{remote_shared}/checkpoints/{name}", len(data))
            ):
                data += part
                progress(len(data), there[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, bytes(data))
        try:
            read_with_checksum(target)
            return target
        except ValueError:  # damaged, or replaced by a newer one meanwhile
            target.unlink()
    return None


def _recency(name: str) -> tuple[int, bool, int]:
    """The later, the larger: what an attempt saved is newer than what it began with."""
    found = CHECKPOINT_NAME.fullmatch(name)
    assert found
    return int(found[1]), found[2] == "step", int(found[3])
