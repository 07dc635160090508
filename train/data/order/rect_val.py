"""Rectangular validation: which shape an image is cropped to, and who validates it.

The shape is a pure function of the image's own aspect ratio and the size, so that the result depends neither on the
batch nor on the number of processes. Shapes are multiples of 32 and few; the images of each are dealt over the ranks.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SIDE_MULTIPLE = 32  # pixels: what ResNets shrink by, so that no border is cut off inside
MAX_ASPECT_RATIO = 1.5  # times the short side: longer ones are few, and each further shape costs a kernel search
RESIZE_TO_CROP_RATIO = 1.14  # short side before the crop, times the crop's (256 to 224; 1.10 to 1.14 measured best)

CropShape = tuple[int, int]


def rect_crop_shape(width: int, height: int, size: int) -> CropShape:
    """Return the crop (height, width) of one image: the short side `size`, the long one as long as the image allows."""
    short = _short_side(size)
    return _crop_shape(short, int(_long_sides(np.array([width / height]), short)[0]))


def _short_side(size: int) -> int:
    return max(SIDE_MULTIPLE, round(size / SIDE_MULTIPLE) * SIDE_MULTIPLE)


def _long_sides(ratios: NDArray[np.float64], short_side: int) -> NDArray[np.int32]:
    """The long side of each crop by width / height; negative where it is the height."""
    longs = np.maximum(ratios, 1 / ratios).clip(max=MAX_ASPECT_RATIO)
    whole = np.maximum(short_side, (short_side * longs + 1e-9).astype(np.int32) // SIDE_MULTIPLE * SIDE_MULTIPLE)
    return np.where((ratios >= 1) | (whole == short_side), whole, -whole)


def _crop_shape(short_side: int, signed_long_side: int) -> CropShape:
    return (short_side, signed_long_side) if signed_long_side > 0 else (-signed_long_side, short_side)


def plan_square_validation(
    image_count: int, size: int, batch: int, rank: int, world_size: int
) -> list[tuple[CropShape, NDArray[np.int64]]]:
    """Return this rank's validation batches for the square centre crop: every image is in one batch of one rank."""
    mine = np.arange(rank, image_count, world_size, dtype=np.int64)
    return [((size, size), mine[i : i + batch]) for i in range(0, len(mine), batch)]


def plan_rect_validation(
    widths: ArrayLike,
    heights: ArrayLike,
    size: int,
    batch: int,
    rank: int,
    world_size: int,
) -> list[tuple[CropShape, NDArray[np.int64]]]:
    """Return this rank's validation batches (shape, image numbers), in the global order of aspect ratios (w / h).

    Every image is in one batch of one rank; ranks differ by at most one image in all, whatever the shapes.
    """
    ratios = np.asarray(widths) / np.asarray(heights)
    order = np.argsort(ratios, kind="stable")
    ratios, short = ratios[order], _short_side(size)
    parts = np.array_split(ratios, 1 + len(ratios) // 2**16)  # in parts: a million images want little memory
    longs = np.concatenate([_long_sides(part, short) for part in parts])  # in this order equal ones adjoin
    ends = [*(np.flatnonzero(np.diff(longs)) + 1).tolist(), len(order)]
    batches, begin = [], 0
    for end in ends:
        mine = order[begin:end][
            (rank - begin) % world_size :: world_size
        ]  # each shape goes on where the last one stopped
        shape = _crop_shape(short, int(longs[begin]))
        batches += [(shape, mine[i : i + batch]) for i in range(0, len(mine), batch)]
        begin = end
    return batches
