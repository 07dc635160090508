"""Compared with torchvision: center crops and TrivialAugment by pixels, RandomResizedCrop by its distribution."""

import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.peers import run_script

from train.data.loading import augment, crop
from train.data.order.rng import random_boxes

SIZES = [(375, 500), (500, 375), (333, 500), (256, 256), (300, 1201), (77, 91)]  # height, width
DRAWS = 4000
KOLMOGOROV_SMIRNOV_BOUND = 1.95 * (2 / DRAWS) ** 0.5  # two equal distributions exceed it once in a thousand times


def smooth_image(height: int, width: int) -> Any:
    """Return pixels like those of a photograph: enlarged noise, so that a shift of one pixel is seen."""
    noise = np.random.default_rng(height * width).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def center_crop(pixels: Any, size: int) -> Any:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    batch = torch.empty((1, size, size, 3), dtype=torch.uint8)
    crop.center_crop(data.getvalue(), pixels.shape[:2], crop.image_views(batch)[0])
    return batch[0].numpy()


@pytest.mark.parametrize("size", [128, 224, 288])
def test_center_crop_has_torchvisions_pixels(size: int, tmp_path: Path) -> None:
    images = {f"{height}x{width}": smooth_image(height, width) for height, width in SIZES}
    np.savez(tmp_path / "images.npz", **images)
    arguments = ("center", tmp_path / "images.npz", tmp_path / "crops.npz", size)
    run_script("torchvision_crops.py", *arguments, module="torchvision")
    theirs = np.load(tmp_path / "crops.npz")
    for name, pixels in images.items():
        difference = np.abs(center_crop(pixels, size).astype(int) - theirs[name].astype(int))
        assert difference.max() <= 2 and difference.mean() <= 0.03, name


def test_random_boxes_are_distributed_as_torchvisions() -> None:
    sizes = ("500x375", "375x500", "500x300", "900x200")  # width, height
    theirs = run_script("torchvision_crops.py", "random", DRAWS, *sizes, module="torchvision")
    for size in sizes:
        width, height = map(int, size.split("x"))
        ours, _ = random_boxes(0, 0, np.arange(DRAWS), [width] * DRAWS, [height] * DRAWS, 0.08)
        for our_column, their_column in zip(ours.T, np.array(theirs[size]).T, strict=True):  # top, left, height, width
            values = np.union1d(our_column, their_column)
            columns = (np.sort(our_column), np.sort(their_column))
            our_share, their_share = (np.searchsorted(column, values, side="right") / DRAWS for column in columns)
            assert np.abs(our_share - their_share).max() <= KOLMOGOROV_SMIRNOV_BOUND, size


def test_trivial_augment_has_torchvisions_pixels_for_every_draw(tmp_path: Path) -> None:
    images = [smooth_image(96, 128), smooth_image(77, 61), np.full((32, 32, 3), 200, np.uint8)]
    draws = list(itertools.product(range(len(augment.OPERATIONS)), range(augment.STEPS), range(2)))
    np.savez(tmp_path / "images.npz", *images, draws=draws)
    run_script("torchvision_crops.py", "trivial", tmp_path / "images.npz", tmp_path / "out.npz", module="torchvision")
    theirs = np.load(tmp_path / "out.npz")
    for number, pixels in enumerate(images):
        for draw, expected in zip(draws, theirs[f"arr_{number}"], strict=True):
            left = iter(draw)
            generator: Any = SimpleNamespace(integers=lambda count, left=left: next(left) % count)
            assert np.array_equal(augment.trivial_augment(pixels, generator), expected), (number, draw)
