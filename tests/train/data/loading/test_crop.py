"""Crops as PIL makes them, by every route, of drawn images and of photographs."""

import io
import os
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from train.data import decode
from train.data.loading import crop
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, rect_crop_shape
from train.data.order.rng import random_boxes
from train.data.packing.synthetic import draw_image

BOUND = 0.15  # of 255: the mean difference from PIL's antialiased bilinear crop
COUNT = 8
# 400 photographs of ImageNet, which are not ours to give away: beside the work tree, or where the variable says.
PHOTOGRAPHS = Path(
    os.environ.get("IMGNET_PHOTOGRAPHS")
    or Path(__file__).resolve().parents[4].parent / "shared" / "data" / "imagenet-samples-400.tar"
)


@cache
def sources(kind: str) -> list[bytes]:
    """Full-size JPEGs."""
    if kind == "drawn":
        return [draw_image(0, "train", number) for number in range(COUNT)]
    with tarfile.open(PHOTOGRAPHS) as tar:
        members = [one for one in tar if one.isfile()]
        return [tar.extractfile(one).read() for one in members[:: len(members) // COUNT][:COUNT]]  # type: ignore[union-attr]


@cache
def copies(kind: str, short: int | None) -> list[bytes]:
    """The JPEGs with their short side at so many pixels."""
    if short is None:
        return sources(kind)
    found = []
    for data in sources(kind):
        image = opened(data)
        factor = min(1, short / min(image.size))
        size = (round(image.width * factor), round(image.height * factor))
        found.append(decode.encode_jpeg(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), 90))
    return found


@pytest.fixture(params=["drawn", "photographs"])
def kind(request: Any) -> str:
    if request.param == "photographs" and not PHOTOGRAPHS.exists():
        pytest.skip(f"no photographs: {PHOTOGRAPHS}; say IMGNET_PHOTOGRAPHS=TAR")
    return str(request.param)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def size_of(data: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(data))
    return image.height, image.width


def boxes_of(images: list[bytes]) -> Iterator[tuple[bytes, decode.ImageSize, decode.Box, bool]]:
    heights, widths = zip(*map(size_of, images), strict=True)
    boxes, mirrors = random_boxes(3, 0, np.arange(len(images)), widths, heights, 0.08)
    for data, height, width, box, mirror in zip(images, heights, widths, boxes.tolist(), mirrors, strict=True):
        yield data, (height, width), tuple(box), bool(mirror)


def cropped(data: bytes, size: decode.ImageSize, box: decode.Box, mirror: bool, shape: tuple[int, int]) -> Any:
    batch = torch.full((1, *shape, 3), 7, dtype=torch.uint8)
    crop.crop_and_resize(data, size, box, mirror, crop.image_views(batch)[0])
    return batch[0].numpy()


def centred(data: bytes, shape: tuple[int, int]) -> Any:
    batch = torch.full((1, *shape, 3), 7, dtype=torch.uint8)
    crop.center_crop(data, size_of(data), crop.image_views(batch)[0])
    return batch[0].numpy()


@cache
def cropped_by_pil(data: bytes, box: decode.Box, mirror: bool, shape: tuple[int, int]) -> Any:
    top, left, height, width = box
    part = opened(data).crop((left, top, left + width, top + height)).resize(shape[::-1], Image.Resampling.BILINEAR)
    return np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else part)


@cache
def centred_by_pil(data: bytes, shape: tuple[int, int]) -> Any:
    image = opened(data)
    factor = round(min(shape) * RESIZE_TO_CROP_RATIO) / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BILINEAR)
    left, top = (image.width - shape[1]) // 2, (image.height - shape[0]) // 2
    return np.asarray(image.crop((left, top, left + shape[1], top + shape[0])))


def difference(one: Any, other: Any) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.mark.parametrize(("short", "size"), [(160, 128), (352, 224), (352, 128), (352, 288), (None, 128), (None, 224)])
def test_crop_and_resize_matches_pil(short: int | None, size: int, kind: str, route: str) -> None:
    found = [
        difference(cropped(*each, (size, size)), cropped_by_pil(each[0], *each[2:], (size, size)))
        for each in boxes_of(copies(kind, short))
    ]
    assert np.mean(found) <= BOUND and max(found) <= 2 * BOUND


@pytest.mark.parametrize(("short", "size"), [(160, 128), (352, 224), (352, 128), (None, 224)])
@pytest.mark.parametrize("rect", [False, True])
def test_center_crop_matches_pil(short: int | None, size: int, rect: bool, kind: str, route: str) -> None:
    found = []
    for data in copies(kind, short):
        height, width = size_of(data)
        shape = rect_crop_shape(width, height, size) if rect else (size, size)
        found.append(difference(centred(data, shape), centred_by_pil(data, shape)))
    assert np.mean(found) <= BOUND and max(found) <= 2 * BOUND


@pytest.mark.parametrize("short", [160, 352, None])
def test_crops_are_identical_with_region_decoder(short: int | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="the extra nvimgcodec is not installed")
    asked = list(boxes_of(copies(kind, short)))

    def both() -> list[Any]:
        return [(cropped(*each, (96, 96)), centred(each[0], (96, 128))) for each in asked]

    by_region = both()
    monkeypatch.setattr(decode, "region_decoder", lambda _: None)
    for mine, theirs in zip(by_region, both(), strict=True):
        assert all((one == other).all() for one, other in zip(mine, theirs, strict=True))


def test_bound_rejects_resize_without_antialiasing() -> None:
    """The bound tells aliasing from rounding."""
    found = []
    for data, _, (top, left, height, width), mirror in boxes_of(copies("drawn", 352)):
        part = torch.from_numpy(decode.decode_image(data)).permute(2, 0, 1)[
            None, :, top : top + height, left : left + width
        ]
        part = interpolate(part, (128, 128), mode="bilinear", antialias=False)[0].permute(1, 2, 0)
        part = part.flip(1) if mirror else part
        expected = cropped_by_pil(data, (top, left, height, width), mirror, (128, 128))
        found.append(difference(part.numpy(), expected))
    assert np.mean(found) > 5 * BOUND


def test_crop_and_resize_mirrored_is_flipped(route: str) -> None:
    for data, size, box, _ in boxes_of(copies("drawn", 160)):
        plain, mirrored = (cropped(data, size, box, flip, (64, 96)) for flip in (False, True))
        assert (mirrored == plain[:, ::-1]).all() and (mirrored != plain).any()


def test_crop_and_resize_at_target_size_is_exact(route: str) -> None:
    data = copies("drawn", 160)[0]
    pixels = decode.decode_image(data)
    assert (cropped(data, size_of(data), (5, 9, 96, 128), False, (96, 128)) == pixels[5:101, 9:137]).all()


def test_crops_fill_only_their_image_of_a_batch(route: str) -> None:
    data, batch = copies("drawn", 160)[0], torch.full((3, 64, 64, 3), 7, dtype=torch.uint8)
    crop.crop_and_resize(data, size_of(data), (0, 0, 100, 100), True, crop.image_views(batch)[1])
    assert (batch[0] == 7).all() and (batch[2] == 7).all()
    assert (batch[1].numpy() == cropped(data, size_of(data), (0, 0, 100, 100), True, (64, 64))).all()
    crop.center_crop(data, size_of(data), crop.image_views(batch)[1])
    assert (batch[0] == 7).all() and (batch[2] == 7).all() and (batch[1].numpy() == centred(data, (64, 64))).all()


def test_center_crop_equals_crop_of_whole_resized_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though most of what is thrown away is never made."""
    dice = np.random.default_rng(0)
    for _ in range(150):
        height, width, *half = (int(2 ** dice.uniform(0, 8.5)) for _ in range(4))
        shape = (8 * (1 + half[0] // 8), 8 * (1 + half[1] // 8))
        pixels = dice.integers(0, 256, (height, width, 3), np.uint8)
        monkeypatch.setattr(crop, "decode_region", lambda data, size, box: part_of(data, box))
        target = torch.empty((1, *shape, 3), dtype=torch.uint8)
        crop.center_crop(pixels, (height, width), crop.image_views(target)[0])  # type: ignore[arg-type]
        factor = max(round(min(shape) * RESIZE_TO_CROP_RATIO) / min(height, width), shape[0] / height, shape[1] / width)
        size = max(shape[0], round(height * factor)), max(shape[1], round(width * factor))
        whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        if size != (height, width):
            whole = interpolate(whole, size, mode="bilinear", antialias=True)
        top, left = (size[0] - shape[0]) // 2, (size[1] - shape[1]) // 2
        expected = whole[0, :, top : top + shape[0], left : left + shape[1]].permute(1, 2, 0)
        assert torch.equal(target[0], expected), (height, width, shape)


def part_of(pixels: Any, box: decode.Box) -> Any:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def test_center_crop_decodes_no_pixels_beyond_the_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def part(_: bytes, size: decode.ImageSize, box: decode.Box) -> Any:
        asked.append(box)
        return np.zeros((*box[2:], 3), np.uint8)

    monkeypatch.setattr(crop, "decode_region", part)
    for size in ((352, 470), (470, 352)):
        crop.center_crop(b"", size, torch.empty((1, 3, 224, 224), dtype=torch.uint8))
    assert asked == [(0, 0, 333, 393), (0, 0, 393, 333)]  # of 352 and 470, of which 309 are in the middle


def test_crops_with_wrong_size_raise(route: str) -> None:
    data = copies("drawn", 160)[0]
    height, width = size_of(data)
    for size in ((height + 1, width), (width, height), (1, 1)):
        for fill in (
            lambda size: crop.crop_and_resize(
                data, size, (0, 0, 1, 1), False, torch.empty(1, 3, 8, 8, dtype=torch.uint8)
            ),
            lambda size: crop.center_crop(data, size, torch.empty(1, 3, 8, 8, dtype=torch.uint8)),
        ):
            with pytest.raises(decode.BadImage, match=f"has {width}x{height} pixels and not {size[1]}x{size[0]}"):
                fill(size)


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000)])
def test_center_crop_of_long_strip_enlarges_only_its_middle(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    made, real = list[tuple[int, ...]](), torch.empty

    def noted(shape: tuple[int, ...], **how: Any) -> torch.Tensor:
        made.append(shape)
        return real(shape, **how)

    batch = real((1, 64, 64, 3), dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", noted)
    crop.center_crop(encode_exactly(pixels), size, crop.image_views(batch)[0])
    assert all(np.prod(shape) < 65 * 73 * 73 * 3 for shape in made) and made
    middle = (min(one, 64 * min(size)) for one in size)
    cut = tuple(slice((full - part) // 2, (full - part) // 2 + part) for full, part in zip(size, middle, strict=True))
    expected = real((1, 64, 64, 3), dtype=torch.uint8)
    kept = pixels[cut]
    crop.center_crop(encode_exactly(kept), kept.shape[:2], crop.image_views(expected)[0])
    assert torch.equal(batch, expected)


def encode_exactly(pixels: Any) -> bytes:
    """A PNG, which loses nothing."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
