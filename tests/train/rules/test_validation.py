"""Validation counts each image once, for any number of images, processes and batch; on the crop the size asks for."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import PLAIN, Pixels, feed, linear, recipe, row, softmax

from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, SIDE_MULTIPLE, plan_rect_validation, rect_crop_shape
from train.distributed.process_group import ProcessGroup
from train.engine.validation import run_validation
from train.metrics.accuracy import Accuracy
from train.metrics.time_breakdown import TimeBreakdown
from train.recipe.schedule import Schedule

dice = random.Random(2)
CASES = [(1, 1), (1, 8), (2, 8), (7, 3), (16, 8), (53, 8), (54, 5), (31, 64)]  # images, batch
MORE = [(dice.randint(1, 300), dice.randint(1, 40), dice.randint(1, 9)) for _ in range(40)]  # and world


def by_hand(pixels: Pixels) -> tuple[float, float, float]:
    """Mean cross entropy, top-1 and top-5 in percent over all images at once, by sorting."""
    net = linear(pixels.classes)
    weight, bias = (one.detach().numpy() for one in net.parameters())
    scores, labels = pixels.numbers(range(pixels.val)) @ weight.T + bias, pixels.labels[: pixels.val]
    places = (-scores).argsort(1).argsort(1)[np.arange(pixels.val), labels]
    loss = -np.log(softmax(scores)[np.arange(pixels.val), labels]).mean()
    top1, top5 = (100 * int((places < best).sum()) / pixels.val for best in (1, 5))
    return float(loss), top1, top5


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_validation_counts_exactly_all_images_with_fewer_than_there_are_processes_too(
    world: int, in_group: Any
) -> None:
    """Sums of whole numbers, no padding (torch's DistributedSampler counts up to world - 1 images twice)."""

    def work(group: ProcessGroup) -> list[Accuracy]:
        found = []
        for images, batch in CASES:
            pixels = Pixels(1, images, classes=12)
            plan = Schedule(recipe(row((0, 1), batch, 0.1)), 1, 1)
            works = feed(plan, pixels, group.rank, world).val_requests(plan.epochs[0])["square"]
            batches = map(pixels.make, works)
            times = TimeBreakdown(group.device)
            found.append(run_validation(group, linear(12), batches, len(works), images, PLAIN, times))
        return found

    for each in in_group(world, work):
        for (images, _), one in zip(CASES, each, strict=True):
            loss, top1, top5 = by_hand(Pixels(1, images, classes=12))
            assert (one.images, one.top1, one.top5) == (images, top1, top5)
            assert one.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("images", "batch", "world"), MORE)
def test_square_or_rectangular_each_image_is_asked_for_once(images: int, batch: int, world: int) -> None:
    pixels = Pixels(1, images)
    plan = Schedule(recipe(row((0, 1), batch, 0.1, size=64, rect_val=True)), 1, 1)
    for view in ("rect", "square"):
        works = [
            one for rank in range(world) for one in feed(plan, pixels, rank, world).val_requests(plan.epochs[0])[view]
        ]
        assert sorted(number for one in works for number in one.ids.tolist()) == list(range(images))
        assert all(1 <= len(one.ids) <= batch for one in works)


@pytest.mark.parametrize("size", [128, 160, 224, 288])
def test_a_rectangle_is_of_whole_32s_and_lies_inside_the_resized_image(size: int) -> None:
    """Resized to a short side of 1.14 size, aspect kept; the crop's short side is `size`, its long one the longest
    multiple of 32 up to 1.5 size with the image's aspect (2018: any multiple of 8, a mean aspect for each batch).
    """
    assert (RESIZE_TO_CROP_RATIO, SIDE_MULTIPLE) == (1.14, 32)
    sides = np.random.default_rng(size).integers(30, 2000, (500, 2))
    for width, height in [*sides.tolist(), (500, 375), (375, 500), (333, 333), (3000, 40), (40, 3000)]:
        high, wide = rect_crop_shape(width, height, size)
        resized = [round(1.14 * size) * side / min(width, height) for side in (height, width)]
        assert high % 32 == 0 and wide % 32 == 0 and min(high, wide) == size
        assert high <= resized[0] + 0.5 and wide <= resized[1] + 0.5
        aspect = min(max(width, height) / min(width, height), 1.5)
        assert max(high, wide) / size <= aspect + 1e-9 < (max(high, wide) + 32) / size + 1e-6
        assert (wide >= high) if width >= height else (high >= wide)


@pytest.mark.parametrize("world", [1, 3])
def test_a_batch_of_rectangles_has_one_shape_that_is_each_images_own(world: int) -> None:
    """So that an image's crop depends on neither its batch nor the number of processes."""
    widths, heights = np.random.default_rng(1).integers(60, 900, (2, 300))
    for rank in range(world):
        for shape, ids in plan_rect_validation(widths, heights, 224, 16, rank, world):
            assert {rect_crop_shape(int(widths[one]), int(heights[one]), 224) for one in ids} == {shape}


def test_the_scores_of_validation_are_of_a_net_in_eval_mode() -> None:
    """Else the running statistics, averaged over the workers, would not be used, and would change."""
    from support.trainer_in_process import ALONE

    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), *linear()).double()
    pixels = Pixels(1, 20)
    plan = Schedule(recipe(row((0, 1), 8, 0.1)), 1, 1)
    before = {name: one.clone() for name, one in net.state_dict().items()}
    works = feed(plan, pixels).val_requests(plan.epochs[0])["square"]
    run_validation(ALONE, net, map(pixels.make, works), len(works), 20, PLAIN, TimeBreakdown(ALONE.device))
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())
