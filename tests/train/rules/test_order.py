"""One random shuffle an epoch, split k ways (Goyal et al. 2017, remark 4)."""

import random

import pytest
from support.trainer_in_process import Pixels, feed, order, recipe, row

from train.recipe.schedule import Schedule

dice = random.Random(4)
CASES = [(50, 8, 2), (49, 8, 3), (7, 8, 5), (1, 4, 2), (64, 8, 4)]  # images, n, k
CASES += [(dice.randint(1, 200), dice.randint(1, 30), dice.randint(1, 6)) for _ in range(8)]


def steps_of(images: int, n: int, k: int, world: int, epoch: int) -> list[list[int]]:
    """The images that all processes together count in each step, sorted; each process asked on its own."""
    plan = Schedule(recipe(row((0, 2), n, 0.1), gpus=k, seed=5), images, k)
    found: list[list[int]] = [[] for _ in range(plan.epochs[epoch].steps)]
    for rank in range(world):
        one = feed(plan, Pixels(images), rank, world)
        works = one.train_requests(plan.epochs[epoch])
        for step in range(plan.epochs[epoch].steps):
            for _ in range(one.chunk_count(plan.epochs[epoch], step)):
                work = next(works)
                found[step] += sorted(set(work.ids.tolist())) if work.sample_weight else []
        assert next(works, None) is None
    return [sorted(one) for one in found]


@pytest.mark.parametrize(("images", "n", "k"), CASES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_epoch_is_one_permutation_cut_into_the_same_global_batches_for_any_number_of_processes(
    images: int, n: int, k: int, world: int
) -> None:
    """Step t takes the places t kn to (t + 1) kn of the epoch's permutation; so each image once an epoch."""
    for epoch in range(2):
        shuffle = order(5, epoch, images).tolist()
        expected = [sorted(shuffle[begin : begin + n * k]) for begin in range(0, images, n * k)]
        assert steps_of(images, n, k, world, epoch) == expected


def test_each_epoch_has_a_shuffle_of_its_own() -> None:
    assert len({tuple(map(tuple, steps_of(200, 10, 2, 2, epoch))) for epoch in range(2)}) == 2
