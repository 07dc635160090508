"""Finds a job's newest checkpoint on one machine and copies it to the run folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from cluster.connectors.local import Connector
from cluster.connectors.untrusted import MAX_CHECKPOINT_BYTES, ArrivalFolder, BadAnswer, checkpoint_age
from train.tools.agent_protocol import CHECKPOINT_PATTERN, CHECKPOINTS_FOLDER, RESUME_PATTERN, checkpoint_folders
from train.tools.filesystem import newest_intact_file, verify_checksum

# Below <shared>/checkpoints/<attempt>/: what the attempt saved, and what it resumed from.
CHECKPOINT_PATTERNS = (CHECKPOINT_PATTERN, RESUME_PATTERN)

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
    machine: Connector, remote_shared: str, local_shared: Path, progress: DownloadProgress
) -> Path | None:
    """Copy the newest intact checkpoint of a machine's shared folder to the local one; None if there is none.

    Raises `ClusterError` when the machine does not answer or names an impossible size, `OSError` when the local disk is
    full.
    """
    sizes = machine.list_files(f"{remote_shared}/{CHECKPOINTS_FOLDER}")
    ages = {name: age for name in sizes if (age := checkpoint_age(name))}
    local_shared.mkdir(parents=True, exist_ok=True)
    arrivals = ArrivalFolder(local_shared)
    for name in sorted(ages, key=ages.__getitem__, reverse=True):
        path, size = f"{CHECKPOINTS_FOLDER}/{name}", sizes[name]
        source, target = f"{remote_shared}/{path}", local_shared / path
        if not target.exists():
            if size > MAX_CHECKPOINT_BYTES:
                raise BadAnswer(f"has a checkpoint {name} of {size / 1e9:.0f} GB", machine.name)
            arrivals.require_space(size)
            arrivals.create(path, partial(_download, machine, source, size, progress))
        try:
            verify_checksum(target)
            return target
        except ValueError:  # damaged, or replaced by a newer checkpoint during the download
            target.unlink()
    return None


def _download(machine: Connector, source: str, size: int, progress: DownloadProgress, file: BinaryIO) -> None:
    """Write the first `size` bytes of a machine's file into a local one, fewer if the machine has fewer."""
    done = 0
    while done < size and (part := machine.read_from(source, done)):
        file.write(part[: size - done])
        done += len(part)
        progress(min(done, size), size)
