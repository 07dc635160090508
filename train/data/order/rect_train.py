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

from .rect_val import LONGEST, Shape
from .rng import Ids, permutation

UNITS = (32, 16, 8, 4)  # pixels: the first of which there is a rectangle; at 16 pixels there is none
EQUAL = 1 / 16  # of the square's pixels: what a rectangle may have more or fewer
ONE = 2**30
JITTER = ONE // 20  # of a leaning: a tenth of the ratio, a third of what the crops' own ratios vary by
APART = 2**33  # what sets these dice apart from those of `order`

Leanings = NDArray[np.int64]


def shapes(size: int) -> tuple[Shape, ...]:
    """Return the shapes (height, width) of the steps at a size, from the tallest to the widest.

    They are the square, and rectangles of as many pixels (to EQUAL) up to LONGEST with sides of whole 32s, or of the
    next unit of which there is any: 192 x 256 at 224, 112 x 144 at 128, each also turned.
    """
    tall = next(filter(None, (_tall(size, unit) for unit in UNITS)), [])
    return (*tall, (size, size), *((width, height) for height, width in reversed(tall)))


def _tall(size: int, unit: int) -> list[Shape]:
    """The shapes that are higher than wide, the tallest first."""
    pixels = size * size / unit**2
    found = [(round(pixels / width), width) for width in range(1, math.isqrt(int(pixels)) + 1)]
    return [
        (height * unit, width * unit)
        for height, width in found
        if width < height <= LONGEST * width and abs(height * width - pixels) <= EQUAL * pixels
    ]


def lean(widths: ArrayLike, heights: ArrayLike) -> Leanings:
    """Return (w - h) / (w + h) of each image in units of 1 / ONE, at most that of LONGEST.

    It is nearly half the logarithm of the ratio, and exact on every processor.
    """
    w, h = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    most = int(ONE * (LONGEST - 1) / (LONGEST + 1))
    return np.asarray(((w - h) * ONE // np.maximum(w + h, 1)).clip(-most, most))


def order(seed: int, epoch: int, leans: Leanings, batch: int, size: int) -> tuple[Ids, list[Shape]]:
    """Return all image numbers once in the epoch's order, and the shape of each step of `batch` of them."""
    drawn = permutation(seed, epoch, len(leans))
    full = len(drawn) // batch * batch
    dice = np.random.Generator(np.random.Philox(key=[seed, epoch + APART]))
    mine, bits = leans[drawn[:full]], full.bit_length()
    jitter = ((2 * dice.random(full) - 1) * JITTER).astype(np.int64)
    keys = ((mine + jitter + ONE) << bits) | np.arange(full)  # no two are equal: any way of sorting gives the same
    keys.sort()
    steps = (keys & ((1 << bits) - 1)).reshape(-1, batch)[dice.permutation(full // batch)]
    steps.sort(axis=1)  # as they were drawn: within a step, and so over its chunks, the ratios are in no order
    known = shapes(size)
    found = [known[one] for one in _nearest(mine[steps].sum(axis=1) // batch, size).tolist()]
    last = possible(leans, size, full=False) if full < len(drawn) else []
    return np.concatenate([drawn[steps.ravel()], drawn[full:]]), found + last


def possible(leans: Leanings, size: int, full: bool) -> list[Shape]:
    """Return the shapes that full steps may have, in the order of `shapes`; else the one of a last that is not full."""
    means = [leans.min(), leans.max()] if full else [leans.sum() // len(leans)]
    chosen = _nearest(np.array(means), size)
    return list(shapes(size)[chosen[0] : chosen[-1] + 1])


def _nearest(means: Leanings, size: int) -> NDArray[np.int64]:
    """Which of the shapes is nearest to each mean."""
    heights, widths = zip(*shapes(size), strict=True)
    return np.asarray(np.abs(means[:, None] - lean(widths, heights)[None]).argmin(axis=1))
