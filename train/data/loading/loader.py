"""The data loader: from image IDs to uint8 batches, in worker processes that live as long as the run.

One stream serves the whole run, training and validation. A `BatchRequest` names the images, the size, the copy and the
epoch. So neither a new size nor a new batch size nor a new epoch restarts the workers, and the first batches of the
next epoch are decoded before the current epoch ends. A process that goes on in place
asks the same workers for other batches.
"""

import errno
import itertools
import math
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from train.data.decode import BadImage, Box, ImageSize, Pixels
from train.data.index.open import DataError, Index
from train.data.order.rng import image_generator, random_boxes, random_position_boxes
from train.data.order.work import BatchRequest, IndexKey
from train.recipe.schema import TRIVIAL
from train.tools.errors import MachineTrouble, TrainingError, WorkerLost, one_line_error
from train.tools.process import die_with_parent, disable_malloc_trim

from .augment import OwnTransform, trivial_augment
from .crop import center_crop, crop_and_resize, five_crop, image_views

PREFETCH_BYTES_PER_WORKER = 128e6  # of batches that each worker may have ready; at least MIN_PREFETCH_BATCHES
MIN_PREFETCH_BATCHES, MAX_PREFETCH_BATCHES = 2, 16  # per worker
NICENESS_BESIDE_GPU = 5  # of the workers: there are as many as processors, and the trainer must launch kernels in time
MAX_RECTANGLE_TO_SQUARE = 1.9  # bytes of a rectangular validation batch / those of a square one (see order/rect_val.py)


@dataclass(frozen=True)
class Batch:
    """A decoded batch: `images` uint8 [n, height, width, 3], `labels` int64 [n], and the request it answers.

    `broken` has (ID, what is wrong) of each image of the request in whose place another one was taken.
    """

    images: torch.Tensor
    labels: NDArray[np.int64]
    request: BatchRequest
    broken: tuple[tuple[int, str], ...] = ()

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        labels = torch.from_numpy(self.labels).pin_memory().numpy()
        return replace(self, images=self.images.pin_memory(), labels=labels)


class BatchDecoder:
    """Decodes whole batches, from the indexes of a run by (split, copy), with the `transform` of a recipe.

    With `replaces_broken`, the next image of its class takes the place of a training image that cannot be decoded. None
    takes that of a validation image, because an accuracy counts each image once.
    """

    def __init__(
        self, indexes: Mapping[IndexKey, Index], seed: int, transform: str | None = None, replaces_broken: bool = False
    ) -> None:
        self.indexes = indexes
        self.seed = seed
        self.replaces_broken = replaces_broken
        self.transform = OwnTransform(transform) if transform else None

    def decode_batch(self, request: BatchRequest, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize the images of a request, into `out` if given.

        Raises `DataError` when a file is gone, or cannot be decoded nor replaced, `MachineTrouble` when it cannot be
        read, and `TrainingError` when the user's function fails on it.
        """
        index = self.indexes[request.split, request.copy]
        widths, heights = index.widths[request.ids], index.heights[request.ids]
        if not (widths.all() and heights.all()):
            raise DataError(f"{index.folder}: its index was overwritten during the run; create the data set again")
        crops = self._crops(request, widths, heights)
        out = torch.empty(request.batch_shape, dtype=torch.uint8) if out is None else out
        sizes = zip(heights.tolist(), widths.tolist(), strict=True)
        views = iter(image_views(out))
        broken = []
        for number, size, crop in zip(request.ids.tolist(), sizes, crops, strict=False):
            outs = list(islice(views, request.squares))
            try:
                _decode_into(outs, index, number, size, crop)
            except BadImage as error:
                broken.append((number, self._take_next(outs, request, number, str(error))))
        if request.min_scale is not None and (request.augment == TRIVIAL or (request.augment and self.transform)):
            for number, pixels in zip(request.ids.tolist(), out.numpy(), strict=True):
                self._augment(pixels, request, number)
        return Batch(out, index.labels[request.ids], request, tuple(broken))

    def _take_next(self, outs: Sequence[torch.Tensor], request: BatchRequest, number: int, reason: str) -> str:
        """Fill `outs` with the next image of the class that can be decoded, cropped by the draws of the broken one.

        So files alone decide what is trained on, on any number of processes. Returns one line about both images. Raises
        `DataError` when there is no such image.
        """
        index = self.indexes[request.split, request.copy]
        fault = f"{index.location(number)}: {reason}"
        if not (self.replaces_broken and request.split == "train"):
            raise DataError(f"{fault}; if the file has changed since it was indexed, run the command again")
        class_ids = np.flatnonzero(np.asarray(index.labels) == index.labels[number])
        for other in np.roll(class_ids, -1 - int(np.searchsorted(class_ids, number))).tolist()[:-1]:
            ids = np.array([other])
            crops = self._crops(replace(request, ids=np.array([number])), index.widths[ids], index.heights[ids])
            size = int(index.heights[other]), int(index.widths[other])
            with suppress(BadImage):
                _decode_into(outs, index, other, size, next(iter(crops)))
                return f"{fault}; {index.name(other)} takes its place"
        raise DataError(f"{fault}; no other image of its class can be decoded")

    def _augment(self, pixels: Pixels, request: BatchRequest, number: int) -> None:
        """Change a training image in place. Its draws are those of its ID and the epoch, whatever its batch is."""
        generator = image_generator(self.seed, request.epoch, number)
        if request.augment == TRIVIAL:
            pixels[:] = trivial_augment(pixels, generator)
        if self.transform:
            try:
                pixels[:] = self.transform(pixels, generator)
            except TrainingError as error:
                location = self.indexes[request.split, request.copy].location(number)
                raise TrainingError(f"{error}; the image: {location}") from error

    def _crops(
        self, request: BatchRequest, widths: NDArray[np.int64], heights: NDArray[np.int64]
    ) -> Iterable[tuple[Box, bool] | None]:
        """Return the box of each image of a training request, and whether to mirror it; of another one no boxes."""
        if request.min_scale is None:
            return repeat(None)
        image_arguments = (self.seed, request.epoch, request.ids, widths, heights)
        aspect = request.shape[1] / request.shape[0]
        if request.augment:
            boxes, mirror_flags = random_boxes(*image_arguments, request.min_scale, aspect)
        else:
            boxes, mirror_flags = random_position_boxes(*image_arguments, aspect)
        return zip(map(tuple, boxes.tolist()), mirror_flags.tolist(), strict=True)


def _read(index: Index, number: int) -> bytes:
    """Return the bytes of an image. Raises `MachineTrouble` for an error that may pass, as of a file server."""
    try:
        return index.read(number)
    except (OSError, DataError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        if cause is None or isinstance(cause, FileNotFoundError | PermissionError):
            raise
        raise MachineTrouble(f"{index.location(number)}: {cause.strerror}") from error


def _decode_into(
    outs: Sequence[torch.Tensor], index: Index, number: int, size: ImageSize, crop: tuple[Box, bool] | None
) -> None:
    """Decode an image: the given crop (box, mirror); if it is None, the center crop, or the five squares of `outs`.

    Raises `BadImage`, `DataError` when the file is gone, and `MachineTrouble` when it cannot be read.
    """
    try:
        data = _read(index, number)
        if len(outs) > 1:
            five_crop(data, size, outs)
        elif crop is None:
            center_crop(data, size, outs[0])
        else:
            crop_and_resize(data, size, *crop, outs[0])
    except OSError as error:
        raise DataError(
            f"{index.location(number)}: {error.strerror}; the file was there when it was indexed; run the command again"
        ) from error


_next_ids = itertools.count()
_buffers_by_id: "weakref.WeakValueDictionary[int, BatchBuffers]" = weakref.WeakValueDictionary()


class BatchBuffers:
    """Shared memory for batches, allocated once and reused: `slots` buffers of `slot_bytes` bytes each.

    torch's own way is new shared memory for each batch, whose pages the kernel clears, maps twice and takes back. That
    costs 40 of 240 us per image at 128 pixels, and 140 of 790 us at 224. The memory here is an anonymous mapping: it
    needs no room in /dev/shm (64 MB by default in a container), and it is freed with the processes, however they end.

    Create them before the workers are forked. Only the trainer may call `acquire` and `lend_tensor`. Pages take up
    memory only once they were used, so the slot that was freed last is acquired next.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.buffers_id = next(_next_ids)
        self.memory = mmap.mmap(-1, slots * slot_bytes)
        self.free_slots = list(range(slots))
        # The number of the first request that is still wanted. The workers see it at once.
        self.first_wanted = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        _buffers_by_id[self.buffers_id] = self

    @staticmethod
    def by_id(buffers_id: int) -> "BatchBuffers":
        """Return the buffers with this ID. Raises `KeyError` when their owner holds them no more."""
        return _buffers_by_id[buffers_id]

    def acquire(self, shape: tuple[int, ...]) -> int | None:
        """Return a free slot for a uint8 array of this shape, or None when none is free or the array does not fit."""
        return self.free_slots.pop() if self.free_slots and math.prod(shape) <= self.slot_bytes else None

    def slot_array(self, slot: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the memory of a slot as an array, for the worker to fill. Raises `ValueError` if it does not fit."""
        return np.frombuffer(self.memory, np.uint8, math.prod(shape), slot * self.slot_bytes).reshape(shape)

    def lend_tensor(self, slot: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in a slot. The slot becomes free when neither the tensor nor a view of it is referenced."""
        pixels = self.slot_array(slot, shape)
        weakref.finalize(pixels, self.free_slots.append, slot).atexit = False
        return torch.from_numpy(pixels)


@dataclass(frozen=True)
class WorkerBatch:
    """A batch on its way from a worker: the buffer slot that holds it, or its pixels if it got no slot."""

    buffers_id: int
    slot_or_pixels: int | NDArray[np.uint8]
    labels: NDArray[np.int64]
    request: BatchRequest
    broken: tuple[tuple[int, str], ...] = ()

    def to_batch(self) -> Batch:
        """Return the batch. Called in the trainer."""
        if isinstance(self.slot_or_pixels, int):
            buffers = BatchBuffers.by_id(self.buffers_id)
            images = buffers.lend_tensor(self.slot_or_pixels, self.request.batch_shape)
        else:
            images = torch.from_numpy(self.slot_or_pixels)
        return Batch(images, self.labels, self.request, self.broken)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory. Its slot is free again."""
        return self.to_batch().pin_memory()


LoadError = DataError | MachineTrouble | TrainingError


class _BatchDataset(Dataset[WorkerBatch | LoadError]):
    """The dataset that DataLoader's workers index with (number, request, slot) instead of an image ID."""

    def __init__(self, decoder: BatchDecoder, buffers: BatchBuffers) -> None:
        self.decoder = decoder
        self.buffers = buffers

    def __getitem__(self, task: tuple[int, BatchRequest, int | None]) -> WorkerBatch | LoadError:
        """Return the batch, or the error of a file: raised in a worker it would arrive inside a traceback.

        A batch that is not wanted any more is returned without its pixels.
        """
        number, request, slot = task
        if number < self.buffers.first_wanted[0]:
            no_pixels = np.empty(0, np.uint8)
            return WorkerBatch(self.buffers.buffers_id, no_pixels if slot is None else slot, request.ids[:0], request)
        shape = request.batch_shape
        pixels = np.empty(shape, np.uint8) if slot is None else self.buffers.slot_array(slot, shape)
        try:
            batch = self.decoder.decode_batch(request, torch.from_numpy(pixels))
        except (DataError, MachineTrouble, TrainingError) as error:
            return error
        slot_or_pixels = pixels if slot is None else slot
        return WorkerBatch(self.buffers.buffers_id, slot_or_pixels, batch.labels, request, batch.broken)


def _init_worker(parent_pid: int, niceness: int, _worker_id: int) -> None:
    die_with_parent()
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)
    os.nice(niceness)
    torch.set_num_threads(1)
    disable_malloc_trim()
    # Slurm sends SIGTERM to all processes of a node that it takes away: the trainer needs images until it has saved.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey_parent, args=(parent_pid,), daemon=True).start()


def _obey_parent(parent_pid: int) -> None:
    """End this process when its trainer, and nobody else, sends SIGTERM."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent_pid:
        pass
    os._exit(0)


class _Tasks:
    """What the workers are asked for, one (number, request, slot) after the other."""

    def __init__(self, requests: Iterable[BatchRequest], buffers: BatchBuffers) -> None:
        self.requests, self.buffers = iter(requests), buffers
        self.count = 0
        self.has_ended = False

    def __iter__(self) -> Iterator[tuple[int, BatchRequest, int | None]]:
        while request := next(self.requests, None):
            self.count += 1
            yield self.count - 1, request, self.buffers.acquire(request.batch_shape)
        self.has_ended = True


class BatchStream(Iterator[Batch]):
    """The batches of requests, in order, made ahead by worker processes (0: decoded in this process).

    `largest_batch_bytes` is the size of the run's largest square batch; the smaller it is, the more batches are made
    ahead. The next batch raises `DataError` when a file of it is gone or broken for good, `MachineTrouble` when one
    cannot be read, and `TrainingError` when the user's function fails on it. When a worker is killed, any statement of
    the trainer raises `WorkerLost`.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        requests: Iterable[BatchRequest],
        workers: int,
        device: torch.device,
        largest_batch_bytes: int,
    ) -> None:
        self.arguments = decoder, workers, device, largest_batch_bytes
        self.tasks: _Tasks | None = None
        self.batches: Iterator[Batch]
        self.replace_requests(requests)

    def replace_requests(self, requests: Iterable[BatchRequest]) -> None:
        """Go on with other requests, in the same workers. They leave undone what they were asked for before."""
        decoder, workers, device, _ = self.arguments
        if not workers:
            batches = map(decoder.decode_batch, requests)
            self.batches = (batch.pin_memory() for batch in batches) if device.type == "cuda" else batches
        elif self.tasks is None or self.tasks.has_ended:  # DataLoader ends its workers then
            self._start_workers(requests)
        else:
            self.tasks.requests = iter(requests)
            self.tasks.buffers.first_wanted[0] = self.tasks.count

    def __next__(self) -> Batch:
        return next(self.batches)

    def _start_workers(self, requests: Iterable[BatchRequest]) -> None:
        decoder, workers, device, largest_batch_bytes = self.arguments
        fitting_batches = PREFETCH_BYTES_PER_WORKER // largest_batch_bytes
        prefetch = int(min(MAX_PREFETCH_BATCHES, max(MIN_PREFETCH_BATCHES, fitting_batches)))
        slots = prefetch * workers + 2  # one more is in use by the trainer, and one is being requested
        self.tasks = _Tasks(requests, BatchBuffers(slots, int(MAX_RECTANGLE_TO_SQUARE * largest_batch_bytes)))
        loader: DataLoader[object] = DataLoader(
            _BatchDataset(decoder, self.tasks.buffers),
            sampler=self.tasks,  # DataLoader passes each to a worker as if it were an image ID
            batch_size=None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=partial(_init_worker, os.getpid(), NICENESS_BESIDE_GPU if device.type == "cuda" else 0),
            multiprocessing_context="fork",
            prefetch_factor=prefetch,
        )
        try:
            worker_items = iter(loader)
        except OSError as error:
            # The semaphores of the workers' queues are files in /dev/shm, which a container may lack.
            if error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS):
                raise DataError(
                    f"/dev/shm: {error.strerror}; the data-loading workers need 64 kB: make room, or pass --workers 0"
                ) from error
            raise
        if threading.current_thread() is threading.main_thread():
            _SigchldHandler.install()
        self.batches = _unwrap_batches(worker_items, self.tasks.buffers)


def _unwrap_batches(worker_items: Iterator[WorkerBatch | Batch | LoadError], buffers: BatchBuffers) -> Iterator[Batch]:
    for number in itertools.count():
        try:
            item = next(worker_items)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _worker_lost_error(error) from None
        if number < buffers.first_wanted[0]:
            if isinstance(item, WorkerBatch):
                item.to_batch()  # its slot is free again
            continue
        if isinstance(item, LoadError):
            try:
                raise item
            finally:
                del item  # the error refers to this frame, and this frame to the workers
        yield item.to_batch() if isinstance(item, WorkerBatch) else item


def _worker_lost_error(error: RuntimeError) -> Exception:
    """Return torch's error about a lost worker as a `WorkerLost` of one line; any other error unchanged."""
    if isinstance(error.__cause__, WorkerLost):  # raised by the signal handler while torch waited
        return error.__cause__
    text = one_line_error(error)
    if not text.startswith("DataLoader worker"):
        return error
    if "Bus error" in text:
        return WorkerLost(
            "a data-loading worker ended (Bus error): index.npy was truncated while it was mapped, or cannot be read"
        )
    return WorkerLost(
        f"a data-loading worker ended ({text.removeprefix('DataLoader ').split('. ')[0].rstrip('.')}): if nobody "
        "killed it, the machine ran out of memory; fewer --workers need less"
    )


class _SigchldHandler:
    """Wraps torch's SIGCHLD handler, so that a dead worker raises an error of one line."""

    def __init__(self, torch_handler: Callable[..., None]) -> None:
        self.torch_handler = torch_handler

    def __call__(self, *signal_and_frame: object) -> None:
        try:
            self.torch_handler(*signal_and_frame)
        except RuntimeError as error:
            raise _worker_lost_error(error) from None

    @classmethod
    def install(cls) -> None:
        """Wrap the handler that torch has set, once."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, cls):
            signal.signal(signal.SIGCHLD, cls(handler))
