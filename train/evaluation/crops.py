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
from train.data.loading.crop import enlarged_size, five_crop, five_crop_corners, image_views
from train.data.loading.loader import Batch, BatchDecoder, image_errors_as_data_errors
from train.data.order.rect_val import plan_rect_validation, plan_square_validation, rect_crop_shape
from train.data.order.work import BatchRequest

SQUARES_PER_IMAGE = 5  # of the crops that have several
MULTI_CROP_MIRRORED = {"five": False, "tta": True}  # whether each square is mirrored too


@dataclass(frozen=True)
class MultiCropRequest(BatchRequest):
    """A batch of five squares of each image, one image's after the other's."""

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """The shape of its batch."""
        return SQUARES_PER_IMAGE * len(self.ids), *self.shape, 3


class MultiCropDecoder(BatchDecoder):
    """All images of an examination; makes batches of several squares too."""

    def decode_batch(self, request: BatchRequest, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize, into `out` if given. Raises `DataError` when a file cannot be decoded any more."""
        if not isinstance(request, MultiCropRequest):
            return super().decode_batch(request, out)
        index = self.indexes[request.split, request.copy]
        out = torch.empty(request.batch_shape, dtype=torch.uint8) if out is None else out
        filled, sizes = (
            image_views(out),
            zip(index.heights[request.ids].tolist(), index.widths[request.ids].tolist(), strict=True),
        )
        for place, (number, size) in enumerate(zip(request.ids.tolist(), sizes, strict=True)):
            with image_errors_as_data_errors(index, number):
                five_crop(index.read(number), size, filled[SQUARES_PER_IMAGE * place : SQUARES_PER_IMAGE * (place + 1)])
        return Batch(out, index.labels[request.ids], request)


def plan_eval_batches(
    crop: str, size: int, index: Index, copy: int | None, pixel_budget: int, rank: int, world_size: int
) -> list[BatchRequest]:
    """Return this rank's batches of a crop: every image is in one batch of one rank.

    `pixels` is about what a batch may have; they are read from a copy, and `index` is that of the full-size images.
    """
    several = crop in MULTI_CROP_MIRRORED
    batch = max(1, pixel_budget // (size * size * (SQUARES_PER_IMAGE if several else 1)))
    share = (size, batch, rank, world_size)
    found = (
        plan_rect_validation(index.widths, index.heights, *share)
        if crop == "rect"
        else plan_square_validation(len(index), *share)
    )
    return [(MultiCropRequest if several else BatchRequest)("val", copy, ids, shape) for shape, ids in found]


def mean_crop_scores(crop: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return scores [n, classes] whose softmax is the mean of those of an image's squares; plain ones of one view."""
    scores: torch.Tensor = model(images).float()
    if crop not in MULTI_CROP_MIRRORED:
        return scores
    found = [scores, model(images.flip(3)).float()] if MULTI_CROP_MIRRORED[crop] else [scores]
    parts = [torch.log_softmax(one, 1).view(-1, SQUARES_PER_IMAGE, scores.shape[1]) for one in found]
    whole = torch.cat(parts, 1)
    return torch.logsumexp(whole, 1) - math.log(whole.shape[1])


def crop_boxes(crop: str, size: int, width: int, height: int) -> list[list[float]]:
    """Return the parts of an image that a crop looks at as (top, left, height, width), each of 1."""
    shape = rect_crop_shape(width, height, size) if crop == "rect" else (size, size)
    whole = enlarged_size((height, width), shape)
    places = five_crop_corners(whole, shape) if crop in MULTI_CROP_MIRRORED else five_crop_corners(whole, shape)[-1:]
    return [[top / whole[0], left / whole[1], shape[0] / whole[0], shape[1] / whole[1]] for top, left in places]
