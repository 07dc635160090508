"""From image numbers to uint8 batches, in workers that live as long as the run.

One stream serves the whole run, training and validation: a `Work` says which images, at which size, of which copy, for
which epoch, so neither a new size nor a new batch nor a new epoch restarts anything, and the next epoch's first
batches are decoded before the last epoch ends.
"""

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from train.data.decode import BadImage, Box, Size
from train.data.index.open import DataError, Index
from train.data.order.rng import random_boxes, shifted_boxes
from train.data.order.work import Key, Work
from train.tools.errors import Lost
from train.tools.filesystem import one_line
from train.tools.process import die_with_parent, keep_memory

from .batch_buffers import Ring
from .crop import centre, crop, rows


@dataclass(frozen=True)
class Batch:
    """`images` uint8 [n, height, width, 3], `labels` int64 [n], and the work they were made for."""

    images: torch.Tensor
    labels: NDArray[np.int64]
    work: Work

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for copies to a GPU that nobody waits for."""
        return Batch(self.images.pin_memory(), self.labels, self.work)


class Images:
    """All images of a run by (split, copy). Asked with a Work, it answers with a whole Batch."""

    def __init__(self, indexes: Mapping[Key, Index], seed: int) -> None:
        self.indexes, self.seed = indexes, seed

    def make(self, work: Work, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize, into `out` if given. Raises `DataError` when a file cannot be decoded any more."""
        index = self.indexes[work.split, work.copy]
        widths, heights = index.widths[work.ids], index.heights[work.ids]
        if not (widths.all() and heights.all()):
            raise DataError(f"{index.folder}: its index was written over during the run; make the set again")
        cuts: Iterable[tuple[Box, bool] | None] = repeat(None)
        if work.min_scale is not None:
            images, aspect = (self.seed, work.epoch, work.ids, widths, heights), work.shape[1] / work.shape[0]
            boxes, mirrors = (
                random_boxes(*images, work.min_scale, aspect) if work.augment else shifted_boxes(*images, aspect)
            )
            cuts = zip(map(tuple, boxes.tolist()), mirrors.tolist(), strict=True)
        out = torch.empty(work.pixels, dtype=torch.uint8) if out is None else out
        sizes = zip(heights.tolist(), widths.tolist(), strict=True)
        for number, size, cut, row in zip(work.ids.tolist(), sizes, cuts, rows(out), strict=False):
            _fill(row, index, number, size, cut)
        return Batch(out, index.labels[work.ids], work)


def _fill(row: torch.Tensor, index: Index, number: int, size: Size, cut: tuple[Box, bool] | None) -> None:
    with reading(index, number):
        data = index.read(number)
        if cut is None:
            centre(data, size, row)
        else:
            crop(data, size, *cut, row)


@contextlib.contextmanager
def reading(index: Index, number: int) -> Iterator[None]:
    """A context in which an image that cannot be read or decoded any more is a `DataError` that names it."""
    try:
        yield
    except (BadImage, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{index.where(number)}: {why}; it has changed since the index was made") from error


@dataclass(frozen=True)
class Sent:
    """A batch on its way from a worker: the place in the ring where it lies, or its pixels if it was given none."""

    ring: int
    pixels: int | NDArray[np.uint8]
    labels: NDArray[np.int64]
    work: Work

    def open(self) -> Batch:
        """Return the batch, in the trainer."""
        if isinstance(self.pixels, int):
            return Batch(Ring.numbered(self.ring).lend(self.pixels, self.work.pixels), self.labels, self.work)
        return Batch(torch.from_numpy(self.pixels), self.labels, self.work)

    def pin_memory(self) -> Batch:
        """Return it in page-locked memory; its place in the ring is free again."""
        return self.open().pin_memory()


class _Worker(Dataset[Sent | DataError]):
    """What the loader asks with a Work and a place for its batch."""

    def __init__(self, images: Images, ring: Ring) -> None:
        self.images, self.ring = images, ring

    def __getitem__(self, asked: tuple[Work, int | None]) -> Sent | DataError:
        """Return the batch, or what is wrong with a file: raised in a worker it would come wrapped in a traceback."""
        work, place = asked
        pixels = np.empty(work.pixels, np.uint8) if place is None else self.ring.pixels(place, work.pixels)
        try:
            batch = self.images.make(work, torch.from_numpy(pixels))
        except DataError as error:
            return error
        return Sent(self.ring.number, pixels if place is None else place, batch.labels, work)


def _begin_worker(parent: int, _: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    torch.set_num_threads(1)
    keep_memory()


AHEAD_BYTES = 128e6  # of batches that each worker may have ready; where two batches are more, two
RECTANGLE = 1.9  # times a square batch: what a rectangular one of validation may have (train.data.order.rect_val)


def stream(images: Images, works: Iterable[Work], workers: int, device: torch.device, largest: int) -> Iterator[Batch]:
    """Start the workers (0: none) and return what they make ahead: a Batch for each Work, in order.

    `largest` is the number of bytes of the run's largest square batch: small ones are made further ahead. Raises
    `DataError` at the batch with a file that cannot be decoded any more, and `Lost`, wherever the caller is then, when
    a worker is killed.
    """
    if not workers:
        return (batch.pin_memory() if device.type == "cuda" else batch for batch in map(images.make, works))
    ahead = int(min(16, max(2, AHEAD_BYTES // largest)))
    ring = Ring(ahead * workers + 2, int(RECTANGLE * largest))  # one more is in use, one is being asked for
    loader: DataLoader[Any] = DataLoader(
        _Worker(images, ring),
        sampler=_Once(works, ring),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_begin_worker, os.getpid()),
        multiprocessing_context="fork",
        prefetch_factor=ahead,
    )
    try:
        made = iter(loader)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the queues' semaphores are files there
            raise DataError("/dev/shm: is full; the loader's processes need 64 kB there, or say --workers 0") from error
        raise
    if threading.current_thread() is threading.main_thread():
        _OneLine.install()
    return _whole(made)


def _whole(made: Iterator[Sent | Batch | DataError]) -> Iterator[Batch]:
    while True:
        try:
            one = next(made)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _lost(error) from None
        if isinstance(one, DataError):
            try:
                raise one
            finally:
                del one  # which holds this frame, and with it the workers
        yield one.open() if isinstance(one, Sent) else one


def _lost(error: RuntimeError) -> Exception:
    """What torch says of a worker that is gone, in one line; any other error as it is."""
    if isinstance(error.__cause__, Lost):  # which was raised by the signal while torch waited
        return error.__cause__
    text = one_line(error)
    if not text.startswith("DataLoader worker"):
        return error
    if "Bus error" in text:
        return Lost("a loader process ended (Bus error): index.npy was cut while it was mapped, or cannot be read")
    return Lost(
        f"a loader process ended ({text.removeprefix('DataLoader ').split('. ')[0].rstrip('.')}): if nobody ended it, "
        "the machine ran out of memory; with fewer --workers less is needed"
    )


class _OneLine:
    """torch's answer to the signal that a child ended, which raises where the program stands, but in one line."""

    def __init__(self, answer: Callable[..., None]) -> None:
        self.answer = answer

    def __call__(self, *signal_and_frame: Any) -> None:
        try:
            self.answer(*signal_and_frame)
        except RuntimeError as error:
            raise _lost(error) from None

    @classmethod
    def install(cls) -> None:
        """Stand before the handler that torch has set, once."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, cls):
            signal.signal(signal.SIGCHLD, cls(handler))


class _Once:
    """The works and their places as a sampler: DataLoader passes each to a worker as if it were an image's number."""

    def __init__(self, works: Iterable[Work], ring: Ring) -> None:
        self.works, self.ring = works, ring

    def __iter__(self) -> Iterator[tuple[Work, int | None]]:
        return ((work, self.ring.take(work.pixels)) for work in self.works)
