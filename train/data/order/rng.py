"""Sample order and augmentation as pure functions: order of (seed, epoch), crops of (seed, epoch, image ID).

So a checkpoint needs only a position, a resume on any number of ranks neither repeats nor drops an image, and no
worker carries a random state. Imports no torch.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from train.recipe.schedule import scaled_image_count

from .center_crop import RESIZE_TO_CROP_RATIO

ImageIds = NDArray[np.int64]
Boxes = NDArray[np.int64]  # [n, 4]: top, left, height, width

MAX_CROP_TRIES = 10  # random boxes tried before the largest centered box is taken, as in torchvision
SUBSET_EPOCH = 2**32  # the "epoch" of the permutation that a subset is drawn from; no run has so many epochs
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio, made odd


def permutation(seed: int, epoch: int, image_count: int) -> ImageIds:
    """Return all image IDs once, in the epoch's order (Goyal et al. 2017, remark 4)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(image_count)


def subset(seed: int, image_count: int, scale: float) -> ImageIds:
    """Return ceil(image_count x scale) of the image IDs, sorted. The same seed gives the same IDs."""
    return np.sort(permutation(seed, SUBSET_EPOCH, image_count)[: scaled_image_count(image_count, scale)])


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: every bit of the result depends on every bit of x (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, epoch: int, ids: ImageIds, count: int) -> NDArray[np.float64]:
    """Return [len(ids), count] numbers in [0, 1), each a pure function of (seed, epoch, ID, column)."""
    with np.errstate(over="ignore"):  # the hash is defined modulo 2**64
        key = _splitmix64(_splitmix64(np.array([seed], np.uint64) + np.uint64(_GOLDEN_GAMMA)) + np.uint64(epoch))
        rows = _splitmix64(key + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA))
        columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
        bits = _splitmix64(rows[:, None] + columns[None, :])
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def image_generator(seed: int, epoch: int, image_id: int) -> np.random.Generator:
    """Return the random generator of a training image for all draws but its crop. Only the arguments determine it."""
    # The key is that of `permutation`, but no permutation counts so far.
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, image_id + 1, 0]))


def random_boxes(
    seed: int, epoch: int, ids: ImageIds, widths: ArrayLike, heights: ArrayLike, min_scale: float, aspect: float = 1.0
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Draw a random resized crop for each image (Szegedy et al. 2014, section 6).

    Returns boxes [n, 4] of (top, left, height, width) in pixels, and flags [n] of the images to mirror. A box covers
    min_scale to 1 of the image's area. Its width / height is `aspect`, that of the target shape, times 3/4 to 4/3. The
    first of MAX_CROP_TRIES boxes that fits is taken, or else the largest centered box within these ratios.
    """
    width, height = (np.asarray(side, np.float64)[:, None] for side in (widths, heights))
    u = uniforms(seed, epoch, ids, 2 * MAX_CROP_TRIES + 3)
    area = width * height * (min_scale + (1 - min_scale) * u[:, :MAX_CROP_TRIES])
    ratio = np.exp((2 * u[:, MAX_CROP_TRIES : 2 * MAX_CROP_TRIES] - 1) * np.log(4 / 3)) * aspect
    w = np.rint(np.sqrt(area * ratio))
    h = np.rint(np.sqrt(area / ratio))
    fits = (w <= width) & (h <= height) & (w > 0) & (h > 0)
    first_fit = np.argmax(fits, axis=1)[:, None]
    w = np.take_along_axis(w, first_fit, axis=1)
    h = np.take_along_axis(h, first_fit, axis=1)
    any_fit = fits.any(axis=1, keepdims=True)
    w = np.where(any_fit, w, np.minimum(width, np.rint(height * 4 / 3 * aspect)))
    h = np.where(any_fit, h, np.minimum(height, np.rint(width * 4 / 3 / aspect)))
    position = u[:, 2 * MAX_CROP_TRIES : 2 * MAX_CROP_TRIES + 2]
    top = np.where(any_fit, np.floor(position[:, :1] * (height - h + 1)).clip(0, height - h), (height - h) // 2)
    left = np.where(any_fit, np.floor(position[:, 1:] * (width - w + 1)).clip(0, width - w), (width - w) // 2)
    return np.hstack([top, left, h, w]).astype(np.int64), u[:, -1] < 0.5


def random_position_boxes(
    seed: int, epoch: int, ids: ImageIds, widths: ArrayLike, heights: ArrayLike, aspect: float = 1.0
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Draw a crop of fixed size at a random position for each image, with the same returns as `random_boxes`.

    The crop is as large as that of validation (224 of 256 pixels). MXNet's recipes of 2016 call this augmentation of
    level 1. An image is mirrored exactly when `random_boxes` mirrors it.
    """
    width, height = (np.asarray(side, np.float64)[:, None] for side in (widths, heights))
    u = uniforms(seed, epoch, ids, 2 * MAX_CROP_TRIES + 3)
    crop_height = np.minimum(height, width / aspect) / RESIZE_TO_CROP_RATIO
    h = np.rint(crop_height).clip(1, height)
    w = np.rint(crop_height * aspect).clip(1, width)
    top = np.floor(u[:, -3:-2] * (height - h + 1)).clip(0, height - h)
    left = np.floor(u[:, -2:-1] * (width - w + 1)).clip(0, width - w)
    return np.hstack([top, left, h, w]).astype(np.int64), u[:, -1] < 0.5
