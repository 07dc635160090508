"""Tests of the batch sampler: every image once, the same chunks on any number of ranks, from any position."""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
from support.trainer_in_process import RandomImages, make_phase, make_recipe

from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.recipe.schedule import Epoch, Schedule

CASES = [  # images, batch, gpus
    (1, 1, 1),
    (17, 8, 2),  # one image left over
    (33, 8, 2),
    (50, 8, 2),  # two images left over for two chunks
    (64, 8, 4),  # nothing left over
    (65, 64, 1),
    (7, 8, 5),  # not one full chunk
    *((random.Random(n).randint(1, 300), random.Random(-n).randint(1, 40), n % 6 + 1) for n in range(1, 7)),
]


def make_schedule(images: int, batch: int, gpus: int, epochs: int = 2, rect_train: bool = False) -> Schedule:
    phases = [
        make_phase((0, 1), batch, 0.1, size=32, copy=64, min_scale=0.3),
        make_phase((1, epochs), batch, 0.1, size=64, rect_val=True, rect_train=rect_train, augment=False),
    ]
    return Schedule(make_recipe(*phases), images, gpus)


def make_samplers(schedule: Schedule, world: int, seed: int = 3) -> list[DistributedBatchSampler]:
    # Only widths and heights of the images are read.
    indexes: Any = {("train", None): RandomImages(0, schedule.images), ("val", None): RandomImages(0, 23)}
    return [DistributedBatchSampler(schedule, indexes, seed, rank, world) for rank in range(world)]


def requests_by_step(sampler: DistributedBatchSampler, epoch: Epoch) -> list[list[BatchRequest]]:
    """Return the requests of one rank, cut where `chunk_count` says that a step ends."""
    stream = sampler.train_requests(epoch)
    steps = [[next(stream) for _ in range(sampler.chunk_count(epoch, step))] for step in range(epoch.steps)]
    assert list(stream) == [], "chunk_count() is too small"
    return steps


def as_dicts(requests: list[BatchRequest]) -> list[dict[str, Any]]:
    return [{**vars(request), "ids": request.ids.tolist()} for request in requests]


@pytest.mark.parametrize("rect_train", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_train_requests_weigh_each_image_once_in_the_same_chunks_at_any_world_size(
    case: tuple[int, int, int], rect_train: bool
) -> None:
    schedule = make_schedule(*case, rect_train=rect_train)
    epoch = schedule.epochs[1]

    def chunks(world: int) -> list[set[tuple[Any, ...]]]:
        """Return the shape and the chunks of each step over all ranks, without fillers."""
        samplers = make_samplers(schedule, world)
        ranks = [requests_by_step(sampler, epoch) for sampler in samplers]
        shapes = [{request.shape for requests in step for request in requests} for step in zip(*ranks, strict=True)]
        for step, (shape,) in enumerate(shapes):  # one at all ranks
            assert shape in samplers[0].step_shapes(epoch, step)
        weights = np.zeros(schedule.images)
        for request in chain.from_iterable(chain.from_iterable(ranks)):
            np.add.at(weights, request.ids, request.sample_weight)
        assert (weights == 1).all()
        return [
            {
                (request.shape, *request.ids.tolist())
                for requests in step
                for request in requests
                if request.sample_weight
            }
            for step in zip(*ranks, strict=True)
        ]

    steps = chunks(1)
    assert all(chunks(world) == steps for world in range(1, 6))
    for step, step_chunks in enumerate(steps):
        assert len({image_id for _, *ids in step_chunks for image_id in ids}) == epoch.images_in_step(step)
        assert all(2 <= len(ids) <= max(2, case[1]) for _, *ids in step_chunks)  # batch norm needs two at least


@pytest.mark.parametrize("rect_train", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_requests_from_any_position_is_rest_of_stream(world: int, rect_train: bool) -> None:
    schedule = make_schedule(50, 4, 3, epochs=3, rect_train=rect_train)
    for sampler in make_samplers(schedule, world):
        whole = list(sampler.all_requests(0, 0))
        for number, epoch in enumerate(schedule.epochs):
            for step in (0, 1, epoch.steps - 1, epoch.steps):
                rest = list(sampler.all_requests(number, step))
                assert rest and as_dicts(rest) == as_dicts(whole[-len(rest) :])
                train_requests_left = sum(sampler.chunk_count(epoch, later) for later in range(step, epoch.steps))
                assert [request.split for request in rest].index("val") == train_requests_left
        assert list(sampler.all_requests(len(schedule.epochs), 0)) == []


@pytest.mark.parametrize(("number", "copy", "size", "train_fields", "views"), [
    (0, 64, 32, (0, 0.3, True), ["square"]),
    (1, None, 64, (1, 0.08, False), ["rect", "square"]),
])  # fmt: skip
def test_requests_follow_their_phase(
    number: int, copy: int | None, size: int, train_fields: tuple[Any, ...], views: list[str]
) -> None:
    schedule = make_schedule(16, 8, 1)
    (sampler,) = make_samplers(schedule, 1)
    for each in sampler.train_requests(schedule.epochs[number]):
        assert (each.split, each.copy, each.shape) == ("train", copy, (size, size))
        assert (each.epoch, each.min_scale, each.augment) == train_fields
    requests = sampler.val_requests(schedule.epochs[number])
    assert list(requests) == views
    for request in [*requests["square"], *requests.get("rect", [])]:
        assert (request.split, request.copy, request.min_scale) == ("val", copy, None)
        assert min(request.shape) == size and len(request.ids) <= 8
    assert {request.shape for request in requests["square"]} == {(size, size)}
