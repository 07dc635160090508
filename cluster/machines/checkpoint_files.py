"""Finds a job's newest checkpoint on one machine and copies it to the run folder."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.connectors.local import Connector
from train.tools.agent_protocol import CHECKPOINT_PATTERN, CHECKPOINTS_FOLDER, checkpoint_folders
from train.tools.filesystem import newest_intact_file, read_with_checksum, write_atomic

# Below <shared>/checkpoints/<attempt>/: what the attempt saved, and what it resumed from.
CHECKPOINT_PATTERNS = (CHECKPOINT_PATTERN, "resume-*.pt")
CHECKPOINT_NAME = re.compile(r"(\d+)/(step|resume)-(\d+)[\w-]*\.pt")

# Called with the bytes received so far and the size of the file.
DownloadProgress = Callable[[int, int], None]


def newest_local_checkpoint(shared: Path) -> Path | None:
    """Return the newest intact checkpoint in a shared folder, from the last attempt that has one."""
    for attempt_folder in reversed(checkpoint_folders(shared)):
        for pattern in CHECKPOINT_PATTERNS:
            if checkpoint := newest_intact_file(attempt_folder, pattern):
                return checkpoint
    return None


def download_checkpoint(
    machine: Connector | Any, remote_shared: str, local_shared: Path, progress: DownloadProgress
) -> Path | None:
    """Copy the newest intact checkpoint of a machine's shared folder to the local one; None if there is none.

    Raises `ClusterError` when the machine does not answer, `OSError` when the local disk is full.
    """
    sizes = {
        name: size
        for name, size in machine.list_files(f"{remote_shared}/{CHECKPOINTS_FOLDER}").items()
        if CHECKPOINT_NAME.fullmatch(name)
    }
    for name in sorted(sizes, key=_recency, reverse=True):
        source = f"{remote_shared}/{CHECKPOINTS_FOLDER}/{name}"
        target = local_shared / CHECKPOINTS_FOLDER / name
        if not target.exists():
            data = bytearray()
            while len(data) < sizes[name] and (part := machine.read_from(source, len(data))):
                data += part
                progress(len(data), sizes[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, bytes(data))
        try:
            read_with_checksum(target)
            return target
        except ValueError:  # damaged, or replaced by a newer checkpoint during the download
            target.unlink()
    return None


def _recency(name: str) -> tuple[int, bool, int]:
    """Return a sort key that grows with time. What an attempt saved is newer than what it resumed from."""
    match = CHECKPOINT_NAME.fullmatch(name)
    assert match
    attempt, kind, step = match.groups()
    return int(attempt), kind == "step", int(step)
