"""Center crops: equal to the crop of the whole resized image, also of long strips. Random ones: test_loader.py."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from train.data import decode
from train.data.loading import crop
from train.data.order.center_crop import center_corner, resized_size


def test_center_crop_equals_crop_of_whole_resized_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although most of the pixels outside the crop are never computed."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        height, width, *sides = (int(2 ** rng.uniform(0, 8.5)) for _ in range(4))
        shape = (8 * (1 + sides[0] // 8), 8 * (1 + sides[1] // 8))
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        monkeypatch.setattr(crop, "decode_region", lambda data, size, box: slice_box(data, box))
        target = torch.empty((1, *shape, 3), dtype=torch.uint8)
        crop.center_crop(pixels, (height, width), crop.image_views(target)[0])  # type: ignore[arg-type]
        size = resized_size((height, width), shape)
        whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        if size != (height, width):
            whole = interpolate(whole, size, mode="bilinear", antialias=True)
        top, left = center_corner(size, shape)
        expected = whole[0, :, top : top + shape[0], left : left + shape[1]].permute(1, 2, 0)
        assert torch.equal(target[0], expected), (height, width, shape)


def slice_box(pixels: Any, box: decode.Box) -> Any:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000)])
def test_center_crop_of_long_strip_enlarges_only_its_middle(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    allocated_shapes: list[tuple[int, ...]] = []
    real_empty = torch.empty

    def recording_empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        allocated_shapes.append(shape)
        return real_empty(shape, **options)

    batch = real_empty((1, 64, 64, 3), dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", recording_empty)
    crop.center_crop(encode_exactly(pixels), size, crop.image_views(batch)[0])
    assert allocated_shapes and all(np.prod(shape) < 65 * 73 * 73 * 3 for shape in allocated_shapes)
    height, width = (min(side, 64 * min(size)) for side in size)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    expected = real_empty((1, 64, 64, 3), dtype=torch.uint8)
    middle = pixels[top : top + height, left : left + width]
    crop.center_crop(encode_exactly(middle), middle.shape[:2], crop.image_views(expected)[0])
    assert torch.equal(batch, expected)


def encode_exactly(pixels: Any) -> bytes:
    """Return the pixels as a PNG, which is lossless."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
