"""Rectangular training: steps whose images are nearly of one aspect ratio, and the shape of each. Pure, without torch.

Each epoch anew the images are sorted by ratio, with a jitter of about a tenth of it, and cut into global batches, which
are shuffled: steps, images per step and work are those of square training, and every image is used once. What a last
step that is not full takes is drawn from all images, as in square training, and has the shape of their mean.

All is whole numbers: where two processors round a logarithm or a long sum differently, two machines would disagree on
an order, and an image would be used twice.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rect_val import MAX_ASPECT_RATIO, CropShape
from .rng import ImageIds, permutation

SIDE_MULTIPLES = (32, 16, 8, 4)  # pixels: the first of which there is a rectangle; at 16 pixels there is none
PIXEL_TOLERANCE = 1 / 16  # of the square's pixels: what a rectangle may have more or fewer
ASPECT_CODE_SCALE = 2**30
ASPECT_CODE_JITTER = (
    ASPECT_CODE_SCALE // 20
)  # of a leaning: a tenth of the ratio, a third of what the crops' own ratios vary by
JITTER_EPOCH_OFFSET = 2**33  # what sets these dice apart from those of `order`

AspectCodes = NDArray[np.int64]


def rect_train_shapes(size: int) -> tuple[CropShape, ...]:
    """Return the shapes (height, width) of the steps at a size, from the tallest to the widest.

    They are the square, and rectangles of as many pixels (to EQUAL) up to LONGEST with sides of whole 32s, or of the
    next unit of which there is any: 192 x 256 at 224, 112 x 144 at 128, each also turned.
    """
    tall = next(filter(None, (_tall_shapes(size, unit) for unit in SIDE_MULTIPLES)), [])
    return (*tall, (size, size), *((width, height) for height, width in reversed(tall)))


def _tall_shapes(size: int, side_multiple: int) -> list[CropShape]:
    """The shapes that are higher than wide, the tallest first."""
    pixels = size * size / side_multiple**2
    found = [(round(pixels / width), width) for width in range(1, math.isqrt(int(pixels)) + 1)]
    return [
        (height * side_multiple, width * side_multiple)
        for height, width in found
        if width < height <= MAX_ASPECT_RATIO * width and abs(height * width - pixels) <= PIXEL_TOLERANCE * pixels
    ]


def encode_aspect_ratios(widths: ArrayLike, heights: ArrayLike) -> AspectCodes:
    """Return (w - h) / (w + h) of each image in units of 1 / ONE, at most that of LONGEST.

    It is nearly half the logarithm of the ratio, and exact on every processor.
    """
    w, h = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    most = int(ASPECT_CODE_SCALE * (MAX_ASPECT_RATIO - 1) / (MAX_ASPECT_RATIO + 1))
    return np.asarray(((w - h) * ASPECT_CODE_SCALE // np.maximum(w + h, 1)).clip(-most, most))


def rect_epoch_order(
    seed: int, epoch: int, aspect_codes: AspectCodes, batch: int, size: int
) -> tuple[ImageIds, list[CropShape]]:
    """Return all image numbers once in the epoch's order, and the shape of each step of `batch` of them."""
    drawn = permutation(seed, epoch, len(aspect_codes))
    full = len(drawn) // batch * batch
    dice = np.random.Generator(np.random.Philox(key=[seed, epoch + JITTER_EPOCH_OFFSET]))
    mine, bits = aspect_codes[drawn[:full]], full.bit_length()
    jitter = ((2 * dice.random(full) - 1) * ASPECT_CODE_JITTER).astype(np.int64)
    keys = ((mine + jitter + ASPECT_CODE_SCALE) << bits) | np.arange(
        full
    )  # no two are equal: any way of sorting gives the same
    keys.sort()
    steps = (keys & ((1 << bits) - 1)).reshape(-1, batch)[dice.permutation(full // batch)]
    steps.sort(axis=1)  # as they were drawn: within a step, and so over its chunks, the ratios are in no order
    known = rect_train_shapes(size)
    found = [known[one] for one in _nearest_shapes(mine[steps].sum(axis=1) // batch, size).tolist()]
    last = possible_step_shapes(aspect_codes, size, full=False) if full < len(drawn) else []
    return np.concatenate([drawn[steps.ravel()], drawn[full:]]), found + last


def possible_step_shapes(aspect_codes: AspectCodes, size: int, full: bool) -> list[CropShape]:
    """Return the shapes that full steps may have, in the order of `shapes`; else the one of a last that is not full."""
    means = [aspect_codes.min(), aspect_codes.max()] if full else [aspect_codes.sum() // len(aspect_codes)]
    chosen = _nearest_shapes(np.array(means), size)
    return list(rect_train_shapes(size)[chosen[0] : chosen[-1] + 1])


def _nearest_shapes(means: AspectCodes, size: int) -> NDArray[np.int64]:
    """Which of the shapes is nearest to each mean."""
    heights, widths = zip(*rect_train_shapes(size), strict=True)
    return np.asarray(np.abs(means[:, None] - encode_aspect_ratios(widths, heights)[None]).argmin(axis=1))
