"""Tests of the confidence intervals against printed tables, and of sentences that experiments/RESULTS.md lacks."""

import math
from typing import Any

import pytest

from experiments.harness import confidence
from experiments.harness.claims import Claim, make_side


@pytest.mark.parametrize("degrees, printed", [(1, 12.706), (8, 2.306), (1000, 1.962)])
def test_student_t_equals_printed_tables(degrees: float, printed: float) -> None:
    assert confidence.student_t(degrees) == pytest.approx(printed, abs=0.001)


@pytest.mark.parametrize(
    "first, second, difference, half",
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], -1.0, 2.306),  # equal variances of 2.5: error 1, 8 degrees
        ([1, 2, 3, 4, 5], [3, 3, 3, 3, 3], 0.0, 2.776 * math.sqrt(0.5)),  # all variance on one side: 4 degrees
        ([10.0, 10.0], [12.0, 12.0], -2.0, 0.0),
    ],
)
def test_welch_interval_equals_examples_by_hand(first: Any, second: Any, difference: float, half: float) -> None:
    interval = confidence.welch_interval(first, second)
    assert interval is not None
    assert (interval.difference, interval.half_width) == pytest.approx((difference, half), abs=0.001)
    assert (interval.low + interval.high) / 2 == pytest.approx(difference)


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ((60.0, 61.0), (None, None), '2 of 2 runs of "b" diverged and count as guessing.'),
        ((1.0,), (), "**Not run yet.**"),
        ((61.0,), (50.0,), "**A single run proves nothing.**"),
    ],
)
def test_claim_sentence_of_diverged_missing_and_single_runs(first: Any, second: Any, expected: str) -> None:
    claim = Claim(text="A is better than B", first=make_side("a"), second=make_side("b"))
    rows = {
        name: [{"top1": value, "diverged": "nan" if value is None else None, "classes": 10} for value in values]
        for name, values in (("a", first), ("b", second))
    }
    assert expected in confidence.claim_sentence(claim, rows)
