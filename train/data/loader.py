"""From image numbers to uint8 batches, in workers that live as long as the run.

One stream serves the whole run, training and validation: a `Work` says which images, at which size, of which copy, for
which epoch, so neither a new size nor a new batch nor a new epoch restarts anything, and the next epoch's first
batches are decoded before the last epoch ends.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from ..spawn import die_with_parent
from .decode import BadImage, Pixels, decode
from .index import DataError, Index
from .order import random_boxes
from .shapes import MARGIN

Key = tuple[str, int | None]  # split, copy


@dataclass(frozen=True)
class Work:
    """One batch to make. `shape` is (height, width) in pixels; `min_scale` None asks for the centre crop; `share` is
    how much each image counts in its step: 1, but for the fillers of a last step that is not full.
    """

    split: str
    copy: int | None
    ids: NDArray[np.int64]
    shape: tuple[int, int]
    epoch: int = 0
    min_scale: float | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Batch:
    """`images` uint8 [n, height, width, 3], `labels` int64 [n], and the work they were made for.

    Labels are numpy's: every further tensor costs a shared-memory file to open, which is half a millisecond.
    """

    images: torch.Tensor
    labels: NDArray[np.int64]
    work: Work

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for copies to a GPU that nobody waits for."""
        return Batch(self.images.pin_memory(), self.labels, self.work)


class Images(Dataset[Batch | DataError]):
    """All images of a run by (split, copy). Asked with a Work, it answers with a whole Batch."""

    def __init__(self, indexes: Mapping[Key, Index], seed: int) -> None:
        self.indexes, self.seed = indexes, seed

    def __getitem__(self, work: Work) -> Batch | DataError:
        """Return the batch, or what is wrong with a file: raised in a worker it would come wrapped in a traceback."""
        try:
            return self.make(work)
        except DataError as error:
            return error

    def make(self, work: Work) -> Batch:
        """Decode, crop and resize. Raises `DataError` when a file cannot be decoded any more."""
        index = self.indexes[work.split, work.copy]
        out = torch.empty((len(work.ids), *work.shape, 3), dtype=torch.uint8)
        pictures = [self._pixels(index, int(number)) for number in work.ids]
        if work.min_scale is None:
            for target, pixels in zip(out, pictures, strict=True):
                _centre(pixels, work.shape, target)
        else:
            heights, widths = ([p.shape[axis] for p in pictures] for axis in (0, 1))
            boxes, flips = random_boxes(self.seed, work.epoch, work.ids, widths, heights, work.min_scale)
            for target, pixels, box, flip in zip(out, pictures, boxes.tolist(), flips, strict=True):
                _crop(pixels, box, bool(flip), target)
        return Batch(out, index.labels[work.ids], work)

    def _pixels(self, index: Index, number: int) -> Pixels:
        try:
            return decode(index.read(number))
        except (BadImage, OSError) as error:
            path = index.folder / str(index.paths[number])
            raise DataError(f"{path}: {error}; it could be decoded when the index was made") from error


def _resized(pixels: Pixels, size: tuple[int, int]) -> torch.Tensor:
    """uint8 [1, 3, h, w] in channels-last memory: torch's antialiased kernel gives PIL's pixels, faster."""
    view = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if view.shape[2:] == size:
        return view
    return interpolate(view, size, mode="bilinear", antialias=True)


def _crop(pixels: Pixels, box: list[int], flip: bool, target: torch.Tensor) -> None:
    top, left, height, width = box
    part = _resized(pixels[top : top + height, left : left + width], (target.shape[0], target.shape[1]))
    part = part[0].permute(1, 2, 0)
    target.copy_(part.flip(1) if flip else part)


def _centre(pixels: Pixels, shape: tuple[int, int], target: torch.Tensor) -> None:
    """The middle of the image after its short side was made MARGIN times the crop's."""
    height, width, _ = pixels.shape
    factor = max(round(min(shape) * MARGIN) / min(height, width), shape[0] / height, shape[1] / width)
    size = max(shape[0], round(height * factor)), max(shape[1], round(width * factor))
    top, left = (size[0] - shape[0]) // 2, (size[1] - shape[1]) // 2
    whole = _resized(pixels, size)
    target.copy_(whole[0, :, top : top + shape[0], left : left + shape[1]].permute(1, 2, 0))


def _begin_worker(_: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)


LONGEST_FOLDER = 60  # characters of $TMPDIR: workers hand batches over by sockets in it, whose paths may have 107
AHEAD_BYTES = 128e6  # of batches that each worker may have ready


def stream(images: Images, works: Iterable[Work], workers: int, device: torch.device, largest: int) -> Iterator[Batch]:
    """Start the workers (0: none) and return what they make ahead: a Batch for each Work, in order.

    `largest` is the number of bytes of the run's largest batch: small ones are made further ahead. Raises `DataError`
    at the batch with a file that cannot be decoded any more.
    """
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    ahead = int(min(16, max(2, AHEAD_BYTES // largest)))
    options: dict[str, Any] = {}
    if workers:
        options = {
            "worker_init_fn": _begin_worker,
            "multiprocessing_context": "fork",
            "prefetch_factor": ahead,
        }
    loader: DataLoader[Any] = DataLoader(
        images,
        sampler=_Once(works),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        **options,
    )
    return _whole(iter(loader))


def _whole(made: Iterator[Batch | DataError]) -> Iterator[Batch]:
    for one in made:
        if isinstance(one, DataError):
            try:
                raise one
            finally:
                del one  # which holds this frame, and with it the workers
        yield one


class _Once:
    """The works as a sampler: DataLoader passes each to a worker as if it were an image's number."""

    def __init__(self, works: Iterable[Work]) -> None:
        self.works = works

    def __iter__(self) -> Iterator[Work]:
        return iter(self.works)
