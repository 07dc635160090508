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

from train.data.decode import BadImage, Box, ImageSize
from train.data.index.open import DataError, Index
from train.data.order.rng import random_boxes, random_position_boxes
from train.data.order.work import BatchRequest, IndexKey
from train.tools.errors import WorkerLost
from train.tools.filesystem import one_line_error
from train.tools.process import die_with_parent, disable_malloc_trim

from .batch_buffers import BatchBuffers
from .crop import center_crop, crop_and_resize, image_views


@dataclass(frozen=True)
class Batch:
    """`images` uint8 [n, height, width, 3], `labels` int64 [n], and the work they were made for."""

    images: torch.Tensor
    labels: NDArray[np.int64]
    request: BatchRequest

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for copies to a GPU that nobody waits for."""
        return Batch(self.images.pin_memory(), self.labels, self.request)


class BatchDecoder:
    """All images of a run by (split, copy). Asked with a Work, it answers with a whole Batch."""

    def __init__(self, indexes: Mapping[IndexKey, Index], seed: int) -> None:
        self.indexes, self.seed = indexes, seed

    def decode_batch(self, request: BatchRequest, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize, into `out` if given. Raises `DataError` when a file cannot be decoded any more."""
        index = self.indexes[request.split, request.copy]
        widths, heights = index.widths[request.ids], index.heights[request.ids]
        if not (widths.all() and heights.all()):
            raise DataError(f"{index.folder}: its index was written over during the run; make the set again")
        cuts: Iterable[tuple[Box, bool] | None] = repeat(None)
        if request.min_scale is not None:
            images, aspect = (
                (self.seed, request.epoch, request.ids, widths, heights),
                request.shape[1] / request.shape[0],
            )
            boxes, mirrors = (
                random_boxes(*images, request.min_scale, aspect)
                if request.augment
                else random_position_boxes(*images, aspect)
            )
            cuts = zip(map(tuple, boxes.tolist()), mirrors.tolist(), strict=True)
        out = torch.empty(request.batch_shape, dtype=torch.uint8) if out is None else out
        sizes = zip(heights.tolist(), widths.tolist(), strict=True)
        for number, size, cut, row in zip(request.ids.tolist(), sizes, cuts, image_views(out), strict=False):
            _decode_into(row, index, number, size, cut)
        return Batch(out, index.labels[request.ids], request)


def _decode_into(
    out: torch.Tensor, index: Index, number: int, size: ImageSize, crop_box: tuple[Box, bool] | None
) -> None:
    with image_errors_as_data_errors(index, number):
        data = index.read(number)
        if crop_box is None:
            center_crop(data, size, out)
        else:
            crop_and_resize(data, size, *crop_box, out)


@contextlib.contextmanager
def image_errors_as_data_errors(index: Index, number: int) -> Iterator[None]:
    """A context in which an image that cannot be read or decoded any more is a `DataError` that names it."""
    try:
        yield
    except (BadImage, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{index.location(number)}: {why}; it has changed since the index was made") from error


@dataclass(frozen=True)
class WorkerBatch:
    """A batch on its way from a worker: the place in the ring where it lies, or its pixels if it was given none."""

    buffers_id: int
    slot_or_pixels: int | NDArray[np.uint8]
    labels: NDArray[np.int64]
    request: BatchRequest

    def to_batch(self) -> Batch:
        """Return the batch, in the trainer."""
        if isinstance(self.slot_or_pixels, int):
            return Batch(
                BatchBuffers.by_id(self.buffers_id).lend_tensor(self.slot_or_pixels, self.request.batch_shape),
                self.labels,
                self.request,
            )
        return Batch(torch.from_numpy(self.slot_or_pixels), self.labels, self.request)

    def pin_memory(self) -> Batch:
        """Return it in page-locked memory; its place in the ring is free again."""
        return self.to_batch().pin_memory()


class _BatchDataset(Dataset[WorkerBatch | DataError]):
    """What the loader asks with a Work and a place for its batch."""

    def __init__(self, decoder: BatchDecoder, buffers: BatchBuffers) -> None:
        self.decoder, self.buffers = decoder, buffers

    def __getitem__(self, request_and_slot: tuple[BatchRequest, int | None]) -> WorkerBatch | DataError:
        """Return the batch, or what is wrong with a file: raised in a worker it would come wrapped in a traceback."""
        work, place = request_and_slot
        pixels = (
            np.empty(work.batch_shape, np.uint8) if place is None else self.buffers.slot_array(place, work.batch_shape)
        )
        try:
            batch = self.decoder.decode_batch(work, torch.from_numpy(pixels))
        except DataError as error:
            return error
        return WorkerBatch(self.buffers.buffers_id, pixels if place is None else place, batch.labels, work)


def _init_worker(parent_pid: int, _worker_id: int) -> None:
    die_with_parent()
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    torch.set_num_threads(1)
    disable_malloc_trim()


PREFETCH_BYTES_PER_WORKER = 128e6  # of batches that each worker may have ready; where two batches are more, two
MAX_RECTANGLE_TO_SQUARE = (
    1.9  # times a square batch: what a rectangular one of validation may have (train.data.order.rect_val)
)


def stream_batches(
    decoder: BatchDecoder,
    requests: Iterable[BatchRequest],
    workers: int,
    device: torch.device,
    largest_batch_bytes: int,
) -> Iterator[Batch]:
    """Start the workers (0: none) and return what they make ahead: a Batch for each Work, in order.

    `largest` is the number of bytes of the run's largest square batch: small ones are made further ahead. Raises
    `DataError` at the batch with a file that cannot be decoded any more, and `Lost`, wherever the caller is then, when
    a worker is killed.
    """
    if not workers:
        return (batch.pin_memory() if device.type == "cuda" else batch for batch in map(decoder.decode_batch, requests))
    ahead = int(min(16, max(2, PREFETCH_BYTES_PER_WORKER // largest_batch_bytes)))
    ring = BatchBuffers(
        ahead * workers + 2, int(MAX_RECTANGLE_TO_SQUARE * largest_batch_bytes)
    )  # one more is in use, one is being asked for
    loader: DataLoader[Any] = DataLoader(
        _BatchDataset(decoder, ring),
        sampler=_RequestSampler(requests, ring),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_init_worker, os.getpid()),
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
        _SigchldHandler.install()
    return _unwrap_batches(made)


def _unwrap_batches(worker_items: Iterator[WorkerBatch | Batch | DataError]) -> Iterator[Batch]:
    while True:
        try:
            one = next(worker_items)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _worker_lost_error(error) from None
        if isinstance(one, DataError):
            try:
                raise one
            finally:
                del one  # which holds this frame, and with it the workers
        yield one.to_batch() if isinstance(one, WorkerBatch) else one


def _worker_lost_error(error: RuntimeError) -> Exception:
    """What torch says of a worker that is gone, in one line; any other error as it is."""
    if isinstance(error.__cause__, WorkerLost):  # which was raised by the signal while torch waited
        return error.__cause__
    text = one_line_error(error)
    if not text.startswith("DataLoader worker"):
        return error
    if "Bus error" in text:
        return WorkerLost(
            "a loader process ended (Bus error): index.npy was cut while it was mapped, or cannot be read"
        )
    return WorkerLost(
        f"a loader process ended ({text.removeprefix('DataLoader ').split('. ')[0].rstrip('.')}): if nobody ended it, "
        "the machine ran out of memory; with fewer --workers less is needed"
    )


class _SigchldHandler:
    """torch's answer to the signal that a child ended, which raises where the program stands, but in one line."""

    def __init__(self, torch_handler: Callable[..., None]) -> None:
        self.torch_handler = torch_handler

    def __call__(self, *signal_and_frame: Any) -> None:
        try:
            self.torch_handler(*signal_and_frame)
        except RuntimeError as error:
            raise _worker_lost_error(error) from None

    @classmethod
    def install(cls) -> None:
        """Stand before the handler that torch has set, once."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, cls):
            signal.signal(signal.SIGCHLD, cls(handler))


class _RequestSampler:
    """The works and their places as a sampler: DataLoader passes each to a worker as if it were an image's number."""

    def __init__(self, requests: Iterable[BatchRequest], buffers: BatchBuffers) -> None:
        self.requests, self.buffers = requests, buffers

    def __iter__(self) -> Iterator[tuple[BatchRequest, int | None]]:
        return ((work, self.buffers.acquire(work.batch_shape)) for work in self.requests)
