"""Center crops: equal to the crop of the whole resized image. Random ones: test_loader.py."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from train.data import decode
from train.data.loading import crop
from train.data.order.center_crop import center_corner, resized_size


def test_center_crop_equals_crop_of_whole_resized_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although most of the pixels outside the crop are never computed."""

    def slice_box(pixels: Any, size: object, box: decode.Box) -> Any:
        top, left, height, width = box
        return pixels[top : top + height, left : left + width]

    monkeypatch.setattr(crop, "decode_region", slice_box)
    rng = np.random.default_rng(0)
    for _ in range(150):
        height, width, *sides = (int(2 ** rng.uniform(0, 8.5)) for _ in range(4))
        shape = (8 * (1 + sides[0] // 8), 8 * (1 + sides[1] // 8))
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        target = torch.empty((1, *shape, 3), dtype=torch.uint8)
        crop.center_crop(pixels, (height, width), crop.image_views(target)[0])  # type: ignore[arg-type]
        size = resized_size((height, width), shape)
        whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        if size != (height, width):
            whole = interpolate(whole, size, mode="bilinear", antialias=True)
        top, left = center_corner(size, shape)
        expected = whole[0, :, top : top + shape[0], left : left + shape[1]].permute(1, 2, 0)
        assert torch.equal(target[0], expected), (height, width, shape)
