"""The rates of the 18-minute recipe against imagenet18's own scheduler, at every step of its published tables."""

import math
from collections.abc import Iterator

import pytest
from paper_schedules import IMAGENET18_SCHEDULES, PaperSchedule
from recipes_page import our_schedule

TRAIN_IMAGES = 1_281_167


def rates_of_their_scheduler(schedule: PaperSchedule) -> Iterator[tuple[float, float]]:
    """Yield the rate of each step, and by how much a step changes it.

    A restatement of Scheduler.get_lr in training/train_imagenet_nv.py: batches are counted from 1, so the first rate of
    a phase is one step after the stated one. A sampler gives every process as many images as the first.
    """
    for phase in schedule.paper_phases:
        (start, end), (first_rate, last_rate) = phase.epochs, phase.lr_endpoints
        processes = 8 * schedule.machines
        batches = math.ceil(math.ceil(TRAIN_IMAGES / processes) / (phase.batch // processes))
        step_size = (last_rate - first_rate) / ((end - start) * batches)
        for epoch in range(start, end):
            for batch in range(1, batches + 1):
                yield first_rate + ((epoch - start) * batches + batch) * step_size, abs(step_size)


@pytest.mark.parametrize("published", IMAGENET18_SCHEDULES, ids=lambda published: f"{published.machines} machines")
def test_rates_are_at_most_a_step_from_theirs(published: PaperSchedule) -> None:
    ours = [epoch.lr_at(step) for epoch in our_schedule(published).epochs for step in range(epoch.steps)]
    theirs = list(rates_of_their_scheduler(published))
    assert len(ours) == len(theirs) == published.steps
    for our_rate, (their_rate, step_size) in zip(ours, theirs, strict=True):
        assert abs(our_rate - their_rate) <= step_size * 1.0001 + 1e-12
