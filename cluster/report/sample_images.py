"""A few validation images, small, with the part of each that a validation looks at."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, rect_crop_shape
from train.metrics import thumbnails

RelativeBox = tuple[float, float, float, float]  # left, top, width, height as shares of the image
PixelSize = tuple[int, int]  # width, height


def sample_images(run_folder: Path, schedule_row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the validation images that a run has kept, as a schedule's `row` validates them.

    Of each "label", "src" (a data URI), "size", "shown", "square" and "rectangle" (boxes; None when they are not looked
    at), and "pixels", the side lengths at which it is seen.
    """
    return (
        [_describe_image(one, schedule_row) for one in thumbnails.read_thumbnails(run_folder)] if schedule_row else []
    )


def _describe_image(thumbnail: Mapping[str, Any], schedule_row: Mapping[str, Any]) -> dict[str, Any]:
    side, (width, height) = int(schedule_row["size"]), thumbnail["size"]
    high, wide = rect_crop_shape(width, height, side) if schedule_row.get("rect_val") else (side, side)
    return {
        "label": thumbnail["label"],
        "size": (width, height),
        "shown": thumbnail["shown"],
        "src": "data:image/jpeg;base64," + base64.b64encode(thumbnail["jpeg"]).decode(),
        "square": centre_crop_box((width, height), (side, side)),
        "rectangle": centre_crop_box((width, height), (high, wide)) if schedule_row.get("rect_val") else None,
        "pixels": (wide, high),
    }


def centre_crop_box(image_size: PixelSize, crop_shape: tuple[int, int]) -> RelativeBox:
    """Return the part of an image that a validation's centre crop of `shape` (height, width) looks at.

    The image's short side is made `MARGIN` times the crop's, or longer where the crop would not fit (train/data/crop).
    """
    width, height = image_size
    factor = max(
        round(min(crop_shape) * RESIZE_TO_CROP_RATIO) / min(image_size), crop_shape[0] / height, crop_shape[1] / width
    )
    high, wide = (min(1.0, cut / (one * factor)) for cut, one in zip(crop_shape, (height, width), strict=True))
    return (1 - wide) / 2, (1 - high) / 2, wide, high
