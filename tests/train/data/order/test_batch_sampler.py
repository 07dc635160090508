"""Who takes which images: everything once, the same chunks on any number of processes, from any position."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.index.folder import FolderIndex
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule

CASES = [  # images, batch, gpus
    (1, 1, 1),
    (17, 8, 2),  # one image left over
    (33, 8, 2),
    (50, 8, 2),  # two images left over for two chunks
    (64, 8, 4),  # nothing left over
    (65, 64, 1),
    (7, 8, 5),  # not one full chunk
    *((random.Random(n).randint(1, 300), random.Random(-n).randint(1, 40), n % 6 + 1) for n in range(1, 13)),
]
WORLDS = range(1, 6)


def schedule(images: int, batch: int, gpus: int, epochs: int = 2, rect_train: bool = False) -> Schedule:
    rows = [
        Phase(epochs=(0, 1), size=32, batch=batch, lr=0.1, copy=64, min_scale=0.3),
        Phase(epochs=(1, epochs), size=64, batch=batch, lr=0.1, rect_val=True, rect_train=rect_train),
    ]
    data = Data(name="some", root="some", train=images, val=23)
    return Schedule(Recipe(name="some", data=data, model=Model(name="resnet18"), phases=rows), images, gpus)


def index(images: int) -> FolderIndex:
    """So many images of all shapes; only the widths and heights are looked at."""
    rng = np.random.default_rng(images)
    zeros = np.zeros(images, np.int64)
    sides = rng.integers(100, 500, (2, images))
    paths = np.array(["one/x"] * images)
    where = Path("nowhere")
    return FolderIndex(folder=where, classes=("one",), paths=paths, labels=zeros, widths=sides[0], heights=sides[1])


def feeds(plan: Schedule, world: int, seed: int = 3) -> list[DistributedBatchSampler]:
    images = {("train", None): index(plan.images), ("val", None): index(23)}
    return [DistributedBatchSampler(plan, images, seed, rank, world) for rank in range(world)]


def by_step(feed: DistributedBatchSampler, epoch: Epoch) -> list[list[BatchRequest]]:
    """The stream of one process, cut where `count` says that a step ends."""
    stream = feed.train_requests(epoch)
    steps = [[next(stream) for _ in range(feed.chunk_count(epoch, step))] for step in range(epoch.steps)]
    assert list(stream) == [], "count() says less than there is"
    return steps


def weights(works: list[BatchRequest]) -> Counter[int]:
    """How much each image counts in all."""
    found: Counter[int] = Counter()
    for work in works:
        for number in work.ids.tolist():
            found[number] += work.sample_weight  # type: ignore[assignment]
    return found


def same(one: list[BatchRequest], other: list[BatchRequest]) -> bool:
    def plain(work: BatchRequest) -> tuple[Any, ...]:
        return (work.split, work.copy, work.ids.tolist(), work.shape, work.epoch, work.min_scale, work.sample_weight)

    return [plain(work) for work in one] == [plain(work) for work in other]


@pytest.mark.parametrize("rect_train", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_train_requests_weigh_each_image_once(case: tuple[int, int, int], rect_train: bool) -> None:
    plan = schedule(*case, rect_train=rect_train)
    for epoch in plan.epochs:
        for world in WORLDS:
            works = [work for feed in feeds(plan, world) for work in feed.train_requests(epoch)]
            found = weights(works)
            assert sorted(found) == list(range(case[0]))
            assert set(found.values()) == {1.0}


@pytest.mark.parametrize("rect_train", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_train_requests_have_same_chunks_at_any_world_size(case: tuple[int, int, int], rect_train: bool) -> None:
    plan = schedule(*case, rect_train=rect_train)
    epoch = plan.epochs[1]

    def chunks(world: int) -> list[set[tuple[int, ...]]]:
        ranks = [by_step(feed, epoch) for feed in feeds(plan, world)]
        return [
            {tuple(work.ids.tolist()) for works in step for work in works if work.sample_weight}
            for step in zip(*ranks, strict=True)
        ]

    alone = chunks(1)
    assert all(chunks(world) == alone for world in WORLDS)
    for step, found in enumerate(alone):
        assert len({number for chunk in found for number in chunk}) == epoch.images_in_step(step)
        assert all(2 <= len(chunk) <= max(2, case[1]) for chunk in found)  # two: what batch norm needs at least


@pytest.mark.parametrize("case", CASES)
def test_chunk_count_matches_train_requests(case: tuple[int, int, int]) -> None:
    plan = schedule(*case)
    for world in WORLDS:
        for feed in feeds(plan, world):
            for works in by_step(feed, plan.epochs[0]):
                assert works
                assert all(work.sample_weight == 0 for work in works) or all(work.sample_weight > 0 for work in works)


def test_rank_without_chunk_gets_filler_of_weight_zero() -> None:
    plan = schedule(18, 8, 2)  # the last step has two images: one chunk for two processes
    first, second = (by_step(feed, plan.epochs[0])[-1] for feed in feeds(plan, 2))
    assert [work.sample_weight for work in first + second] == [1.0, 0.0]
    assert first[0].ids.tolist() == second[0].ids.tolist()


def test_lone_image_is_taken_twice_with_half_weight() -> None:
    (work,) = by_step(feeds(schedule(17, 8, 2), 1)[0], schedule(17, 8, 2).epochs[0])[-1]
    assert len(work.ids) == 2 and len(set(work.ids.tolist())) == 1 and work.sample_weight == 0.5


@pytest.mark.parametrize("rect_train", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_requests_from_any_position_is_rest_of_stream(world: int, rect_train: bool) -> None:
    plan = schedule(50, 4, 3, epochs=3, rect_train=rect_train)
    for feed in feeds(plan, world):
        whole = list(feed.all_requests(0, 0))
        for number, epoch in enumerate(plan.epochs):
            for step in (0, 1, epoch.steps - 1, epoch.steps):
                rest = list(feed.all_requests(number, step))
                assert rest and same(rest, whole[-len(rest) :])
                left = sum(feed.chunk_count(epoch, later) for later in range(step, epoch.steps))
                assert [work.split for work in rest].index("val") == left
        assert list(feed.all_requests(len(plan.epochs), 0)) == []


def test_train_requests_follow_their_phase() -> None:
    first, second = schedule(16, 8, 1).epochs
    feed = feeds(schedule(16, 8, 1), 1)[0]
    assert {(w.split, w.copy, w.shape, w.epoch, w.min_scale) for w in feed.train_requests(first)} == {
        ("train", 64, (32, 32), 0, 0.3)
    }
    assert {(w.split, w.copy, w.shape, w.epoch, w.min_scale) for w in feed.train_requests(second)} == {
        ("train", None, (64, 64), 1, 0.08)
    }


@pytest.mark.parametrize("augment", [True, False])
def test_train_requests_carry_augment(augment: bool) -> None:
    plan = schedule(16, 8, 1)
    phases = [replace(phase, augment=augment) for phase in plan.recipe.phases]
    other = replace(plan, recipe=replace(plan.recipe, phases=phases))
    assert {work.augment for work in feeds(other, 1)[0].train_requests(other.epochs[0])} == {augment}


@pytest.mark.parametrize("case", CASES)
def test_step_shapes_contains_shape_shared_by_all_ranks(case: tuple[int, int, int]) -> None:
    plan = schedule(*case, rect_train=True)
    epoch, seen = plan.epochs[1], set()
    for world in WORLDS:
        ranks = feeds(plan, world)
        for step, works in enumerate(zip(*(by_step(feed, epoch) for feed in ranks), strict=True)):
            (shape,) = {work.shape for mine in works for work in mine}
            assert shape in ranks[0].step_shapes(epoch, step)
            seen.add((step, shape))
    assert len(seen) == epoch.steps  # whatever the number of processes
    assert {work.shape for work in feeds(plan, 1)[0].train_requests(plan.epochs[0])} == {(32, 32)}


def test_rect_train_requests_have_several_shapes() -> None:
    plans = [schedule(300, 8, 2, rect_train=one) for one in (True, False)]
    rect, square = (list(feeds(plan, 1)[0].train_requests(plan.epochs[1])) for plan in plans)
    assert len({work.shape for work in rect}) == 3 and {work.shape for work in square} == {(64, 64)}
    assert [len(work.ids) for work in rect] == [len(work.ids) for work in square]


def test_train_requests_depend_on_epoch_and_seed() -> None:
    plan = schedule(200, 200, 1)
    orders = [
        next(feeds(plan, 1, seed)[0].train_requests(epoch)).ids.tolist() for seed in (0, 1) for epoch in plan.epochs
    ]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("world", WORLDS)
def test_val_requests_cover_each_image_once_per_view(world: int) -> None:
    plan = schedule(16, 8, 1)
    ranks = feeds(plan, world)
    assert list(ranks[0].val_requests(plan.epochs[0])) == ["square"]
    assert list(ranks[0].val_requests(plan.epochs[1])) == ["rect", "square"]
    for epoch in plan.epochs:
        for view in ranks[0].val_requests(epoch):
            works = [work for feed in ranks for work in feed.val_requests(epoch)[view]]
            assert sorted(number for work in works for number in work.ids.tolist()) == list(range(23))
            assert {(work.split, work.copy, work.min_scale) for work in works} == {
                ("val", epoch.scheduled_phase.phase.copy, None)
            }
            assert all(len(work.ids) <= 8 and min(work.shape) == epoch.scheduled_phase.phase.size for work in works)
            assert view != "square" or all(work.shape[0] == work.shape[1] for work in works)
