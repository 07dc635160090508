"""Rectangles: order and shapes of an epoch of training; shapes of a validation, and which rank has which."""

import zlib
from typing import Any

import numpy as np
import pytest

from train.data.order.rect_train import encode_aspect_ratios, rect_epoch_order, rect_train_shapes
from train.data.order.rect_val import plan_rect_validation, plan_square_validation


def random_sizes(images: int, seed: int = 0) -> tuple[Any, Any]:
    """Return widths and heights with ImageNet's distribution, and some extremes."""
    rng = np.random.default_rng(seed)
    ratios = np.exp(rng.normal(0.2, 0.35, images)).clip(0.2, 5)
    short = rng.integers(60, 900, images)
    return np.maximum(1, (short * ratios).astype(np.int64)), short


def test_rect_train_shapes_at_known_sizes() -> None:
    assert rect_train_shapes(224) == ((256, 192), (224, 224), (192, 256))
    assert rect_train_shapes(128) == ((144, 112), (128, 128), (112, 144))
    assert rect_train_shapes(352) == ((416, 288), (384, 320), (352, 352), (320, 384), (288, 416))
    assert rect_train_shapes(34) == ((40, 28), (36, 32), (34, 34), (32, 36), (28, 40)), "within the tolerance"
    assert rect_train_shapes(16) == ((16, 16),)


def test_rect_epoch_order_is_stable_across_versions() -> None:
    """A change of this order would make a resumed run repeat some images and drop others."""
    codes = encode_aspect_ratios([4, 3, 3, 5, 2, 4, 9, 3], [3, 4, 3, 5, 3, 3, 1, 2])
    order, step_shapes = rect_epoch_order(1, 2, codes, 3, 224)
    assert order.tolist() == [7, 0, 6, 5, 4, 2, 3, 1]
    assert step_shapes == [(192, 256), (224, 224), (224, 224)]
    codes = encode_aspect_ratios(100 + np.arange(200) * 37 % 400, [300] * 200)
    order, _ = rect_epoch_order(1, 2, codes, 8, 224)
    assert zlib.crc32(order.astype("<i8").tobytes()) == 4002009531


def test_rect_epoch_order_of_a_million_uses_every_image_once() -> None:
    """The sorting keys pack ratio and position into 64 bits, which must be enough for a million images."""
    order, _ = rect_epoch_order(0, 0, encode_aspect_ratios(*random_sizes(1_000_000)), 256, 224)  # 0.15 s
    assert (np.sort(order) == np.arange(1_000_000)).all()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("images", [1, 2, 23, 211])
def test_validation_plans_balance_ranks(world: int, images: int) -> None:
    widths, heights = random_sizes(images, seed=images)
    arguments = [(64, 8, rank, world) for rank in range(world)]
    for plans in (
        [plan_square_validation(images, *each) for each in arguments],
        [plan_rect_validation(widths, heights, *each) for each in arguments],
    ):
        counts = [sum(len(ids) for _, ids in plan) for plan in plans]
        assert sum(counts) == images and max(counts) - min(counts) <= 1
