"""Confidence intervals of the difference of two arms, and the sentences that follow from them.

Pure functions of numbers. A run that diverged counts as guessing, because its network knows nothing.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.harness.claims import Claim, ClaimSide

ResultRows = Sequence[Mapping[str, Any]]
RowsByArm = Mapping[str, ResultRows]
CONFIDENCE = 0.95
BISECTION_STEPS = 200  # far more than a float can resolve
SIMPSON_INTERVALS = 400


@dataclass(frozen=True)
class Interval:
    """The difference of two means in points, and the ends of its 95 % confidence interval."""

    difference: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return (self.high - self.low) / 2


def student_t(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Return the t for which Student's distribution has `confidence` of its mass between -t and t.

    `degrees` are the degrees of freedom, at least 1. The mass is integrated numerically, and t found by bisection.
    """
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def mass_within(angle: float) -> float:
        """Return the mass between -t and t, for t = sqrt(degrees) * tan(angle), by Simpson's rule."""
        values = [
            math.cos(angle * index / SIMPSON_INTERVALS) ** (degrees - 1) for index in range(SIMPSON_INTERVALS + 1)
        ]
        weighted_sum = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return float(2 * factor * weighted_sum * angle / SIMPSON_INTERVALS / 3)

    low = 0.0
    high = math.pi / 2
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if mass_within(middle) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def welch_interval(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Return the difference of two means with Welch's interval (1947); None when a side has fewer than two values."""
    if min(len(first), len(second)) < 2:
        return None
    difference = statistics.mean(first) - statistics.mean(second)
    # The squared standard error of each mean, and the number of its values.
    parts = [(statistics.variance(values) / len(values), len(values)) for values in (first, second)]
    squared_error = sum(part for part, _ in parts)
    if squared_error == 0:
        return Interval(difference, difference, difference)
    degrees = squared_error**2 / sum(part**2 / (count - 1) for part, count in parts)
    half_width = student_t(degrees) * math.sqrt(squared_error)
    return Interval(difference, difference - half_width, difference + half_width)


def accuracy(row: Mapping[str, Any], metric: str = "top1") -> float:
    """Return an accuracy of a run in percent; for a run that diverged, that of guessing."""
    return float(row[metric]) if row["diverged"] is None else 100 / row["classes"]


def accuracies(rows: ResultRows, metric: str = "top1") -> list[float]:
    """Return the accuracies of an arm's runs in percent."""
    return [accuracy(row, metric) for row in rows]


def best_arm(claim_side: ClaimSide, rows: RowsByArm) -> str | None:
    """Return the name of the arm of a side that has the best mean; None when an arm of the side has no runs."""
    if not all(rows.get(name) for name in claim_side.arms):
        return None
    return max(claim_side.arms, key=lambda name: statistics.mean(accuracies(rows[name], claim_side.metric)))


def mean_with_deviation(numbers: Sequence[float], digits: int = 2) -> str:
    """Return mean and standard deviation as text; only the value for a single number."""
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def verdict(claim: Claim, interval: Interval) -> str:
    """Return whether the interval supports the claim: "seen", "opposite" or "open"."""
    threshold = -(claim.margin or 0.0)
    if interval.low > threshold:
        return "seen"
    return "opposite" if interval.high < threshold else "open"


def claim_sentence(claim: Claim, rows: RowsByArm) -> str:
    """Return what the runs say about a claim, as markdown."""
    first_arm = best_arm(claim.first, rows)
    second_arm = best_arm(claim.second, rows)
    if first_arm is None or second_arm is None:
        return f"**Not run yet.** {claim.text}."
    first = accuracies(rows[first_arm], claim.first.metric)
    second = accuracies(rows[second_arm], claim.second.metric)
    comparison = f"{claim.text}: {mean_with_deviation(first)} against {mean_with_deviation(second)} %"
    interval = welch_interval(first, second)
    if interval is None:
        return f"**A single run proves nothing.** {comparison}, n = {len(first)}."
    counts = f"n = {len(first)}" if len(first) == len(second) else f"n = {len(first)} and {len(second)}"
    sentences = [
        f"**{_headline(claim, interval)}** {comparison}, {_format_interval(interval)}, {counts}.",
        _best_arm_note(claim.first, first_arm),
        _best_arm_note(claim.second, second_arm),
        _resolution_note(claim, interval),
        _divergence_note(first_arm, rows[first_arm]),
        _divergence_note(second_arm, rows[second_arm]),
    ]
    if claim.cheaper:
        sentences.append(savings_sentence(rows[first_arm], rows[second_arm]))
    if claim.source:
        sentences.append(f"Published: {claim.source}.")
    unique_sentences = dict.fromkeys(filter(None, sentences))  # both sides may be the same arm
    return " ".join(unique_sentences)


def _headline(claim: Claim, interval: Interval) -> str:
    outcome = verdict(claim, interval)
    if claim.margin is None:
        return {"seen": "Seen.", "opposite": "The opposite is seen.", "open": "Not seen at this scale."}[outcome]
    seen = f"Seen, within {claim.margin:g} point{'s' * (claim.margin != 1)}."
    return {"seen": seen, "opposite": "Refuted at this scale.", "open": "Undecided."}[outcome]


def _format_interval(interval: Interval) -> str:
    return f"{interval.difference:+.2f} points ({interval.low:+.2f} to {interval.high:+.2f})"


def _resolution_note(claim: Claim, interval: Interval) -> str:
    """Return how large a difference the runs can detect, for a claim that is still open."""
    if verdict(claim, interval) != "open":
        return ""
    return f"These runs can detect differences of about {interval.half_width:.1f} points or more."


def _best_arm_note(claim_side: ClaimSide, name: str) -> str:
    return f'The best of {len(claim_side.arms)} arms is "{name}".' if len(claim_side.arms) > 1 else ""


def _divergence_note(name: str, rows: ResultRows) -> str:
    count = sum(row["diverged"] is not None for row in rows)
    return f'{count} of {len(rows)} runs of "{name}" diverged and count as guessing.' if count else ""


def savings_sentence(rows: ResultRows, other_rows: ResultRows) -> str:
    """Return which fraction of another arm's work (images x pixels), steps and training seconds an arm took.

    Runs are compared with those of the same seed, and runs that diverged are left out. Empty when no pair is left.
    """
    pairs = [
        (row, other)
        for row in rows
        for other in other_rows
        if row["seed"] == other["seed"] and row["diverged"] is None and other["diverged"] is None
    ]
    if not pairs:
        return ""
    work, steps, seconds = (
        [row[column] / other[column] for row, other in pairs] for column in ("megapixels", "steps", "train_seconds")
    )
    return (
        f"It took {statistics.mean(work):.0%} of the work (images x pixels), {statistics.mean(steps):.0%} of the steps "
        f"and {statistics.mean(seconds):.0%} of the training seconds ({min(seconds):.0%} to {max(seconds):.0%} by "
        "seed)."
    )
