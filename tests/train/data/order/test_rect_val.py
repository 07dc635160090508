"""Rectangular validation: the shape of an image, and who validates it."""

from typing import Any

import numpy as np
import pytest

from train.data.order.rect_val import plan_rect_validation, plan_square_validation, rect_crop_shape

WORLDS = [1, 2, 3, 5]


def some(images: int, seed: int = 0) -> tuple[Any, Any]:
    """Widths and heights with ImageNet's spread, and some extremes."""
    dice = np.random.default_rng(seed)
    ratios = np.exp(dice.normal(0.2, 0.35, images)).clip(0.2, 5)
    short = dice.integers(60, 900, images)
    return np.maximum(1, (short * ratios).astype(np.int64)), short


def test_rect_crop_shape_has_given_short_side_and_multiple_of_32() -> None:
    for width, height in zip(*some(500), strict=True):
        for size in (64, 96, 288):
            shape = rect_crop_shape(int(width), int(height), size)
            assert min(shape) == size and max(shape) % 32 == 0
            assert max(shape) <= 1.5 * size
            assert (shape[1] >= shape[0]) == (width >= height) or shape[0] == shape[1]


def test_rect_crop_shape_is_as_long_as_image_allows() -> None:
    for width, height in zip(*some(500), strict=True):
        long = max(rect_crop_shape(int(width), int(height), 288)) / 288
        ratio = max(width, height) / min(width, height)
        assert long <= ratio + 1e-9
        assert long + 32 / 288 > min(ratio, 1.5) - 1e-9  # one step longer would not fit


@pytest.mark.parametrize(("width", "height", "size", "shape"), [
    (100, 100, 288, (288, 288)),
    (500, 375, 288, (288, 384)),
    (375, 500, 288, (384, 288)),
    (3000, 100, 288, (288, 416)),
    (1, 1, 32, (32, 32)),
    (500, 375, 100, (96, 128)),
])  # fmt: skip
def test_rect_crop_shape_of_known_sizes(width: int, height: int, size: int, shape: tuple[int, int]) -> None:
    assert rect_crop_shape(width, height, size) == shape


def test_rect_crop_shape_depends_only_on_aspect() -> None:
    for width, height in zip(*(one.tolist() for one in some(300)), strict=True):
        shape = rect_crop_shape(width, height, 128)
        assert rect_crop_shape(3 * width, 3 * height, 128) == shape == rect_crop_shape(7 * width, 7 * height, 128)
        assert rect_crop_shape(height, width, 128) == shape[::-1] or width == height


def test_rect_crop_shape_has_few_values() -> None:
    shapes = {rect_crop_shape(int(w), int(h), 288) for w, h in zip(*some(5000), strict=True)}
    assert 5 <= len(shapes) <= 2 * 5 - 1  # 288, 320, 352, 384, 416 and each turned


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("images", [1, 2, 23, 211])
@pytest.mark.parametrize("rect", [True, False])
def test_validation_plans_cover_images_once_and_balance_ranks(world: int, images: int, rect: bool) -> None:
    widths, heights = some(images, seed=images)
    counts, seen = [], []
    for rank in range(world):
        share = (64, 8, rank, world)
        plan = plan_rect_validation(widths, heights, *share) if rect else plan_square_validation(images, *share)
        assert all(1 <= len(ids) <= 8 for _, ids in plan)
        for shape, ids in plan:
            seen += ids.tolist()
            for number in ids:
                assert shape == (rect_crop_shape(int(widths[number]), int(heights[number]), 64) if rect else (64, 64))
        counts.append(sum(len(ids) for _, ids in plan))
    assert sorted(seen) == list(range(images))
    assert max(counts) - min(counts) <= 1


def test_plan_rect_validation_orders_batches_by_aspect() -> None:
    widths, heights = some(300)
    plan = plan_rect_validation(widths, heights, 128, 16, 0, 1)
    aspects = [float(widths[number] / heights[number]) for _, ids in plan for number in ids]
    assert aspects == sorted(aspects)
    changes = [shape for number, (shape, _) in enumerate(plan) if not number or plan[number - 1][0] != shape]
    assert len(changes) == len(set(changes))
    full = sum(len(ids) == 16 for _, ids in plan)
    assert full >= len(plan) - len(changes)  # but for the last of each shape every batch is full
