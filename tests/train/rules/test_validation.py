"""Rules of validation: each image is counted once, on any world size; rectangles have each image's own shape."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import (
    PLAIN_PREPROCESSOR,
    RandomImages,
    linear_classifier,
    make_phase,
    make_recipe,
    make_sampler,
    softmax,
)
from torch import nn

from train.data.order.center_crop import RESIZE_TO_CROP_RATIO, resized_size
from train.data.order.rect_val import SIDE_MULTIPLE, rect_crop_shape
from train.distributed.process_group import ProcessGroup
from train.engine.validation import run_validation
from train.metrics.accuracy import Accuracy
from train.metrics.time_breakdown import TimeBreakdown
from train.recipe.schedule import Schedule

generator = random.Random(2)
CASES = [(1, 1), (1, 8), (2, 8), (7, 3), (16, 8), (53, 8), (54, 5), (31, 64)]  # images, batch
RANDOM_CASES = [
    (generator.randint(1, 300), generator.randint(1, 40), generator.randint(1, 9)) for _ in range(40)
]  # images, batch, world size


def numpy_accuracy(dataset: RandomImages) -> tuple[float, float, float, list[list[int]]]:
    """Return mean cross entropy, top-1 and top-5 in percent over all images at once, and the answers by class."""
    net = linear_classifier(dataset.classes)
    weight, bias = (parameter.detach().numpy() for parameter in net.parameters())
    scores, labels = dataset.inputs(range(dataset.val)) @ weight.T + bias, dataset.labels[: dataset.val]
    label_ranks = (-scores).argsort(1).argsort(1)[np.arange(dataset.val), labels]
    loss = -np.log(softmax(scores)[np.arange(dataset.val), labels]).mean()
    top1, top5 = (100 * int((label_ranks < k).sum()) / dataset.val for k in (1, 5))
    confusion = np.zeros((dataset.classes, dataset.classes), dtype=int)
    np.add.at(confusion, (labels, scores.argmax(1)), 1)
    return float(loss), top1, top5, confusion.tolist()


def network() -> nn.Sequential:
    """Return a linear classifier behind a batch norm that changes nothing in eval mode."""
    return nn.Sequential(nn.BatchNorm2d(3, eps=0.0, affine=False), *linear_classifier(12)).double()


@pytest.mark.parametrize("world", [1, 3])
def test_run_validation_counts_each_image_once_on_any_world_size(world: int, in_group: Any) -> None:
    """Also with fewer images than processes, by its class too, and in eval mode.

    torch's DistributedSampler counts up to world size - 1 images twice.
    """

    def work(group: ProcessGroup) -> list[tuple[Accuracy, list[list[int]]]]:
        accuracies = []
        for images, batch in CASES:
            dataset = RandomImages(1, images, classes=12)
            schedule = Schedule(make_recipe(make_phase((0, 1), batch, 0.1)), 1, 1)
            requests = make_sampler(schedule, dataset, group.rank, world).val_requests(schedule.epochs[0])["square"]
            batches = map(dataset.decode_batch, requests)
            counted, confusion = (group, network(), batches, len(requests), images), torch.zeros(12, 12).long()
            times = TimeBreakdown(group.device)
            accuracy = run_validation(*counted, PLAIN_PREPROCESSOR, times, confusion=confusion)
            accuracies.append((accuracy, confusion.tolist()))
        return accuracies

    for accuracies in in_group(world, work):
        for (images, _), (accuracy, confusion) in zip(CASES, accuracies, strict=True):
            loss, top1, top5, expected = numpy_accuracy(RandomImages(1, images, classes=12))
            assert (accuracy.images, accuracy.top1, accuracy.top5) == (images, top1, top5) and confusion == expected
            assert accuracy.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("view", ["rect", "square"])
def test_val_requests_hold_each_image_once_in_its_own_shape(view: str) -> None:
    """So the crop of an image depends neither on its batch nor on the number of processes."""

    def own_shape(image_id: int) -> tuple[int, int]:
        width, height = int(dataset.widths[image_id]), int(dataset.heights[image_id])
        return rect_crop_shape(width, height, 224) if view == "rect" else (224, 224)

    for images, batch, world in RANDOM_CASES:
        dataset = RandomImages(1, images)
        schedule = Schedule(make_recipe(make_phase((0, 1), batch, 0.1, size=224, rect_val=True)), 1, 1)
        samplers = [make_sampler(schedule, dataset, rank, world) for rank in range(world)]
        requests = [request for sampler in samplers for request in sampler.val_requests(schedule.epochs[0])[view]]
        assert sorted(image_id for request in requests for image_id in request.ids.tolist()) == list(range(images))
        for request in requests:
            assert 1 <= len(request.ids) <= batch
            assert {own_shape(image_id) for image_id in request.ids.tolist()} == {request.shape}


@pytest.mark.parametrize("size", [128, 288])
def test_rect_crop_shape_is_multiple_of_32_inside_resized_image(size: int) -> None:
    """The image is resized to a short side of 1.14 size. The crop's short side is `size`; its long side is the longest
    multiple of 32 that the image's aspect ratio allows, up to 1.5 size. In 2018: multiples of 8, and one mean aspect
    ratio per batch.
    """
    assert (RESIZE_TO_CROP_RATIO, SIDE_MULTIPLE) == (1.14, 32)
    sides = np.random.default_rng(size).integers(30, 2000, (500, 2))
    for width, height in [*sides.tolist(), (500, 375), (375, 500), (333, 333), (3000, 40), (40, 3000)]:
        crop_height, crop_width = rect_crop_shape(width, height, size)
        resized = resized_size((height, width), (crop_height, crop_width))
        assert resized == tuple(int(1.14 * size) * side // min(width, height) for side in (height, width))
        assert crop_height % 32 == 0 and crop_width % 32 == 0 and min(crop_height, crop_width) == size
        assert crop_height <= resized[0] and crop_width <= resized[1]
        aspect = min(max(width, height) / min(width, height), 1.5)
        assert max(crop_height, crop_width) / size <= aspect + 1e-9 < (max(crop_height, crop_width) + 32) / size + 1e-6
        assert (crop_width >= crop_height) if width >= height else (crop_height >= crop_width)
