"""Rules of the order of images: one random shuffle per epoch, split k ways (Goyal et al. 2017, remark 4)."""

import random

import pytest
from support.trainer_in_process import RandomImages, epoch_permutation, make_phase, make_recipe, make_sampler

from train.recipe.schedule import Schedule

generator = random.Random(4)
CASES = [(50, 8, 2), (49, 8, 3), (7, 8, 5), (1, 4, 2), (64, 8, 4)]  # images, n, k
CASES += [(generator.randint(1, 200), generator.randint(1, 30), generator.randint(1, 6)) for _ in range(4)]


def images_by_step(images: int, n: int, k: int, world: int, epoch: int) -> list[list[int]]:
    """Return the sorted ids of the images that all processes together count in each step, from each rank's sampler."""
    schedule = Schedule(make_recipe(make_phase((0, 2), n, 0.1), gpus=k, seed=5), images, k)
    steps: list[list[int]] = [[] for _ in range(schedule.epochs[epoch].steps)]
    for rank in range(world):
        sampler = make_sampler(schedule, RandomImages(images), rank, world)
        requests = sampler.train_requests(schedule.epochs[epoch])
        for step in range(schedule.epochs[epoch].steps):
            for _ in range(sampler.chunk_count(schedule.epochs[epoch], step)):
                request = next(requests)
                steps[step] += sorted(set(request.ids.tolist())) if request.sample_weight else []
        assert next(requests, None) is None
    return [sorted(sampler) for sampler in steps]


@pytest.mark.parametrize(("images", "n", "k"), CASES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_epoch_permutation_is_cut_into_same_batches_on_any_world_size(images: int, n: int, k: int, world: int) -> None:
    """Step t takes positions t kn to (t + 1) kn of the epoch's permutation, so each image once an epoch."""
    for epoch in range(2):
        shuffle = epoch_permutation(5, epoch, images).tolist()
        expected = [sorted(shuffle[begin : begin + n * k]) for begin in range(0, images, n * k)]
        assert images_by_step(images, n, k, world, epoch) == expected
