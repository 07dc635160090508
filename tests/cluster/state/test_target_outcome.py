"""Tests of what result.json says of an accuracy target: the seconds and the dollars until it was reached."""

from dataclasses import replace
from typing import Any

import pytest
from support.recorded_run import PRICE, make_job

from cluster.state.result import target_outcome

Fixture = Any


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_write_result_has_seconds_and_dollars_to_target(hand_made: Fixture, backend: str) -> None:
    job = make_job(hand_made, backend)
    target, row = job.result.target, job.result.epochs[-1]
    assert (target.metric, target.goal, target.reached, target.epoch, target.best) == ("top5", 93.0, True, 4, 94.0)
    assert target.seconds == row.clock and target.minutes == row.clock / 60
    assert target.seconds_all == pytest.approx(row.clock + 100)
    dollars = (row.clock + 90 + 260 + row.clock - 175) * PRICE / 3600
    assert target.dollars == (None if backend == "local" else pytest.approx(dollars, abs=2 * PRICE / 3600))


def test_failed_job_has_the_best_of_a_target_that_it_missed(hand_made: Fixture) -> None:
    job = make_job(hand_made, done=False, target="top5=99")
    assert job.state == "failed" and (job.result.target.reached, job.result.target.best) == (False, 94.0)


def test_target_has_no_time_since_the_launch_when_the_clock_contradicts_it(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    run = replace(job.run, spec=replace(job.spec, created=job.result.target.at - 1.0))
    outcome = target_outcome(run, job.backend, job.result.epochs)
    assert outcome and outcome.reached and outcome.seconds == job.result.target.seconds
    assert outcome.seconds_all is None
