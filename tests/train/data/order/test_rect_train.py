"""Rectangular training: the order of an epoch, the shape of each step, and the crops that fit it. Pure functions."""

import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train.data.index.open import load_index
from train.data.loading.crop import crop_and_resize, image_views
from train.data.loading.loader import MAX_RECTANGLE_TO_SQUARE, BatchDecoder
from train.data.order.rect_train import (
    PIXEL_TOLERANCE,
    encode_aspect_ratios,
    possible_step_shapes,
    rect_epoch_order,
    rect_train_shapes,
)
from train.data.order.rect_val import MAX_ASPECT_RATIO
from train.data.order.rng import permutation, random_boxes
from train.data.order.work import BatchRequest

CASES = [(1, 1), (2, 5), (7, 7), (50, 16), (64, 16), (333, 20), (1000, 64)]  # images, batch


def some(images: int, seed: int = 0) -> tuple[Any, Any]:
    """Widths and heights with ImageNet's spread, and some extremes."""
    dice = np.random.default_rng(seed)
    ratios = np.exp(dice.normal(0.2, 0.35, images)).clip(0.2, 5)
    short = dice.integers(60, 900, images)
    return np.maximum(1, (short * ratios).astype(np.int64)), short


def some_leans(images: int) -> Any:
    return encode_aspect_ratios(*some(images, images))


def ratio(shape: tuple[int, int]) -> float:
    return shape[1] / shape[0]


# --- shapes -------------------------------------------------------------------------------------------------------


def test_rect_train_shapes_are_few_of_equal_pixels_and_symmetric() -> None:
    for size in range(16, 400):
        found = rect_train_shapes(size)
        assert (size, size) in found and len(found) <= 9 and len(found) % 2 == 1
        assert {(width, height) for height, width in found} == set(found)
        assert [ratio(one) for one in found] == sorted({ratio(one) for one in found})
        for height, width in found:
            assert abs(height * width / size**2 - 1) <= PIXEL_TOLERANCE
            assert max(height, width) / min(height, width) <= MAX_ASPECT_RATIO


@pytest.mark.parametrize(("size", "unit"), [(32, 4), (64, 8), (128, 16), (160, 32), (224, 32), (288, 32), (352, 32)])
def test_rect_train_shapes_have_largest_possible_side_multiple(size: int, unit: int) -> None:
    rest = [one for one in rect_train_shapes(size) if one != (size, size)]
    assert rest and all(side % unit == 0 for one in rest for side in one)


def test_rect_train_shapes_at_known_sizes() -> None:
    assert rect_train_shapes(224) == ((256, 192), (224, 224), (192, 256))
    assert rect_train_shapes(128) == ((144, 112), (128, 128), (112, 144))
    assert rect_train_shapes(352) == ((416, 288), (384, 320), (352, 352), (320, 384), (288, 416))
    assert rect_train_shapes(16) == ((16, 16),)


@pytest.mark.parametrize("batch", [1, 8, 512])
def test_rect_train_shapes_fit_into_batch_buffers(batch: int) -> None:
    """Which is made for the largest square batch; what does not fit would be sent through the queue."""
    for size in range(16, 600):
        place = int(MAX_RECTANGLE_TO_SQUARE * 3 * batch * size**2)
        assert all(3 * batch * height * width <= place for height, width in rect_train_shapes(size))


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "batch"), CASES)
def test_rect_epoch_order_uses_every_image_once(images: int, batch: int) -> None:
    leans = some_leans(images)
    for epoch in range(3):
        found, steps = rect_epoch_order(1, epoch, leans, batch, 224)
        assert sorted(found.tolist()) == list(range(images))
        assert len(steps) == -(-images // batch) and set(steps) <= set(rect_train_shapes(224))


def test_rect_epoch_order_is_stable_across_versions() -> None:
    """A change of this order would make a resumed run repeat some images and drop others."""
    found, steps = rect_epoch_order(
        1, 2, encode_aspect_ratios([4, 3, 3, 5, 2, 4, 9, 3], [3, 4, 3, 5, 3, 3, 1, 2]), 3, 224
    )
    assert found.tolist() == [7, 0, 6, 5, 4, 2, 3, 1]
    assert steps == [(192, 256), (224, 224), (224, 224)]
    assert (
        zlib.crc32(
            rect_epoch_order(1, 2, encode_aspect_ratios(100 + np.arange(200) * 37 % 400, [300] * 200), 8, 224)[0]
            .astype("<i8")
            .tobytes()
        )
        == 4002009531
    )


def test_rect_epoch_order_depends_on_seed_and_epoch() -> None:
    leans = some_leans(200)
    keys = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({rect_epoch_order(*key, leans, 16, 224)[0].tobytes() for key in keys}) == len(keys)
    assert rect_epoch_order(3, 1, leans, 16, 224)[0].tolist() == rect_epoch_order(3, 1, leans, 16, 224)[0].tolist()


def batches(leans: Any, batch: int, epoch: int, size: int = 224) -> list[tuple[Any, tuple[int, int]]]:
    """The full steps of an epoch: image numbers and shape."""
    found, steps = rect_epoch_order(5, epoch, leans, batch, size)
    count = len(leans) // batch
    return list(zip(found[: count * batch].reshape(count, batch), steps, strict=False))


def test_rect_epoch_order_steps_have_nearly_one_ratio() -> None:
    width, height = some(4000)
    leans, known = encode_aspect_ratios(width, height), rect_train_shapes(224)
    inside = []
    for ids, shape in batches(leans, 40, 0):
        bounded = (width[ids] / height[ids]).clip(1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO)
        inside.append(np.log(bounded).std())
        mean = float(np.log(bounded).mean())
        best = min(abs(np.log(ratio(one)) - mean) for one in known)
        assert abs(np.log(ratio(shape)) - mean) <= best + 0.02  # a mean of ratios is not that of their logarithms
    overall = np.log((width / height).clip(1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO)).std()
    assert np.mean(inside) < 0.06 < 0.2 < overall


def test_rect_epoch_order_shuffles_steps_and_images() -> None:
    leans = some_leans(4000)
    means = [leans[ids].mean() for ids, _ in batches(leans, 40, 0)]
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.4
    halves = [leans[ids[:20]].mean() - leans[ids[20:]].mean() for ids, _ in batches(leans, 40, 0)]
    assert abs(np.mean(halves)) < 2 * np.std(halves) / np.sqrt(len(halves)) + 1e-9


def test_rect_epoch_order_mixes_equal_ratios_across_epochs() -> None:
    leans = np.repeat(encode_aspect_ratios([400, 300, 500], [300, 400, 333]), 400)
    partners = [
        {number for ids, _ in batches(leans, 20, epoch) if 7 in ids for number in ids.tolist()} for epoch in range(6)
    ]
    assert len(set.union(*partners)) > 0.8 * sum(map(len, partners))


def test_rect_epoch_order_mixes_only_neighboring_ratios() -> None:
    leans = np.repeat(encode_aspect_ratios([400, 420, 300], [300, 300, 400]), 200)  # 1.33 and 1.4, and .75
    mixed = 0
    for ids, _ in batches(leans, 20, 0):
        kinds = Counter((ids // 200).tolist())
        mixed += 0 in kinds and 1 in kinds
        assert 2 not in kinds or kinds[2] == 20
    assert mixed >= 10


def test_rect_epoch_order_last_step_is_that_of_square_training() -> None:
    leans = some_leans(330)
    for epoch in range(3):
        found, steps = rect_epoch_order(4, epoch, leans, 100, 128)
        assert found[300:].tolist() == permutation(4, epoch, 330)[300:].tolist()
        assert [steps[3]] == possible_step_shapes(leans, 128, full=False)


def test_possible_step_shapes_contains_all_step_shapes() -> None:
    for images, batch in CASES:
        leans = some_leans(images)
        for size in (64, 224, 352):
            full, last = possible_step_shapes(leans, size, full=True), possible_step_shapes(leans, size, full=False)
            assert len(last) == 1
            for epoch in range(4):
                steps = rect_epoch_order(0, epoch, leans, batch, size)[1]
                assert set(steps[: images // batch]) <= set(full)
                assert set(steps[images // batch :]) <= set(last)


def test_rect_epoch_order_of_square_images_is_square() -> None:
    leans = encode_aspect_ratios([300] * 50, [300] * 50)
    assert possible_step_shapes(leans, 224, full=True) == [(224, 224)] and set(
        rect_epoch_order(0, 0, leans, 8, 224)[1]
    ) == {(224, 224)}


def test_encode_aspect_ratios_is_antisymmetric_and_scale_free() -> None:
    width, height = some(500)
    found = encode_aspect_ratios(width, height)
    assert (encode_aspect_ratios(3 * width, 3 * height) == found).all() and (
        abs(encode_aspect_ratios(height, width) + found) <= 1
    ).all()
    assert (np.diff(found[np.argsort(width / height)]) >= 0).all()


def test_a_million_images_are_ordered_at_once() -> None:
    leans = encode_aspect_ratios(*some(1_000_000))
    least = np.inf
    for epoch in range(3):
        begun = time.perf_counter()
        rect_epoch_order(0, epoch, leans, 256, 224)
        least = min(least, time.perf_counter() - begun)
    assert least < 0.4 * 3  # 0.15 s on a quiet computer


# --- crops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aspect", [0.75, 1.0, 4 / 3])
def test_random_boxes_have_ratios_around_aspect(aspect: float) -> None:
    width, height = np.full(3000, 400), np.full(3000, 400)
    boxes, _ = random_boxes(0, 0, np.arange(3000), width, height, 0.1, aspect)
    top, left, high, wide = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + high <= 400).all() and (left + wide <= 400).all()
    found = (wide / high) / aspect
    assert found.min() == pytest.approx(3 / 4, abs=0.03) and found.max() == pytest.approx(4 / 3, abs=0.04)
    assert np.median(found) == pytest.approx(1, abs=0.06)


def test_random_boxes_cover_most_of_an_image_of_equal_aspect() -> None:
    ids = np.arange(4000)
    fit = random_boxes(0, 0, ids, np.full(4000, 400), np.full(4000, 300), 0.5, 4 / 3)[0]
    cut = random_boxes(0, 0, ids, np.full(4000, 400), np.full(4000, 300), 0.5)[0]
    square = random_boxes(0, 0, ids, np.full(4000, 346), np.full(4000, 346), 0.5)[0]
    shares = [float((boxes[:, 2] * boxes[:, 3] / 120_000).mean()) for boxes in (fit, square, cut)]
    assert shares[0] == pytest.approx(shares[1], abs=0.01) and shares[0] > shares[2] + 0.01


@pytest.mark.parametrize("aspect", [0.75, 4 / 3])
def test_random_boxes_without_fit_is_centered(aspect: float) -> None:
    (box,), _ = random_boxes(0, 0, np.arange(1), [3000], [30], 0.9, aspect)
    wide = round(40 * aspect)
    assert box.tolist() == [0, (3001 - wide) // 2, 30, wide]


def test_decode_batch_draws_boxes_of_its_aspect(tiny_data: Path) -> None:
    index, ids = load_index(tiny_data, "train"), np.arange(12)
    made = BatchDecoder({("train", None): index}, 3).decode_batch(BatchRequest("train", None, ids, (48, 64), 5, 0.3))
    sizes = (index.widths[ids], index.heights[ids])
    boxes, mirrors = random_boxes(3, 5, ids, *sizes, 0.3, 64 / 48)
    expected = torch.empty_like(made.images)
    for number, row in enumerate(image_views(expected)):
        width, height = (int(one[number]) for one in sizes)
        box = (int(boxes[number, 0]), int(boxes[number, 1]), int(boxes[number, 2]), int(boxes[number, 3]))
        crop_and_resize(index.read(number), (height, width), box, bool(mirrors[number]), row)
    assert torch.equal(made.images, expected)
