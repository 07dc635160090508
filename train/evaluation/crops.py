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

import torch
from torch import nn

from train.data.index.open import Index
from train.data.loading.crop import five_crop_corners
from train.data.order.center_crop import resized_size
from train.data.order.rect_val import plan_rect_validation, plan_square_validation, rect_crop_shape
from train.data.order.work import BatchRequest

from .protocol import CROP_VIEWS, Box

SQUARES_PER_IMAGE = 5  # of a crop of several views; a crop of more views than that mirrors them too


def plan_eval_batches(
    crop: str, size: int, index: Index, copy: int | None, pixel_budget: int, rank: int, world_size: int
) -> list[BatchRequest]:
    """Return this rank's batches of a crop. Every image is in exactly one batch of one rank.

    `index` is that of the full-size images; `copy` is the resized copy that the images are read from. A batch has about
    `pixel_budget` pixels, and at least one image.
    """
    squares = min(CROP_VIEWS[crop], SQUARES_PER_IMAGE)
    batch_size = max(1, pixel_budget // (size * size * squares))
    if crop == "rect":
        plan = plan_rect_validation(index.widths, index.heights, size, batch_size, rank, world_size)
    else:
        plan = plan_square_validation(len(index), size, batch_size, rank, world_size)
    return [BatchRequest("val", copy, ids, shape, squares=squares) for shape, ids in plan]


def mean_crop_scores(crop: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return scores [n, classes], one row per image.

    For a crop of several squares, `images` holds the squares of n images, and the softmax of a row is the mean of the
    softmaxes of its squares. For a single square the scores are the model's own.
    """
    scores: torch.Tensor = model(images).float()
    if CROP_VIEWS[crop] == 1:
        return scores
    all_scores = [scores]
    if CROP_VIEWS[crop] > SQUARES_PER_IMAGE:
        all_scores.append(model(images.flip(3)).float())
    log_probabilities = torch.cat(
        [torch.log_softmax(part, 1).view(-1, SQUARES_PER_IMAGE, scores.shape[1]) for part in all_scores], 1
    )
    return torch.logsumexp(log_probabilities, 1) - math.log(log_probabilities.shape[1])


def crop_boxes(crop: str, size: int, width: int, height: int) -> tuple[Box, ...]:
    """Return the boxes of an image that a crop shows."""
    shape = rect_crop_shape(width, height, size) if crop == "rect" else (size, size)
    resized = resized_size((height, width), shape)
    corners = five_crop_corners(resized, shape)
    if CROP_VIEWS[crop] == 1:
        corners = corners[-1:]  # the last of the five is the center
    return tuple(
        (top / resized[0], left / resized[1], shape[0] / resized[0], shape[1] / resized[1]) for top, left in corners
    )
