"""Tests of sample order and crop boxes, which are pure functions."""

from typing import Any

import numpy as np
import pytest

from train.data.order.rng import permutation, random_boxes, random_position_boxes, subset, uniforms

IDS = np.arange(400)


def test_permutation_and_uniforms_are_stable_across_versions() -> None:
    """A change of this order would make a resumed run repeat some images and drop others."""
    assert permutation(1, 2, 8).tolist() == [7, 0, 5, 4, 6, 2, 3, 1]
    assert uniforms(1, 2, np.array([3]), 3).tolist() == [[0.812803133229814, 0.9009957999841205, 0.28137797938180564]]


@pytest.mark.parametrize(("images", "scale", "count"), [(1000, 0.01, 10), (1001, 0.01, 11), (5, 0.001, 1), (7, 1.0, 7)])
def test_subset_has_expected_count_and_is_sorted(images: int, scale: float, count: int) -> None:
    ids = subset(3, images, scale)
    assert len(ids) == len(set(ids.tolist())) == count
    assert ids.tolist() == sorted(ids.tolist()) and ids[0] >= 0 and ids[-1] < images
    assert (ids == subset(3, images, scale)).all()
    assert count in (1, images) or (ids != subset(4, images, scale)).any()


@pytest.mark.parametrize("draw_boxes", [random_boxes, random_position_boxes])
@pytest.mark.parametrize("scale_or_aspect", [0.001, 0.08, 0.5, 2 / 3, 1.0])
def test_boxes_lie_inside_image(draw_boxes: Any, scale_or_aspect: float) -> None:
    for seed in range(5):
        widths, heights = np.random.default_rng(seed).choice([1, 2, 3, 31, 200, 375, 500, 3000], (2, 400))
        boxes, _ = draw_boxes(seed, 1, IDS, widths, heights, scale_or_aspect)
        top, left, height, width = boxes.T
        assert (top >= 0).all() and (left >= 0).all() and (height >= 1).all() and (width >= 1).all()
        assert (top + height <= heights).all() and (left + width <= widths).all()


@pytest.mark.parametrize(("min_scale", "aspect"), [(0.08, 1.0), (0.087, 1.0), (0.35, 1.0), (0.1, 0.75), (0.1, 4 / 3)])
def test_random_boxes_have_expected_scale_ratio_and_position_and_half_are_mirrored(
    min_scale: float, aspect: float
) -> None:
    boxes, flips = random_boxes(0, 0, np.arange(3000), [400] * 3000, [400] * 3000, min_scale, aspect)
    height, width = boxes[:, 2].astype(float), boxes[:, 3].astype(float)
    area, ratio = width * height / 400**2, width / height / aspect
    assert min_scale * 0.98 <= area.min() <= min_scale * 1.1 and 0.9 < area.max() <= 1
    assert ratio.min() == pytest.approx(3 / 4, abs=0.03) and ratio.max() == pytest.approx(4 / 3, abs=0.04)
    for start, length in ((boxes[:, 0], boxes[:, 2]), (boxes[:, 1], boxes[:, 3])):
        can_move = length < 399
        position = start[can_move] / (400 - length[can_move])
        assert position.mean() == pytest.approx(0.5, abs=0.03) and position.min() == 0 and position.max() == 1
    assert flips.mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("draw_boxes, parameter", [(random_boxes, 0.08), (random_position_boxes, 1.0)])
def test_boxes_depend_on_seed_and_epoch_and_not_on_batch(draw_boxes: Any, parameter: float) -> None:
    widths, heights = np.full(400, 500), np.full(400, 375)
    all_boxes, all_flips = draw_boxes(1, 2, IDS, widths, heights, parameter)
    ids = np.array([7, 300, 21])
    boxes, flips = draw_boxes(1, 2, ids, widths[ids], heights[ids], parameter)
    assert (boxes == all_boxes[ids]).all() and (flips == all_flips[ids]).all()
    assert (all_flips == random_boxes(1, 2, IDS, widths, heights, 0.5)[1]).all()
    for seed, epoch in ((2, 2), (1, 3)):
        other_boxes, _ = draw_boxes(seed, epoch, IDS, widths, heights, parameter)
        assert (other_boxes != all_boxes).any(axis=1).mean() > 0.99


@pytest.mark.parametrize(("width", "height", "aspect", "box"), [
    (256, 256, 1.0, (225, 225)),
    (341, 256, 1.0, (225, 225)),
    (256, 400, 1.0, (225, 225)),
    (600, 256, 1.5, (225, 337)),
    (300, 400, 1.5, (175, 263)),
])  # fmt: skip
def test_random_position_boxes_have_val_crop_size(width: int, height: int, aspect: float, box: tuple[int, int]) -> None:
    boxes, flips = random_position_boxes(0, 0, np.arange(3000), [width] * 3000, [height] * 3000, aspect)
    assert {tuple(size) for size in boxes[:, 2:].tolist()} == {box}
    for start, room in ((boxes[:, 0], height - box[0]), (boxes[:, 1], width - box[1])):
        assert start.min() == 0 and start.max() == room and start.mean() == pytest.approx(room / 2, rel=0.05)
    assert flips.mean() == pytest.approx(0.5, abs=0.03)


def fallback_by_torchvision(width: int, height: int) -> list[int]:
    """Return the box that torchvision's RandomResizedCrop takes when no random box fits."""
    in_ratio, lowest, highest = width / height, 3 / 4, 4 / 3
    w, h = width, height
    if in_ratio < lowest:
        h = int(round(w / lowest))  # noqa: RUF046
    elif in_ratio > highest:
        w = int(round(h * highest))  # noqa: RUF046
    return [(height - h) // 2, (width - w) // 2, h, w]


def test_random_boxes_without_fit_are_torchvisions() -> None:
    """A box of the whole area fits into no image whose sides differ by more than a third."""
    rng = np.random.default_rng(0)
    short_sides = rng.integers(30, 400, 2000)
    long_sides = (short_sides * rng.uniform(1.4, 30, 2000)).astype(int)
    is_wide = rng.random(2000) < 0.5
    widths, heights = np.where(is_wide, (long_sides, short_sides), (short_sides, long_sides))
    boxes, _ = random_boxes(0, 0, np.arange(2000), widths, heights, 1.0)
    assert boxes.tolist() == [
        fallback_by_torchvision(*size) for size in zip(widths.tolist(), heights.tolist(), strict=True)
    ]
