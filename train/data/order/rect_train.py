"""Rectangular training: steps whose images have nearly one aspect ratio, and the crop shape of each step.

In every epoch the images are sorted by ratio, with a jitter of about a tenth of the ratio, and cut into global batches,
which are then shuffled. Steps, images per step and work are those of square training, and every image is used once. A
last step that is not full takes the images that square training takes there, in the shape of the mean ratio of all.

All arithmetic is on integers. If two processors rounded a logarithm or a long sum differently, two machines would
disagree on the order, and an image would be used twice. Imports no torch.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rect_val import MAX_ASPECT_RATIO, CropShape
from .rng import ImageIds, permutation

# Pixels. The sides are multiples of the first of these that yields a rectangle at all; at size 16 none does.
SIDE_MULTIPLES = (32, 16, 8, 4)
PIXEL_TOLERANCE = 1 / 16  # of the square's pixels: how many more or fewer pixels a rectangle may have
ASPECT_CODE_SCALE = 2**30
ASPECT_CODE_JITTER = ASPECT_CODE_SCALE // 20  # a tenth of the ratio; the crops' own ratios vary by three times that
JITTER_EPOCH_OFFSET = 2**33  # added to the epoch, so that the jitter is independent of `permutation`

AspectCodes = NDArray[np.int64]


def rect_train_shapes(size: int) -> tuple[CropShape, ...]:
    """Return the shapes (height, width) of the steps at a size, from the tallest to the widest.

    They are the square, and rectangles with the square's number of pixels (within PIXEL_TOLERANCE), an aspect ratio up
    to MAX_ASPECT_RATIO, and sides that are multiples of 32, or of the next of SIDE_MULTIPLES that yields any: 192 x 256
    at 224, 112 x 144 at 128. Each rectangle comes in portrait and landscape.
    """
    tall = next(filter(None, (_tall_shapes(size, multiple) for multiple in SIDE_MULTIPLES)), [])
    return (*tall, (size, size), *((width, height) for height, width in reversed(tall)))


def _tall_shapes(size: int, side_multiple: int) -> list[CropShape]:
    """Return the shapes that are higher than wide, the tallest first."""
    cells = size * size / side_multiple**2
    candidates = [(round(cells / width), width) for width in range(1, math.isqrt(int(cells)) + 1)]
    return [
        (height * side_multiple, width * side_multiple)
        for height, width in candidates
        if width < height <= MAX_ASPECT_RATIO * width and abs(height * width - cells) <= PIXEL_TOLERANCE * cells
    ]


def encode_aspect_ratios(widths: ArrayLike, heights: ArrayLike) -> AspectCodes:
    """Return (w - h) / (w + h) of each image in units of 1 / ASPECT_CODE_SCALE, clipped to that of MAX_ASPECT_RATIO.

    The code is nearly half the logarithm of the ratio, and exact on every processor.
    """
    w, h = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    max_code = int(ASPECT_CODE_SCALE * (MAX_ASPECT_RATIO - 1) / (MAX_ASPECT_RATIO + 1))
    return np.asarray(((w - h) * ASPECT_CODE_SCALE // np.maximum(w + h, 1)).clip(-max_code, max_code))


def rect_epoch_order(
    seed: int, epoch: int, aspect_codes: AspectCodes, batch: int, size: int
) -> tuple[ImageIds, list[CropShape]]:
    """Return all image IDs once in the epoch's order, and the shape of each step of `batch` images."""
    drawn = permutation(seed, epoch, len(aspect_codes))
    full = len(drawn) // batch * batch  # images in full steps
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch + JITTER_EPOCH_OFFSET]))
    codes = aspect_codes[drawn[:full]]
    position_bits = full.bit_length()
    jitter = ((2 * generator.random(full) - 1) * ASPECT_CODE_JITTER).astype(np.int64)
    # The low bits are the position in `drawn`. So no two keys are equal, and every sorting algorithm gives one order.
    keys = ((codes + jitter + ASPECT_CODE_SCALE) << position_bits) | np.arange(full)
    keys.sort()
    steps = (keys & ((1 << position_bits) - 1)).reshape(-1, batch)[generator.permutation(full // batch)]
    steps.sort(axis=1)  # back to the drawn order within a step, so that its chunks do not differ in their ratios
    shapes = rect_train_shapes(size)
    step_shapes = [shapes[number] for number in _nearest_shapes(codes[steps].sum(axis=1) // batch, size).tolist()]
    last_shape = possible_step_shapes(aspect_codes, size, full=False) if full < len(drawn) else []
    return np.concatenate([drawn[steps.ravel()], drawn[full:]]), step_shapes + last_shape


def possible_step_shapes(aspect_codes: AspectCodes, size: int, full: bool) -> list[CropShape]:
    """Return the shapes that full steps may have, from tall to wide, or else the one shape of a partial last step."""
    means = [aspect_codes.min(), aspect_codes.max()] if full else [aspect_codes.sum() // len(aspect_codes)]
    chosen = _nearest_shapes(np.array(means), size)
    return list(rect_train_shapes(size)[chosen[0] : chosen[-1] + 1])


def _nearest_shapes(means: AspectCodes, size: int) -> NDArray[np.int64]:
    """Return the number of the shape that is nearest to each mean code."""
    heights, widths = zip(*rect_train_shapes(size), strict=True)
    return np.asarray(np.abs(means[:, None] - encode_aspect_ratios(widths, heights)[None]).argmin(axis=1))
