"""The geometry of the center crop, against a restatement of torchvision's Resize and CenterCrop."""

import numpy as np
import pytest

from train.data.order.center_crop import center_corner, resized_size
from train.data.order.rect_val import rect_crop_shape


def resized_by_torchvision(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Return what torchvision's Resize(short_side) makes of an image: its long side is truncated."""
    long_side = int(short_side * max(height, width) / min(height, width))
    return (short_side, long_side) if height <= width else (long_side, short_side)


def corner_by_torchvision(size: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """Return where torchvision's CenterCrop(shape) begins in an image that holds the crop."""
    return int(round((size[0] - shape[0]) / 2.0)), int(round((size[1] - shape[1]) / 2.0))  # noqa: RUF046


@pytest.mark.parametrize("rect", [False, True])
def test_geometry_is_torchvisions_wherever_the_crop_fits(rect: bool) -> None:
    rng = np.random.default_rng(0)
    for height, width, crop in np.vstack(
        [rng.integers(30, 900, 4000), rng.integers(30, 900, 4000), rng.integers(1, 12, 4000)]
    ).T.tolist():
        side = 32 * crop
        shape = rect_crop_shape(width, height, side) if rect else (side, side)
        resized = resized_by_torchvision(height, width, int(side * 1.14))
        assert resized[0] >= shape[0] and resized[1] >= shape[1], "every shape of validation fits into the image"
        assert resized_size((height, width), shape) == resized
        assert center_corner(resized, shape) == corner_by_torchvision(resized, shape)
