"""Tests of crops: equal to PIL's, of drawn images."""

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from train.data import decode
from train.data.loading import crop
from train.data.order.center_crop import center_corner, resized_size
from train.data.order.rng import random_boxes
from train.data.packing.synthetic import draw_image

MAX_MEAN_DIFFERENCE = 0.15  # of 255, from PIL's antialiased bilinear crop
COUNT = 8


@cache
def copies(short: int | None) -> list[bytes]:
    """Return drawn images as JPEGs with a short side of `short` pixels, None for full size."""
    full_size = [draw_image(0, "train", number) for number in range(COUNT)]
    if short is None:
        return full_size
    jpegs = []
    for data in full_size:
        image = open_image(data)
        factor = min(1, short / min(image.size))
        size = (round(image.width * factor), round(image.height * factor))
        jpegs.append(decode.encode_jpeg(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), 90))
    return jpegs


def open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def size_of(data: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(data))
    return image.height, image.width


def draw_boxes(images: list[bytes]) -> Iterator[tuple[bytes, decode.ImageSize, decode.Box, bool]]:
    """Yield (JPEG, size, random box, mirror) of each image."""
    heights, widths = zip(*map(size_of, images), strict=True)
    boxes, mirrors = random_boxes(3, 0, np.arange(len(images)), widths, heights, 0.08)
    for data, height, width, box, mirror in zip(images, heights, widths, boxes.tolist(), mirrors, strict=True):
        yield data, (height, width), tuple(box), bool(mirror)


def random_crop(data: bytes, size: decode.ImageSize, box: decode.Box, mirror: bool, shape: tuple[int, int]) -> Any:
    batch = torch.full((1, *shape, 3), 7, dtype=torch.uint8)
    crop.crop_and_resize(data, size, box, mirror, crop.image_views(batch)[0])
    return batch[0].numpy()


@cache
def random_crop_by_pil(data: bytes, box: decode.Box, mirror: bool, shape: tuple[int, int]) -> Any:
    top, left, height, width = box
    region = (
        open_image(data).crop((left, top, left + width, top + height)).resize(shape[::-1], Image.Resampling.BILINEAR)
    )
    return np.asarray(region.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else region)


def mean_difference(pixels: Any, expected: Any) -> float:
    assert pixels.shape == expected.shape
    return float(np.abs(pixels.astype(int) - expected.astype(int)).mean())


@pytest.mark.parametrize(("short", "size"), [(160, 128), (352, 224), (352, 128), (352, 288), (None, 128), (None, 224)])
def test_crop_and_resize_matches_pil(short: int | None, size: int) -> None:
    shape = (size, size)
    differences = [
        mean_difference(random_crop(data, image_size, box, mirror, shape), random_crop_by_pil(data, box, mirror, shape))
        for data, image_size, box, mirror in draw_boxes(copies(short))
    ]
    assert np.mean(differences) <= MAX_MEAN_DIFFERENCE and max(differences) <= 2 * MAX_MEAN_DIFFERENCE


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
