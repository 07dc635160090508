"""Rectangular validation: which shape an image is cropped to, and who validates it.

The shape is a pure function of the image's own aspect ratio and the size, so that the result depends neither on the
batch nor on the number of processes. Shapes are multiples of 32 and few; the images of each are dealt over the ranks.
"""

import numpy as np
from numpy.typing import NDArray

STEP = 32  # pixels: what ResNets shrink by, so that no border is cut off inside
LONGEST = 1.5  # times the short side: longer ones are few, and each further shape costs a kernel search
MARGIN = 1.14  # short side before the crop, times the crop's (256 to 224; 1.10 to 1.14 measured best)

Shape = tuple[int, int]


def rectangle(width: int, height: int, size: int) -> Shape:
    """Return the crop (height, width) of one image: the short side `size`, the long one as long as the image allows."""
    short = max(STEP, round(size / STEP) * STEP)
    ratio = min(max(width, height) / min(width, height), LONGEST)
    long = max(short, int(short * ratio + 1e-9) // STEP * STEP)
    return (short, long) if width >= height else (long, short)


def plan_square(images: int, size: int, batch: int, rank: int, world: int) -> list[tuple[Shape, NDArray[np.int64]]]:
    """Return this rank's validation batches for the square centre crop: every image is in one batch of one rank."""
    mine = np.arange(rank, images, world, dtype=np.int64)
    return [((size, size), mine[i : i + batch]) for i in range(0, len(mine), batch)]


def plan_rectangles(
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
    size: int,
    batch: int,
    rank: int,
    world: int,
) -> list[tuple[Shape, NDArray[np.int64]]]:
    """Return this rank's validation batches (shape, image numbers), in the global order of aspect ratios (w / h).

    Every image is in one batch of one rank; ranks differ by at most one image in all, whatever the shapes.
    """
    order = np.argsort(widths / heights, kind="stable")
    groups: dict[Shape, list[int]] = {}
    for number in order:
        groups.setdefault(rectangle(int(widths[number]), int(heights[number]), size), []).append(int(number))
    batches, dealt = [], 0
    for shape, numbers in groups.items():
        mine = np.array(numbers[(rank - dealt) % world :: world], np.int64)
        dealt += len(numbers)  # the next shape goes on where this one stopped
        batches += [(shape, mine[i : i + batch]) for i in range(0, len(mine), batch)]
    return batches
