"""Intervals against printed tables, and the sentences that follow from made-up runs."""

import math
from typing import Any

import pytest

from experiments.harness import confidence as evidence
from experiments.harness.claims import Claim, make_side
from experiments.harness.confidence import Interval

Row = dict[str, Any]


def rows(*top1: float | None, **more: Any) -> list[Row]:
    fixed = {"classes": 10, "megapixels": 100.0, "steps": 50, "train_seconds": 20.0}
    return [
        {"seed": seed, "top1": one, "top1_square": one, "diverged": "the loss is nan" if one is None else None}
        | fixed
        | more
        for seed, one in enumerate(top1)
    ]


def claim(margin: float | None = None, **more: Any) -> Claim:
    return Claim(text="A is better than B", first=make_side("a"), second=make_side("b"), margin=margin, **more)


@pytest.mark.parametrize(
    "degrees, printed", [(1, 12.706), (2, 4.303), (4, 2.776), (8, 2.306), (30, 2.042), (1000, 1.962)]
)
def test_students_distribution_is_that_of_the_tables(degrees: float, printed: float) -> None:
    assert evidence.student_t(degrees) == pytest.approx(printed, abs=0.001)


@pytest.mark.parametrize(
    "first, second, difference, half",
    [
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], -1.0, 2.306),  # equal variances of 2.5: error 1, 8 degrees
        ([1, 2, 3, 4, 5], [3, 3, 3, 3, 3], 0.0, 2.776 * math.sqrt(0.5)),  # all variance on one side: 4 degrees
    ],
)
def test_welchs_interval_is_that_of_examples_by_hand(first: Any, second: Any, difference: float, half: float) -> None:
    found = evidence.welch_interval(first, second)
    assert found is not None
    assert (found.difference, found.half_width) == pytest.approx((difference, half), abs=0.001)
    assert (found.low + found.high) / 2 == pytest.approx(difference)


def test_one_run_has_no_interval_and_equal_runs_have_one_without_width() -> None:
    assert evidence.welch_interval([1.0], [2.0, 3.0]) is None
    assert evidence.welch_interval([10.0, 10.0], [12.0, 12.0]) == Interval(-2.0, -2.0, -2.0)


@pytest.mark.parametrize(
    "low, high, margin, found",
    [
        (0.1, 2.0, None, "seen"), (-2.0, -0.1, None, "opposite"), (-0.1, 2.0, None, "open"), (0.0, 1.0, None, "open"),
        (-0.9, 0.3, 1.0, "seen"), (-1.1, 0.3, 1.0, "open"), (-3.0, -1.1, 1.0, "opposite"), (0.5, 2.0, 1.0, "seen"),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_interval_alone(low: float, high: float, margin: float | None, found: str) -> None:
    assert evidence.verdict(claim(margin), Interval((low + high) / 2, low, high)) == found


@pytest.mark.parametrize(
    "a, b, margin, begins",
    [
        ((61.0, 61.2, 61.1), (58.0, 58.1, 58.3), None, "**Seen.** A is better than B: 61.10 ± 0.10 against"),
        ((58.0, 58.1, 58.3), (61.0, 61.2, 61.1), None, "**The opposite is seen.**"),
        ((60.0, 61.0, 62.0), (59.9, 61.1, 61.9), None, "**Not seen at this scale.**"),
        ((60.0, 60.1, 60.2), (60.0, 60.1, 60.2), 1.0, "**Seen, within 1 point.**"),
        ((50.0, 50.1, 50.2), (60.0, 60.1, 60.2), 1.0, "**Not so at this scale.**"),
        ((57.0, 60.0, 63.0), (58.0, 60.0, 62.0), 1.0, "**Undecided.**"),
    ],
)  # fmt: skip
def test_a_sentence_begins_with_what_is_seen(a: Any, b: Any, margin: float | None, begins: str) -> None:
    assert evidence.claim_sentence(claim(margin), {"a": rows(*a), "b": rows(*b)}).startswith(begins)


def test_where_nothing_is_seen_the_sentence_says_what_could_have_been() -> None:
    found = evidence.claim_sentence(claim(), {"a": rows(60.0, 61.0, 62.0), "b": rows(59.9, 61.1, 61.9)})
    assert "These runs can tell differences from about 2.3 points on." in found


def test_a_diverged_run_counts_as_chance_and_is_named() -> None:
    found = evidence.claim_sentence(claim(), {"a": rows(60.0, 61.0), "b": rows(None, None)})
    assert "against 10.00 ± 0.00 %" in found and '2 of 2 runs of "b" diverged and count as chance.' in found


def test_of_several_arms_the_best_is_taken_and_named() -> None:
    one = Claim(text="x", first=make_side("a", "b", "c"), second=make_side("d"))
    found = evidence.claim_sentence(
        one, {"a": rows(50.0, 51.0), "b": rows(60.0, 61.0), "c": rows(None, 99.0), "d": rows(10.0, 11.0)}
    )
    assert 'Of 3, "b" is the best.' in found and "60.50 ± 0.71 against" in found


def test_a_side_may_be_another_field() -> None:
    mine = [row | {"top1_square": row["top1"] - 5} for row in rows(60.0, 60.1, 60.2)]
    one = Claim(text="x", first=make_side("a"), second=make_side("a", metric="top1_square"))
    assert "+5.00 points" in evidence.claim_sentence(one, {"a": mine})


def test_missing_runs_and_single_runs_are_said_so() -> None:
    assert evidence.claim_sentence(claim(), {"a": rows(1.0), "b": []}).startswith("**Not run yet.**")
    assert evidence.claim_sentence(claim(), {"a": rows(61.0), "b": rows(50.0)}).startswith("**One run says nothing.**")


def test_savings_are_by_seed_and_leave_out_what_diverged() -> None:
    mine = [row | {"train_seconds": 10.0 + row["seed"], "megapixels": 60.0} for row in rows(60.0, 61.0, None)]
    found = evidence.claim_sentence(claim(1.0, cheaper=True), {"a": mine, "b": rows(60.0, 61.0, 60.5)})
    assert "60% of the work (images x pixels), 100% of the steps and 52% of the training seconds (50% to 55%" in found


def test_what_was_published_stands_at_the_end() -> None:
    found = evidence.claim_sentence(claim(source="1 against 2"), {"a": rows(61.0, 62.0), "b": rows(50.0, 51.0)})
    assert found.endswith("Published: 1 against 2.")
