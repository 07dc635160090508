"""Tests of the confidence intervals against printed tables, and of the sentences about simulated runs."""

import math
from typing import Any

import pytest

from experiments.harness import confidence
from experiments.harness.claims import Claim, make_side
from experiments.harness.confidence import Interval

Row = dict[str, Any]


def make_rows(*top1: float | None) -> list[Row]:
    """Return a row for each accuracy; None: the run diverged."""
    common = {"classes": 10, "megapixels": 100.0, "steps": 50, "train_seconds": 20.0}
    return [
        {"seed": seed, "top1": value, "top1_square": value, "diverged": "the loss is nan" if value is None else None}
        | common
        for seed, value in enumerate(top1)
    ]


def make_claim(margin: float | None = None, **fields: Any) -> Claim:
    return Claim(text="A is better than B", first=make_side("a"), second=make_side("b"), margin=margin, **fields)


@pytest.mark.parametrize("degrees, printed", [(1, 12.706), (8, 2.306), (1000, 1.962)])
def test_student_t_equals_printed_tables(degrees: float, printed: float) -> None:
    assert confidence.student_t(degrees) == pytest.approx(printed, abs=0.001)


@pytest.mark.parametrize(
    "first, second, difference, half",
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], -1.0, 2.306),  # equal variances of 2.5: error 1, 8 degrees
        ([1, 2, 3, 4, 5], [3, 3, 3, 3, 3], 0.0, 2.776 * math.sqrt(0.5)),  # all variance on one side: 4 degrees
    ],
)
def test_welch_interval_equals_examples_by_hand(first: Any, second: Any, difference: float, half: float) -> None:
    interval = confidence.welch_interval(first, second)
    assert interval is not None
    assert (interval.difference, interval.half_width) == pytest.approx((difference, half), abs=0.001)
    assert (interval.low + interval.high) / 2 == pytest.approx(difference)


def test_welch_interval_single_or_equal_runs() -> None:
    assert confidence.welch_interval([1.0], [2.0, 3.0]) is None
    assert confidence.welch_interval([10.0, 10.0], [12.0, 12.0]) == Interval(-2.0, -2.0, -2.0)


@pytest.mark.parametrize(
    "first, second, margin, beginning",
    [
        ((61.0, 61.2, 61.1), (58.0, 58.1, 58.3), None, "**Seen.** A is better than B: 61.10 ± 0.10 against"),
        ((58.0, 58.1, 58.3), (61.0, 61.2, 61.1), None, "**The opposite is seen.**"),
        ((60.0, 61.0, 62.0), (59.9, 61.1, 61.9), None, "**Not seen at this scale.**"),
        ((60.0, 60.1, 60.2), (60.0, 60.1, 60.2), 1.0, "**Seen, within 1 point.**"),
        ((50.0, 50.1, 50.2), (60.0, 60.1, 60.2), 1.0, "**Refuted at this scale.**"),
        ((57.0, 60.0, 63.0), (58.0, 60.0, 62.0), 1.0, "**Undecided.**"),
    ],
)  # fmt: skip
def test_claim_sentence_begins_with_the_outcome(first: Any, second: Any, margin: float | None, beginning: str) -> None:
    rows = {"a": make_rows(*first), "b": make_rows(*second)}
    assert confidence.claim_sentence(make_claim(margin), rows).startswith(beginning)


def test_claim_sentence_diverged_runs_count_as_guessing() -> None:
    sentence = confidence.claim_sentence(make_claim(), {"a": make_rows(60.0, 61.0), "b": make_rows(None, None)})
    assert "against 10.00 ± 0.00 %" in sentence and '2 of 2 runs of "b" diverged and count as guessing.' in sentence


def test_claim_sentence_of_several_arms_uses_the_best() -> None:
    claim = Claim(text="x", first=make_side("a", "b", "c"), second=make_side("d"))
    top1 = {"a": (50.0, 51.0), "b": (60.0, 61.0), "c": (None, 99.0), "d": (10.0, 11.0)}
    sentence = confidence.claim_sentence(claim, {name: make_rows(*values) for name, values in top1.items()})
    assert 'The best of 3 arms is "b".' in sentence and "60.50 ± 0.71 against" in sentence


def test_claim_sentence_missing_and_single_runs() -> None:
    assert confidence.claim_sentence(make_claim(), {"a": make_rows(1.0), "b": []}).startswith("**Not run yet.**")
    assert confidence.claim_sentence(make_claim(), {"a": make_rows(61.0), "b": make_rows(50.0)}).startswith(
        "**A single run proves nothing.**"
    )


def test_savings_sentence_compares_by_seed_without_diverged() -> None:
    rows = [row | {"train_seconds": 10.0 + row["seed"], "megapixels": 60.0} for row in make_rows(60.0, 61.0, None)]
    sentence = confidence.claim_sentence(make_claim(1.0, cheaper=True), {"a": rows, "b": make_rows(60.0, 61.0, 60.5)})
    assert (
        "60% of the work (images x pixels), 100% of the steps and 52% of the training seconds (50% to 55%" in sentence
    )
