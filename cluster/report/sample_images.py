"""A few validation images, small, with the part of each that a validation looks at."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.data.order.rect_val import MARGIN, rectangle
from train.metrics import thumbnails

Box = tuple[float, float, float, float]  # left, top, width, height as shares of the image
Size = tuple[int, int]  # width, height


def pictures(run: Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the validation images that a run has kept, as a schedule's `row` validates them.

    Of each "label", "src" (a data URI), "size", "shown", "square" and "rectangle" (boxes; None when they are not looked
    at), and "pixels", the side lengths at which it is seen.
    """
    return [_picture(one, row) for one in thumbnails.kept(run)] if row else []


def _picture(one: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    side, (width, height) = int(row["size"]), one["size"]
    high, wide = rectangle(width, height, side) if row.get("rect_val") else (side, side)
    return {
        "label": one["label"],
        "size": (width, height),
        "shown": one["shown"],
        "src": "data:image/jpeg;base64," + base64.b64encode(one["jpeg"]).decode(),
        "square": box((width, height), (side, side)),
        "rectangle": box((width, height), (high, wide)) if row.get("rect_val") else None,
        "pixels": (wide, high),
    }


def box(size: Size, shape: tuple[int, int]) -> Box:
    """Return the part of an image that a validation's centre crop of `shape` (height, width) looks at.

    The image's short side is made `MARGIN` times the crop's, or longer where the crop would not fit (train/data/crop).
    """
    width, height = size
    factor = max(round(min(shape) * MARGIN) / min(size), shape[0] / height, shape[1] / width)
    high, wide = (min(1.0, cut / (one * factor)) for cut, one in zip(shape, (height, width), strict=True))
    return (1 - wide) / 2, (1 - high) / 2, wide, high
