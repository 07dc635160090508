"""Tests of rectangular validation: the crop shape of an image, and which rank validates it."""

import itertools
from typing import Any

import pytest

from train.data.order.rect_val import plan_rect_validation, plan_square_validation


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("images", [1, 2, 23, 211])
def test_validation_plans_balance_ranks(world: int, images: int, random_sizes: Any) -> None:
    widths, heights = random_sizes(images, seed=images)
    arguments = [(64, 8, rank, world) for rank in range(world)]
    for plans in (
        [plan_square_validation(images, *each) for each in arguments],
        [plan_rect_validation(widths, heights, *each) for each in arguments],
    ):
        counts = [sum(len(ids) for _, ids in plan) for plan in plans]
        assert sum(counts) == images and max(counts) - min(counts) <= 1


def test_plan_rect_validation_orders_batches_by_aspect(random_sizes: Any) -> None:
    widths, heights = random_sizes(300)
    plan = plan_rect_validation(widths, heights, 128, 16, 0, 1)
    aspects = [float(widths[number] / heights[number]) for _, ids in plan for number in ids]
    assert aspects == sorted(aspects)
    runs = [shape for shape, _ in itertools.groupby(shape for shape, _ in plan)]  # of adjacent batches of one shape
    assert len(runs) == len(set(runs))
    full_batches = sum(len(ids) == 16 for _, ids in plan)
    assert full_batches >= len(plan) - len(runs)  # every batch is full, except the last of each shape
