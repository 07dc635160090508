"""Checkpoint files: copied within a step, written in the background, sealed with a checksum at the end.

A file `step-00000123.pt` appears by a rename, after its content was synced to disk. So a kill at any moment leaves the
newest complete checkpoint readable. Each attempt writes into its own folder. Reading accepts tensors and plain data
only. `torch.load` reads such a file as it is, without looking at the checksum.
"""

import contextlib
import io
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import sealed_files
from .agent_protocol import CHECKPOINT_PATTERN, best_weights_file, checkpoint_file, checkpoint_files
from .files import make_folder_below

KEEP_COUNT = 2  # checkpoints kept of one attempt: the newest, and the one before it in case the disk fails
State = dict[str, Any]  # Any: tensors and plain data, nested as torch.save takes them
StateWriter = Callable[[State], object]
BACKGROUND_NICENESS = 5  # added to the niceness of the writing thread
TICK_SECONDS = 0.05  # of who waits for the writing thread


def copy_to_cpu(value: Any) -> Any:  # Any: what torch.save takes
    """Return a copy of nested dicts and lists with the tensors on the CPU, so that training can go on.

    Tuples become lists, parameters become plain tensors. Other values are not copied. All tensors of a GPU are under
    way at once, into pinned memory, which torch keeps for the next checkpoint; the host waits once. Where memory cannot
    be pinned, it waits for each.
    """
    copied = _begin_copy(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    return copied


def _begin_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_pinned = value.is_cuda
        try:
            target = torch.empty_like(value, device="cpu", pin_memory=is_pinned, requires_grad=False)
        except RuntimeError:  # so much memory cannot be pinned
            is_pinned, target = False, torch.empty_like(value, device="cpu", requires_grad=False)
        return target.copy_(value.detach(), non_blocking=is_pinned)
    if isinstance(value, dict):
        return {key: _begin_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_begin_copy(item) for item in value]
    return value


def write_checkpoint(folder: Path, step: int, state: State) -> None:
    """Write the checkpoint of a step and delete all others of the folder but the one before it.

    One of the same step is replaced: an epoch's end is saved twice, and no damaged file may stay. Raises `OSError`.
    """
    path = folder / checkpoint_file(step)
    sealed_files.write_with_checksum(path, lambda stream: torch.save(state, stream))
    delete_all_but_newest(path, CHECKPOINT_PATTERN)


def delete_all_but_newest(path: Path, pattern: str) -> None:
    """Delete the checkpoints of a pattern beside one that was just written, but for it and the one before it."""
    existing = checkpoint_files(path.parent, pattern)
    earlier = [other for other in existing if other < path]
    kept = {path, *earlier[-(KEEP_COUNT - 1) :]}
    # A file of a later step is damaged, or belongs to a run that was given up.
    for obsolete in set(existing) - kept:
        obsolete.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> State:
    """Return the state in a file, on the CPU. Raises `OSError`, `ValueError` unless all is tensors and plain data."""
    payload = io.BytesIO(sealed_files.read_with_checksum(path))
    try:
        if any(entry.compress_type for entry in zipfile.ZipFile(payload).infolist()):
            raise ValueError("it is compressed, so a small file could fill the memory")
        payload.seek(0)
        state = torch.load(payload, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises errors of many types for a content that is none of its own
        reason = f"{path}: cannot be read: its checksum is right, but its content is no checkpoint"
        raise ValueError(f"{reason} ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: cannot be read: it holds a {type(state).__name__}, not the state of a run")
    return state


def link_saved(source: Path, target: Path, step: int) -> None:
    """Give what one attempt has saved at a step to another one, too, as far as there is anything."""
    for name in (best_weights_file(step), checkpoint_file(step)):  # the latter refers to the former
        with contextlib.suppress(OSError):  # it is there already, or the folder has been deleted
            os.link(source / name, target / name)


class CheckpointWriter:
    """Writes the checkpoints of a process in a background thread, one at a time.

    `folder` is the `checkpoint_folder` of its attempt. When the process goes on in place in another attempt, the thread
    goes on too, and the new folder gets what it writes. An error of the thread is raised by the next call of `save` or
    `wait` in the attempt. Who waits for the thread calls `tick` meanwhile, which may raise an error.
    """

    def __init__(self) -> None:
        self.folder = Path(os.devnull)  # until an attempt begins
        self.thread: threading.Thread | None = None
        self.error: OSError | None = None
        self.step = 0  # of what the thread writes
        self.writes_best = False
        self.tick: Callable[[], object] = lambda: None

    def begin_attempt(self, folder: Path, tick: Callable[[], object] = lambda: None) -> None:
        """Write into the folder of an attempt from now on."""
        shared = folder.parents[1]
        shared.mkdir(parents=True, exist_ok=True)
        make_folder_below(shared, folder.relative_to(shared).as_posix())
        earlier, self.folder, self.tick, self.error = self.folder, folder, tick, None
        link_saved(earlier, folder, self.step)

    def has_best(self, step: int) -> bool:
        """Whether the folder has the best weights, which are those of a step, or will have them."""
        will_have = self.is_writing and self.writes_best and self.step == step
        return will_have or (self.folder / best_weights_file(step)).exists()

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written. The trainer then skips a checkpoint: a slow disk must not delay steps."""
        return self.thread is not None and self.thread.is_alive()

    def save(self, step: int, state: State, urgent: bool = False, write_first: StateWriter | None = None) -> None:
        """Wait for the previous checkpoint, copy the state, and start to write it. Raises the `OSError` of the former.

        The writing thread has a lower priority than training, unless `urgent`: then the run waits for the file.
        `write_first` writes what the checkpoint refers to, from the same copy, before the checkpoint is there.
        """
        self.wait()
        self.step, self.writes_best = step, write_first is not None
        arguments = (self.folder, step, copy_to_cpu(state), urgent, write_first)
        self.thread = threading.Thread(target=self._write_in_thread, args=arguments)
        self.thread.start()

    def _write_in_thread(
        self, folder: Path, step: int, state: State, urgent: bool, write_first: StateWriter | None
    ) -> None:
        if not urgent:  # else, on a CPU, the training step beside this thread takes twice as long
            with contextlib.suppress(OSError):
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # of no other thread
        try:
            if write_first:
                write_first(state)
            write_checkpoint(folder, step, state)
            while folder != self.folder:  # the attempt has ended meanwhile
                earlier, folder = folder, self.folder
                link_saved(earlier, folder, step)
        except OSError as error:
            if folder == self.folder:
                self.error = error

    def wait(self) -> None:
        """Return when nothing is being written. Raises `OSError` when the last checkpoint could not be written."""
        while self.thread and self.thread.is_alive():
            self.thread.join(TICK_SECONDS)
            self.tick()
        if self.error:
            raise self.error
