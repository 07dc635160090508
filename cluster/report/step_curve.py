"""The curves of the steps: all rows of a run, kept as columns of numbers, thinned out to the points of a chart.

A run of a month has some millions of rows. As columns they take 56 bytes each, and no mean over them is an estimate.
"""

import math
import statistics
from array import array
from collections.abc import Callable, Iterable
from itertools import pairwise

from cluster.plots.job_facts import StepPoint
from train.metrics.records import StepRow

from .activity import WorkClock

MAX_CURVE_POINTS = 400  # points of a curve: more cannot be told apart in a chart of this size
MEAN_SCALAR = "train/loss"
MEDIAN_SCALAR = "times/images_per_second"
SCALARS = (MEAN_SCALAR, MEDIAN_SCALAR, "sizes/lr", "sizes/image", "sizes/batch_total")


class StepColumns:
    """The rows of steps as columns. A scalar that was not measured is NaN: a row has no NaN of its own."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self.times = array("d")
        self.images = array("q")
        self.attempts = array("q")
        self.scalars = {name: array("d") for name in SCALARS}
        columns = list(self.scalars.items())
        for row in rows:
            self.times.append(row.time)
            self.images.append(row.images)
            self.attempts.append(row.attempt)
            for name, column in columns:
                value = row.scalars.get(name)
                column.append(math.nan if value is None else value)

    def points(self, clock: WorkClock, max_points: int = MAX_CURVE_POINTS) -> list[StepPoint]:
        """Return at most `max_points` points.

        Several rows become one point, with their mean loss and median speed; its other values are those of the last of
        them.
        """
        count = len(self.times)
        point_count = min(count, max_points)
        edges = [count * index // point_count for index in range(point_count + 1)] if count else []
        return [self._point(clock, begin, end) for begin, end in pairwise(edges)]

    def _point(self, clock: WorkClock, begin: int, end: int) -> StepPoint:
        last = end - 1
        return StepPoint(
            seconds=clock.seconds_at(self.times[last]),
            images=self.images[last],
            attempt=self.attempts[last],
            loss=self._aggregate(statistics.fmean, MEAN_SCALAR, begin, end),
            lr=self._value("sizes/lr", last),
            image_size=self._value("sizes/image", last),
            global_batch=self._value("sizes/batch_total", last),
            images_per_second=self._aggregate(statistics.median, MEDIAN_SCALAR, begin, end),
        )

    def _value(self, name: str, index: int) -> float | None:
        value = self.scalars[name][index]
        return None if math.isnan(value) else value

    def _aggregate(self, function: Callable[[list[float]], float], name: str, begin: int, end: int) -> float | None:
        known_values = [value for value in self.scalars[name][begin:end] if not math.isnan(value)]
        return function(known_values) if known_values else None
