"""What may be said of two arms: intervals and the sentences that follow from them. Pure functions of numbers.

A run whose loss was no number any more counts as chance, for that is what its network knows.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.harness.claims import Claim, ClaimSide

RowsByArm = Mapping[str, Sequence[Mapping[str, Any]]]  # of each arm by its name
CONFIDENCE = 0.95
BISECTION_STEPS = 200  # halvings are exact long before


@dataclass(frozen=True)
class Interval:
    """The difference of two means in points, and the ends of its 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


def student_t(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Return the t beyond which, on both sides together, 1 - share of Student's distribution lies; degrees >= 1."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def within(angle: float) -> float:  # between -t and t, for t = sqrt(degrees) tan(angle); by Simpson's rule
        parts = 400
        values = [math.cos(angle * part / parts) ** (degrees - 1) for part in range(parts + 1)]
        total = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return float(2 * factor * total * angle / parts / 3)

    low, high = 0.0, math.pi / 2
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def welch_interval(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Return the difference of two means with Welch's interval (1947); None where one has fewer than two values."""
    if min(len(first), len(second)) < 2:
        return None
    difference = statistics.mean(first) - statistics.mean(second)
    parts = [(statistics.variance(one) / len(one), len(one)) for one in (first, second)]
    error = sum(part for part, _ in parts)
    if error == 0:
        return Interval(difference, difference, difference)
    degrees = error**2 / sum(part**2 / (count - 1) for part, count in parts)
    half = student_t(degrees) * math.sqrt(error)
    return Interval(difference, difference - half, difference + half)


def accuracy(row: Mapping[str, Any], metric: str = "top1") -> float:
    """Return an accuracy of a run in percent: chance where it diverged."""
    return float(row[metric]) if row["diverged"] is None else 100 / row["classes"]


def accuracies(rows: Sequence[Mapping[str, Any]], metric: str = "top1") -> list[float]:
    """Return the accuracies of an arm's runs."""
    return [accuracy(row, metric) for row in rows]


def best_arm(claim_side: ClaimSide, rows: RowsByArm) -> str | None:
    """Return the name of a side's arm, of several the one with the best mean; None where one has no runs."""
    if not all(rows.get(name) for name in claim_side.arms):
        return None
    return max(claim_side.arms, key=lambda name: statistics.mean(accuracies(rows[name], claim_side.metric)))


def mean_with_deviation(numbers: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation; of a single value the value."""
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def verdict(claim: Claim, interval: Interval) -> str:
    """Say whether the interval bears the claim out: "seen", "opposite" or "open"."""
    least = -(claim.margin or 0.0)
    if interval.low > least:
        return "seen"
    return "opposite" if interval.high < least else "open"


def claim_sentence(claim: Claim, rows: RowsByArm) -> str:
    """Return what the runs say of a claim, as markdown."""
    names = [best_arm(one, rows) for one in (claim.first, claim.second)]
    if None in names:
        return f"**Not run yet.** {claim.text}."
    sides = [(str(name), one.metric) for name, one in zip(names, (claim.first, claim.second), strict=True)]
    mine, theirs = (accuracies(rows[name], field) for name, field in sides)
    interval = welch_interval(mine, theirs)
    if interval is None:
        return f"**One run says nothing.** {claim.text}: {mean_with_deviation(mine)} against {mean_with_deviation(theirs)} %, n = {len(mine)}."
    parts = [
        f"**{_headline(claim, interval)}** {claim.text}: {mean_with_deviation(mine)} against {mean_with_deviation(theirs)} %, {_format_interval(interval)}"
    ]
    parts[0] += f", n = {len(mine)}." if len(mine) == len(theirs) else f", n = {len(mine)} and {len(theirs)}."
    parts += [_best_arm_note(one, str(name)) for one, name in zip((claim.first, claim.second), names, strict=True)]
    parts += [_resolution_note(claim, interval), *(_divergence_note(name, rows[name]) for name, _ in sides)]
    if claim.cheaper:
        parts.append(savings_sentence(rows[sides[0][0]], rows[sides[1][0]]))
    if claim.source:
        parts.append(f"Published: {claim.source}.")
    return " ".join(dict.fromkeys(filter(None, parts)))


def _headline(claim: Claim, interval: Interval) -> str:
    found = verdict(claim, interval)
    if claim.margin is None:
        return {"seen": "Seen.", "opposite": "The opposite is seen.", "open": "Not seen at this scale."}[found]
    within = f"Seen, within {claim.margin:g} point{'s' * (claim.margin != 1)}."
    return {"seen": within, "opposite": "Not so at this scale.", "open": "Undecided."}[found]


def _format_interval(interval: Interval) -> str:
    return f"{interval.difference:+.2f} points ({interval.low:+.2f} to {interval.high:+.2f})"


def _resolution_note(claim: Claim, interval: Interval) -> str:
    if verdict(claim, interval) != "open":
        return ""
    return f"These runs can tell differences from about {interval.half_width:.1f} points on."


def _best_arm_note(claim_side: ClaimSide, name: str) -> str:
    return f'Of {len(claim_side.arms)}, "{name}" is the best.' if len(claim_side.arms) > 1 else ""


def _divergence_note(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    count = sum(row["diverged"] is not None for row in rows)
    return f'{count} of {len(rows)} runs of "{name}" diverged and count as chance.' if count else ""


def savings_sentence(rows: Sequence[Mapping[str, Any]], other_rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what part of the other arm's work (images x pixels), steps and training seconds an arm took, seed by seed."""
    pairs = [
        (a, b) for a in rows for b in other_rows if a["seed"] == b["seed"] and a["diverged"] is None is b["diverged"]
    ]
    if not pairs:
        return ""
    names = ("megapixels", "steps", "train_seconds")
    work, steps, seconds = ([a[name] / b[name] for a, b in pairs] for name in names)
    return (
        f"It took {statistics.mean(work):.0%} of the work (images x pixels), {statistics.mean(steps):.0%} of the steps "
        f"and {statistics.mean(seconds):.0%} of the training seconds ({min(seconds):.0%} to {max(seconds):.0%}, by "
        "seeds)."
    )
