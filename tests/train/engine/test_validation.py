"""run_validation: the check of its counts.

Its counts and its eval mode are tested in tests/train/rules/test_validation.py.
"""

import pytest
from support.trainer_in_process import (
    PLAIN_PREPROCESSOR,
    SINGLE_PROCESS,
    RandomImages,
    linear_classifier,
    make_phase,
    make_recipe,
    make_sampler,
)

from train.engine.validation import run_validation
from train.metrics.time_breakdown import TimeBreakdown
from train.recipe.schedule import Schedule


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
