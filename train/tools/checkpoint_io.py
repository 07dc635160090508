"""Checkpoints: copied in the step, written in the background, whole or not there, sealed with a checksum.

A file `step-00000123.pt` appears by a rename after it was synced to disk, so that a kill at any moment leaves the
newest complete one. Each attempt writes into a folder of its own. Reading allows tensors and plain data only.
"""

import contextlib
import io
import os
import threading
from pathlib import Path
from typing import Any

import torch

from . import filesystem

FILE_PATTERN = "step-*.pt"
KEEP_COUNT = 2  # of one attempt: the newest, and the one before it in case the disk fails


def copy_to_cpu(value: Any) -> Any:
    """Copy tensors, in whatever nest of dicts and lists, so that training may go on while they are written."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [copy_to_cpu(one) for one in value]
    return value


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write one checkpoint, also over one of the same step; keep it and the one before. Raises `OSError`."""
    # Not `publish`: an epoch's end is saved before and after its validation, and a damaged file must not stay for ever.
    path = folder / f"step-{step:08d}.pt"
    filesystem.write_with_checksum(path, lambda stream: torch.save(state, stream))
    found = sorted(folder.glob(FILE_PATTERN))
    earlier = [one for one in found if one < path]
    for one in {*found} - {
        path,
        *earlier[-(KEEP_COUNT - 1) :],
    }:  # a later step is damaged, or of a run that was given up
        one.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state, on the CPU. Raises `ValueError` when it is damaged, `OSError`."""
    state: dict[str, Any] = torch.load(
        io.BytesIO(filesystem.read_with_checksum(path)), map_location="cpu", weights_only=True
    )
    return state


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder, None when there is none."""
    return filesystem.newest_intact_file(folder, FILE_PATTERN)


def _lower_thread_priority() -> None:
    """Lower the priority of this thread, and on Linux of no other: on a CPU the step beside it took twice as long."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)


class CheckpointWriter:
    """Writes checkpoints of one attempt, one at a time, in a thread. An error is raised at the next call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread: threading.Thread | None = None
        self.error: OSError | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_writing(self) -> bool:
        """Whether a file is still being written: a slow disk must not make the steps wait."""
        return self.thread is not None and self.thread.is_alive()

    def save(self, step: int, state: dict[str, Any], urgent: bool = False) -> None:
        """Copy the state now and write it soon; at once, when it is `urgent`, else beside the steps."""
        self.wait()
        self.thread = threading.Thread(target=self._write_in_thread, args=(step, copy_to_cpu(state), urgent))
        self.thread.start()

    def _write_in_thread(self, step: int, state: dict[str, Any], urgent: bool) -> None:
        if not urgent:
            _lower_thread_priority()
        try:
            write_checkpoint(self.folder, step, state)
        except OSError as error:
            self.error = error

    def wait(self) -> None:
        """Return when nothing is being written. Raises `OSError` when the last checkpoint could not be."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.error:
            raise self.error
