"""Who sees which image when: pure functions of (seed, epoch) and of (seed, epoch, image), without torch.

So a checkpoint needs only a position, a resume on any number of processes repeats and drops nothing, and no worker
carries a random state.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rect_val import RESIZE_TO_CROP_RATIO

ImageIds = NDArray[np.int64]
Boxes = NDArray[np.int64]
MAX_CROP_TRIES = 10  # of a random box before the largest centred one is taken, as torchvision does
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def permutation(seed: int, epoch: int, image_count: int) -> ImageIds:
    """Return all image numbers once, in the epoch's order (Goyal et al. 2017, remark 4)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(image_count)


def subset(seed: int, image_count: int, scale: float) -> ImageIds:
    """Return ceil(images x scale) of the image numbers, sorted: the same ones for the same seed."""
    chosen = permutation(seed, 2**32, image_count)[: max(1, int(np.ceil(image_count * scale)))]
    return np.sort(chosen)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, epoch: int, ids: ImageIds, count: int) -> NDArray[np.float64]:
    """Return [len(ids), count] numbers from 0 to 1 that depend on nothing but (seed, epoch, id, column)."""
    with np.errstate(over="ignore"):  # wrapping is the arithmetic of the hash
        key = _splitmix64(_splitmix64(np.array([seed], np.uint64) + np.uint64(_GOLDEN_GAMMA)) + np.uint64(epoch))
        rows = _splitmix64(key + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA))
        columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
        bits = _splitmix64(rows[:, None] + columns[None, :])
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def random_boxes(
    seed: int, epoch: int, ids: ImageIds, widths: Any, heights: Any, min_scale: float, aspect: float = 1.0
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Draw a crop for each image: a box [n, 4] of (top, left, height, width) in its pixels, and whether to mirror it.

    The box covers min_scale to 1 of the area at a ratio of 3/4 to 4/3 (Szegedy et al. 2014, section 6) times `aspect`,
    width / height of what it is made into, the first of ten tries that fits; else the largest centred box within these
    ratios.
    """
    width, height = (np.asarray(one, np.float64)[:, None] for one in (widths, heights))
    u = uniforms(seed, epoch, ids, 2 * MAX_CROP_TRIES + 3)
    area = width * height * (min_scale + (1 - min_scale) * u[:, :MAX_CROP_TRIES])
    ratio = np.exp((2 * u[:, MAX_CROP_TRIES : 2 * MAX_CROP_TRIES] - 1) * np.log(4 / 3)) * aspect
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (w <= width) & (h <= height) & (w > 0) & (h > 0)
    first = np.argmax(fits, axis=1)[:, None]
    w, h = (np.take_along_axis(one, first, axis=1) for one in (w, h))
    found = fits.any(axis=1, keepdims=True)
    w = np.where(found, w, np.minimum(width, np.rint(height * 4 / 3 * aspect)))
    h = np.where(found, h, np.minimum(height, np.rint(width * 4 / 3 / aspect)))
    place = np.where(found, u[:, 2 * MAX_CROP_TRIES : 2 * MAX_CROP_TRIES + 2], 0.5)
    top = np.floor(place[:, :1] * (height - h + 1)).clip(0, height - h)
    left = np.floor(place[:, 1:] * (width - w + 1)).clip(0, width - w)
    return np.hstack([top, left, h, w]).astype(np.int64), u[:, -1] < 0.5


def random_position_boxes(
    seed: int, epoch: int, ids: ImageIds, widths: Any, heights: Any, aspect: float = 1.0
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Draw a crop of one size for each image, as `random_boxes` does: as large as validation's (224 of 256 pixels), at
    a random place; mirrored or not. MXNet's recipes of 2016 call it augmentation of level 1.
    """
    width, height = (np.asarray(one, np.float64)[:, None] for one in (widths, heights))
    u = uniforms(seed, epoch, ids, 2 * MAX_CROP_TRIES + 3)
    short = np.minimum(height, width / aspect) / RESIZE_TO_CROP_RATIO
    h, w = np.rint(short).clip(1, height), np.rint(short * aspect).clip(1, width)
    top = np.floor(u[:, -3:-2] * (height - h + 1)).clip(0, height - h)
    left = np.floor(u[:, -2:-1] * (width - w + 1)).clip(0, width - w)
    return np.hstack([top, left, h, w]).astype(np.int64), u[:, -1] < 0.5
