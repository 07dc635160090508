"""Rectangular validation: the crop shape of each image, and which rank validates which images.

The shape is a pure function of the image's own aspect ratio and the size, so the result depends neither on the batch
nor on the number of ranks. The sides of a shape are multiples of 32 pixels, so there are few shapes. The images of each
shape are divided among the ranks.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SIDE_MULTIPLE = 32  # pixels: the total stride of ResNets, so that no border is cut off inside the network
MAX_ASPECT_RATIO = 1.5  # long side / short side: longer images are few, and each further shape costs a kernel search

CropShape = tuple[int, int]  # height, width


def rect_crop_shape(width: int, height: int, size: int) -> CropShape:
    """Return the crop (height, width) of one image: short side `size`, long side as long as the image allows."""
    short = _short_side(size)
    return _crop_shape(short, int(_signed_long_sides(np.array([width / height]), short)[0]))


def _short_side(size: int) -> int:
    return max(SIDE_MULTIPLE, round(size / SIDE_MULTIPLE) * SIDE_MULTIPLE)


def _signed_long_sides(ratios: NDArray[np.float64], short_side: int) -> NDArray[np.int32]:
    """Return the long side of each crop by the image's width / height; negative where it is the crop's height."""
    elongations = np.maximum(ratios, 1 / ratios).clip(max=MAX_ASPECT_RATIO)
    multiples = (short_side * elongations + 1e-9).astype(np.int32) // SIDE_MULTIPLE
    long_sides = np.maximum(short_side, multiples * SIDE_MULTIPLE)
    return np.where((ratios >= 1) | (long_sides == short_side), long_sides, -long_sides)


def _crop_shape(short_side: int, signed_long_side: int) -> CropShape:
    return (short_side, signed_long_side) if signed_long_side > 0 else (-signed_long_side, short_side)


def plan_square_validation(
    image_count: int, size: int, batch: int, rank: int, world_size: int
) -> list[tuple[CropShape, NDArray[np.int64]]]:
    """Return this rank's batches (shape, image IDs) of square center crops. Each image is in one batch of one rank."""
    rank_ids = np.arange(rank, image_count, world_size, dtype=np.int64)
    return [((size, size), rank_ids[start : start + batch]) for start in range(0, len(rank_ids), batch)]


def plan_rect_validation(
    widths: ArrayLike, heights: ArrayLike, size: int, batch: int, rank: int, world_size: int
) -> list[tuple[CropShape, NDArray[np.int64]]]:
    """Return this rank's validation batches (shape, image IDs), in the global order of width / height.

    Every image is in exactly one batch of one rank. The image counts of the ranks differ by at most one in all.
    """
    ratios = np.asarray(widths) / np.asarray(heights)
    order = np.argsort(ratios, kind="stable")
    ratios = ratios[order]
    short = _short_side(size)
    parts = np.array_split(ratios, 1 + len(ratios) // 2**16)  # in parts, so that a million images need little memory
    long_sides = np.concatenate([_signed_long_sides(part, short) for part in parts])  # equal values are adjacent
    shape_ends = [*(np.flatnonzero(np.diff(long_sides)) + 1).tolist(), len(order)]
    batches, begin = [], 0
    for end in shape_ends:
        # The ranks go on taking turns from one shape to the next, so their totals differ by at most one.
        first = (rank - begin) % world_size
        rank_ids = order[begin:end][first::world_size]
        shape = _crop_shape(short, int(long_sides[begin]))
        batches += [(shape, rank_ids[start : start + batch]) for start in range(0, len(rank_ids), batch)]
        begin = end
    return batches
