"""Tests of rectangular training: the order of an epoch, the shape of each step, and the crops that fit it."""

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


def random_sizes(images: int, seed: int = 0) -> tuple[Any, Any]:
    """Return widths and heights with ImageNet's distribution, and some extremes."""
    rng = np.random.default_rng(seed)
    ratios = np.exp(rng.normal(0.2, 0.35, images)).clip(0.2, 5)
    short = rng.integers(60, 900, images)
    return np.maximum(1, (short * ratios).astype(np.int64)), short


def random_codes(images: int) -> Any:
    return encode_aspect_ratios(*random_sizes(images, images))


def aspect_of(shape: tuple[int, int]) -> float:
    return shape[1] / shape[0]


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_rect_train_shapes_are_few_of_equal_pixels_and_symmetric() -> None:
    for size in range(16, 400):
        shapes = rect_train_shapes(size)
        assert (size, size) in shapes and len(shapes) <= 9 and len(shapes) % 2 == 1
        assert {(width, height) for height, width in shapes} == set(shapes)
        assert [aspect_of(shape) for shape in shapes] == sorted({aspect_of(shape) for shape in shapes})
        for height, width in shapes:
            assert abs(height * width / size**2 - 1) <= PIXEL_TOLERANCE
            assert max(height, width) / min(height, width) <= MAX_ASPECT_RATIO


@pytest.mark.parametrize(
    ("size", "multiple"), [(32, 4), (64, 8), (128, 16), (160, 32), (224, 32), (288, 32), (352, 32)]
)
def test_rect_train_shapes_have_largest_possible_side_multiple(size: int, multiple: int) -> None:
    rectangles = [shape for shape in rect_train_shapes(size) if shape != (size, size)]
    assert rectangles and all(side % multiple == 0 for shape in rectangles for side in shape)


def test_rect_train_shapes_at_known_sizes() -> None:
    assert rect_train_shapes(224) == ((256, 192), (224, 224), (192, 256))
    assert rect_train_shapes(128) == ((144, 112), (128, 128), (112, 144))
    assert rect_train_shapes(352) == ((416, 288), (384, 320), (352, 352), (320, 384), (288, 416))
    assert rect_train_shapes(16) == ((16, 16),)


@pytest.mark.parametrize("batch", [1, 8, 512])
def test_rect_train_shapes_fit_into_batch_buffers(batch: int) -> None:
    """A buffer is sized for the largest square batch; a batch that does not fit would go through the slower queue."""
    for size in range(16, 600):
        slot_bytes = int(MAX_RECTANGLE_TO_SQUARE * 3 * batch * size**2)
        assert all(3 * batch * height * width <= slot_bytes for height, width in rect_train_shapes(size))


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "batch"), CASES)
def test_rect_epoch_order_uses_every_image_once(images: int, batch: int) -> None:
    codes = random_codes(images)
    for epoch in range(3):
        order, step_shapes = rect_epoch_order(1, epoch, codes, batch, 224)
        assert sorted(order.tolist()) == list(range(images))
        assert len(step_shapes) == -(-images // batch) and set(step_shapes) <= set(rect_train_shapes(224))


def test_rect_epoch_order_is_stable_across_versions() -> None:
    """A change of this order would make a resumed run repeat some images and drop others."""
    codes = encode_aspect_ratios([4, 3, 3, 5, 2, 4, 9, 3], [3, 4, 3, 5, 3, 3, 1, 2])
    order, step_shapes = rect_epoch_order(1, 2, codes, 3, 224)
    assert order.tolist() == [7, 0, 6, 5, 4, 2, 3, 1]
    assert step_shapes == [(192, 256), (224, 224), (224, 224)]
    codes = encode_aspect_ratios(100 + np.arange(200) * 37 % 400, [300] * 200)
    order, _ = rect_epoch_order(1, 2, codes, 8, 224)
    assert zlib.crc32(order.astype("<i8").tobytes()) == 4002009531


def test_rect_epoch_order_depends_on_seed_and_epoch() -> None:
    codes = random_codes(200)
    keys = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({rect_epoch_order(*key, codes, 16, 224)[0].tobytes() for key in keys}) == len(keys)
    assert rect_epoch_order(3, 1, codes, 16, 224)[0].tolist() == rect_epoch_order(3, 1, codes, 16, 224)[0].tolist()


def full_steps(codes: Any, batch: int, epoch: int, size: int = 224) -> list[tuple[Any, tuple[int, int]]]:
    """Return (image IDs, shape) of the full steps of an epoch."""
    order, step_shapes = rect_epoch_order(5, epoch, codes, batch, size)
    count = len(codes) // batch
    return list(zip(order[: count * batch].reshape(count, batch), step_shapes, strict=False))


def test_rect_epoch_order_steps_have_nearly_one_ratio() -> None:
    width, height = random_sizes(4000)
    codes = encode_aspect_ratios(width, height)
    deviations = []
    for ids, shape in full_steps(codes, 40, 0):
        bounded = (width[ids] / height[ids]).clip(1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO)
        deviations.append(np.log(bounded).std())
        mean = float(np.log(bounded).mean())
        nearest = min(abs(np.log(aspect_of(candidate)) - mean) for candidate in rect_train_shapes(224))
        assert abs(np.log(aspect_of(shape)) - mean) <= nearest + 0.02  # codes are not exactly logarithms of ratios
    overall = np.log((width / height).clip(1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO)).std()
    assert np.mean(deviations) < 0.06 < 0.2 < overall


def test_rect_epoch_order_shuffles_steps_and_images() -> None:
    codes = random_codes(4000)
    means = [codes[ids].mean() for ids, _ in full_steps(codes, 40, 0)]
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.4
    differences = [codes[ids[:20]].mean() - codes[ids[20:]].mean() for ids, _ in full_steps(codes, 40, 0)]  # of halves
    assert abs(np.mean(differences)) < 2 * np.std(differences) / np.sqrt(len(differences)) + 1e-9


def test_rect_epoch_order_mixes_equal_ratios_across_epochs() -> None:
    codes = np.repeat(encode_aspect_ratios([400, 300, 500], [300, 400, 333]), 400)
    partners = [
        {number for ids, _ in full_steps(codes, 20, epoch) if 7 in ids for number in ids.tolist()} for epoch in range(6)
    ]
    assert len(set.union(*partners)) > 0.8 * sum(map(len, partners))


def test_rect_epoch_order_mixes_only_neighboring_ratios() -> None:
    codes = np.repeat(encode_aspect_ratios([400, 420, 300], [300, 300, 400]), 200)  # 1.33 and 1.4, and .75
    mixed = 0
    for ids, _ in full_steps(codes, 20, 0):
        kinds = Counter((ids // 200).tolist())
        mixed += 0 in kinds and 1 in kinds
        assert 2 not in kinds or kinds[2] == 20
    assert mixed >= 10


def test_rect_epoch_order_last_step_is_that_of_square_training() -> None:
    codes = random_codes(330)
    for epoch in range(3):
        order, step_shapes = rect_epoch_order(4, epoch, codes, 100, 128)
        assert order[300:].tolist() == permutation(4, epoch, 330)[300:].tolist()
        assert [step_shapes[3]] == possible_step_shapes(codes, 128, full=False)


def test_possible_step_shapes_contains_all_step_shapes() -> None:
    for images, batch in CASES:
        codes = random_codes(images)
        for size in (64, 224, 352):
            full = possible_step_shapes(codes, size, full=True)
            last = possible_step_shapes(codes, size, full=False)
            assert len(last) == 1
            for epoch in range(4):
                _, step_shapes = rect_epoch_order(0, epoch, codes, batch, size)
                assert set(step_shapes[: images // batch]) <= set(full)
                assert set(step_shapes[images // batch :]) <= set(last)


def test_encode_aspect_ratios_is_antisymmetric_and_scale_free() -> None:
    width, height = random_sizes(500)
    codes = encode_aspect_ratios(width, height)
    assert (encode_aspect_ratios(3 * width, 3 * height) == codes).all()
    assert (abs(encode_aspect_ratios(height, width) + codes) <= 1).all()
    assert (np.diff(codes[np.argsort(width / height)]) >= 0).all()


def test_rect_epoch_order_of_a_million_uses_every_image_once() -> None:
    """The sorting keys pack ratio and position into 64 bits, which must be enough for a million images."""
    order, _ = rect_epoch_order(0, 0, encode_aspect_ratios(*random_sizes(1_000_000)), 256, 224)  # 0.15 s
    assert (np.sort(order) == np.arange(1_000_000)).all()


# --- crops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aspect", [0.75, 1.0, 4 / 3])
def test_random_boxes_have_ratios_around_aspect(aspect: float) -> None:
    width, height = np.full(3000, 400), np.full(3000, 400)
    boxes, _ = random_boxes(0, 0, np.arange(3000), width, height, 0.1, aspect)
    top, left, box_height, box_width = boxes.T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + box_height <= 400).all() and (left + box_width <= 400).all()
    factors = (box_width / box_height) / aspect
    assert factors.min() == pytest.approx(3 / 4, abs=0.03) and factors.max() == pytest.approx(4 / 3, abs=0.04)
    assert np.median(factors) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("aspect", [0.75, 4 / 3])
def test_random_boxes_without_fit_is_centered(aspect: float) -> None:
    (box,), _ = random_boxes(0, 0, np.arange(1), [3000], [30], 0.9, aspect)
    width = round(40 * aspect)
    assert box.tolist() == [0, (3000 - width) // 2, 30, width]


def test_decode_batch_draws_boxes_of_its_aspect(tiny_data: Path) -> None:
    index, ids = load_index(tiny_data, "train"), np.arange(12)
    request = BatchRequest("train", None, ids, (48, 64), 5, 0.3)
    batch = BatchDecoder({("train", None): index}, 3).decode_batch(request)
    sizes = (index.widths[ids], index.heights[ids])
    boxes, mirrors = random_boxes(3, 5, ids, *sizes, 0.3, 64 / 48)
    expected = torch.empty_like(batch.images)
    for number, image in enumerate(image_views(expected)):
        width, height = (int(side[number]) for side in sizes)
        box = (int(boxes[number, 0]), int(boxes[number, 1]), int(boxes[number, 2]), int(boxes[number, 3]))
        crop_and_resize(index.read(number), (height, width), box, bool(mirrors[number]), image)
    assert torch.equal(batch.images, expected)
