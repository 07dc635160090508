"""The crops by which an image is examined: what of it the network sees, and one answer where that is several squares.

    center  the middle square of the image whose short side was made MARGIN times the crop's: ordinary validation
    rect    the middle rectangle of multiples of 32 that the image's own ratio allows, at most 1.5 times as long as
            broad, so not all of the image: rectangular validation (data/shapes.py)
    five    the four corners and the middle of the same enlarged image, all squares
    tta     these five and their mirror images: the ten of Krizhevsky et al. 2012, section 4.1

Of several squares the answer is the mean of their softmaxes, as there; its corners are those of the image's middle
square, ours of all of the image. fast.ai's TTA of 2018 draws four of its crops at random: we take ten that stay the
same, so that the numbers are exact.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from train.data.index.open import Index
from train.data.loading.crop import corners, enlarged, five, rows
from train.data.loading.loader import Batch, Images, reading
from train.data.order.rect_val import plan_rectangles, plan_square, rectangle
from train.data.order.work import Work

SQUARES = 5  # of the crops that have several
SEVERAL = {"five": False, "tta": True}  # whether each square is mirrored too


@dataclass(frozen=True)
class Several(Work):
    """A batch of five squares of each image, one image's after the other's."""

    @property
    def pixels(self) -> tuple[int, int, int, int]:
        """The shape of its batch."""
        return SQUARES * len(self.ids), *self.shape, 3


class Views(Images):
    """All images of an examination; makes batches of several squares too."""

    def make(self, work: Work, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize, into `out` if given. Raises `DataError` when a file cannot be decoded any more."""
        if not isinstance(work, Several):
            return super().make(work, out)
        index = self.indexes[work.split, work.copy]
        out = torch.empty(work.pixels, dtype=torch.uint8) if out is None else out
        filled, sizes = rows(out), zip(index.heights[work.ids].tolist(), index.widths[work.ids].tolist(), strict=True)
        for place, (number, size) in enumerate(zip(work.ids.tolist(), sizes, strict=True)):
            with reading(index, number):
                five(index.read(number), size, filled[SQUARES * place : SQUARES * (place + 1)])
        return Batch(out, index.labels[work.ids], work)


def plan(crop: str, size: int, index: Index, copy: int | None, pixels: int, rank: int, world: int) -> list[Work]:
    """Return this rank's batches of a crop: every image is in one batch of one rank.

    `pixels` is about what a batch may have; they are read from a copy, and `index` is that of the full-size images.
    """
    several = crop in SEVERAL
    batch = max(1, pixels // (size * size * (SQUARES if several else 1)))
    share = (size, batch, rank, world)
    found = plan_rectangles(index.widths, index.heights, *share) if crop == "rect" else plan_square(len(index), *share)
    return [(Several if several else Work)("val", copy, ids, shape) for shape, ids in found]


def answer(crop: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return scores [n, classes] whose softmax is the mean of those of an image's squares; plain ones of one view."""
    scores: torch.Tensor = model(images).float()
    if crop not in SEVERAL:
        return scores
    found = [scores, model(images.flip(3)).float()] if SEVERAL[crop] else [scores]
    parts = [torch.log_softmax(one, 1).view(-1, SQUARES, scores.shape[1]) for one in found]
    whole = torch.cat(parts, 1)
    return torch.logsumexp(whole, 1) - math.log(whole.shape[1])


def seen(crop: str, size: int, width: int, height: int) -> list[list[float]]:
    """Return the parts of an image that a crop looks at as (top, left, height, width), each of 1."""
    shape = rectangle(width, height, size) if crop == "rect" else (size, size)
    whole = enlarged((height, width), shape)
    places = corners(whole, shape) if crop in SEVERAL else corners(whole, shape)[-1:]
    return [[top / whole[0], left / whole[1], shape[0] / whole[0], shape[1] / whole[1]] for top, left in places]
