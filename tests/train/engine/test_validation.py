"""run_validation: full batches on a GPU, and the check of its counts.

Its counts and its eval mode are tested in tests/train/rules/test_validation.py.
"""

import pytest
import torch
from support.trainer_in_process import (
    PLAIN_PREPROCESSOR,
    SINGLE_PROCESS,
    RandomImages,
    linear_classifier,
    make_phase,
    make_recipe,
    make_sampler,
)
from torch import nn

from train.engine.validation import fill_batch, run_validation
from train.metrics.time_breakdown import TimeBreakdown
from train.recipe.schedule import Schedule


def test_fill_batch_takes_the_smallest_warmed_shape_and_keeps_the_scores() -> None:
    """On a GPU kernels were searched for full batches only."""
    images = torch.rand(3, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    shapes = {(8, 8, 6), (5, 8, 6), (5, 6, 8), (2, 8, 6)}
    filled = fill_batch(images, shapes)
    assert filled.shape == (5, 3, 8, 6) and torch.equal(filled[:3], images) and not filled[3:].any()
    assert filled.is_contiguous(memory_format=torch.channels_last)
    assert fill_batch(images, {(2, 8, 6), (5, 6, 8)}) is images and fill_batch(images, {(3, 8, 6), *shapes}) is images
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 4, 7)).eval()
    torch.testing.assert_close(net(filled)[:3], net(images))


@pytest.mark.parametrize("expected", [52, 54])
def test_run_validation_takes_its_own_batches_and_refuses_another_number_of_images(expected: int) -> None:
    dataset, model = RandomImages(1, 53), linear_classifier()
    schedule = Schedule(make_recipe(make_phase((0, 1), 8, 0.1)), 1, 1)
    requests = make_sampler(schedule, dataset).val_requests(schedule.epochs[0])["square"]
    batches = map(dataset.decode_batch, [*requests, requests[0]])  # the last one is of the next epoch
    times = TimeBreakdown(SINGLE_PROCESS.device)
    with pytest.raises(RuntimeError, match=f"counted 53 images, but there are {expected}"):
        run_validation(SINGLE_PROCESS, model, batches, len(requests), expected, PLAIN_PREPROCESSOR, times)
    assert len(list(batches)) == 1 and model.training
