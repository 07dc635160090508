"""The crops of an evaluation: which part of an image the network sees, and one prediction from several squares.

    center  the center square of the image, resized so that its short side is RESIZE_TO_CROP_RATIO times the crop's:
            ordinary validation
    rect    the center rectangle whose sides are multiples of 32 and whose aspect ratio is nearly the image's, at most
            1.5 to 1, so it may leave out a part of the image: rectangular validation (data/order/rect_val.py)
    five    the four corners and the center of the same resized image, all squares
    tta     these five and their mirror images: the ten views of Krizhevsky et al. 2012, section 4.1

The prediction from several squares is the mean of their softmaxes, as in that paper. Its corners are those of the
image's center square, here they are those of the whole image. fast.ai's TTA of 2018 draws four of its crops at random;
here they are fixed, so that the results are exact.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from train.data.index.open import Index
from train.data.loading.crop import five_crop, five_crop_corners, image_views
from train.data.loading.loader import Batch, BatchDecoder, image_errors_as_data_errors
from train.data.order.center_crop import resized_size
from train.data.order.rect_val import plan_rect_validation, plan_square_validation, rect_crop_shape
from train.data.order.work import BatchRequest

SQUARES_PER_IMAGE = 5  # of the crops in MULTI_CROP_MIRRORED
MULTI_CROP_MIRRORED = {"five": False, "tta": True}  # crops of several squares; whether each is mirrored too


@dataclass(frozen=True)
class MultiCropRequest(BatchRequest):
    """A request for a batch of five squares of each image, image by image."""

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """Shape of the batch: [5 images, height, width, 3]."""
        return SQUARES_PER_IMAGE * len(self.ids), *self.shape, 3


class MultiCropDecoder(BatchDecoder):
    """A decoder that answers `MultiCropRequest` too."""

    def decode_batch(self, request: BatchRequest, out: torch.Tensor | None = None) -> Batch:
        """Decode, crop and resize a batch, into `out` if given.

        Raises `DataError` when a file can no longer be decoded.
        """
        if not isinstance(request, MultiCropRequest):
            return super().decode_batch(request, out)
        index = self.indexes[request.split, request.copy]
        out = torch.empty(request.batch_shape, dtype=torch.uint8) if out is None else out
        views = image_views(out)
        heights, widths = index.heights[request.ids].tolist(), index.widths[request.ids].tolist()
        for position, (image_id, height, width) in enumerate(zip(request.ids.tolist(), heights, widths, strict=True)):
            squares = views[SQUARES_PER_IMAGE * position : SQUARES_PER_IMAGE * (position + 1)]
            with image_errors_as_data_errors(index, image_id):
                five_crop(index.read(image_id), (height, width), squares)
        return Batch(out, index.labels[request.ids], request)


def plan_eval_batches(
    crop: str, size: int, index: Index, copy: int | None, pixel_budget: int, rank: int, world_size: int
) -> list[BatchRequest]:
    """Return this rank's batches of a crop. Every image is in exactly one batch of one rank.

    `index` is that of the full-size images; `copy` is the resized copy that the images are read from. A batch has about
    `pixel_budget` pixels, and at least one image.
    """
    is_multi_crop = crop in MULTI_CROP_MIRRORED
    pixels_per_image = size * size * (SQUARES_PER_IMAGE if is_multi_crop else 1)
    batch_size = max(1, pixel_budget // pixels_per_image)
    if crop == "rect":
        plan = plan_rect_validation(index.widths, index.heights, size, batch_size, rank, world_size)
    else:
        plan = plan_square_validation(len(index), size, batch_size, rank, world_size)
    request_type = MultiCropRequest if is_multi_crop else BatchRequest
    return [request_type("val", copy, ids, shape) for shape, ids in plan]


def mean_crop_scores(crop: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return scores [n, classes], one row per image.

    For a crop of several squares, `images` holds the squares of n images, and the softmax of a row is the mean of the
    softmaxes of its squares. For a single square the scores are the model's own.
    """
    scores: torch.Tensor = model(images).float()
    if crop not in MULTI_CROP_MIRRORED:
        return scores
    all_scores = [scores]
    if MULTI_CROP_MIRRORED[crop]:
        all_scores.append(model(images.flip(3)).float())
    log_probabilities = torch.cat(
        [torch.log_softmax(part, 1).view(-1, SQUARES_PER_IMAGE, scores.shape[1]) for part in all_scores], 1
    )
    return torch.logsumexp(log_probabilities, 1) - math.log(log_probabilities.shape[1])


def crop_boxes(crop: str, size: int, width: int, height: int) -> list[list[float]]:
    """Return the boxes of an image that a crop shows, as [top, left, height, width] in fractions of the image."""
    shape = rect_crop_shape(width, height, size) if crop == "rect" else (size, size)
    resized = resized_size((height, width), shape)
    corners = five_crop_corners(resized, shape)
    if crop not in MULTI_CROP_MIRRORED:
        corners = corners[-1:]  # the last of the five is the center
    return [
        [top / resized[0], left / resized[1], shape[0] / resized[0], shape[1] / resized[1]] for top, left in corners
    ]
