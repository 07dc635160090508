"""The curves of the steps: all rows of a run, thinned out to the points of a chart.

A run of a month has some millions of rows. As columns they take 64 bytes each. All are kept, so means are exact.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from train.metrics.records import StepRow

from .activity import WorkClock

MAX_CURVE_POINTS = 400  # points of a curve: more cannot be told apart in a chart of this size
SCALARS = {
    "loss": "loss/train",
    "lr": "sizes/lr",
    "image_size": "sizes/image",
    "global_batch": "sizes/batch_total",
    "images_per_second": "times/images_per_second",
}
COLUMN_TYPES = [("time", "f8"), ("images", "i8"), ("attempt", "i8"), *((name, "f8") for name in SCALARS)]


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """What was measured in one or several rows of steps; NaN for what was not. `time` is in seconds at work."""

    time: float
    images: int
    attempt: int
    loss: float
    lr: float
    image_size: float
    global_batch: float
    images_per_second: float


def step_points(rows: Iterable[StepRow], clock: WorkClock, max_points: int = MAX_CURVE_POINTS) -> list[StepPoint]:
    """Return at most `max_points` points.

    Several rows become one point, with their mean loss and median speed; its other values are those of the last row.
    """
    cells = ((row.time, row.images, row.attempt, *map(row.scalars.get, SCALARS.values())) for row in rows)
    columns = np.fromiter(cells, COLUMN_TYPES)  # None becomes NaN
    point_count = min(len(columns), max_points)
    edges = [len(columns) * index // point_count for index in range(point_count + 1)] if point_count else []
    points = []
    for begin, end in pairwise(edges):
        part = columns[begin:end]
        last = dict(zip(columns.dtype.names or (), part[-1].item(), strict=True))
        last["time"] = clock.seconds_at(last["time"])
        last["loss"] = float(np.mean(known)) if len(known := _known(part["loss"])) else math.nan
        last["images_per_second"] = (
            float(np.median(known)) if len(known := _known(part["images_per_second"])) else math.nan
        )
        points.append(StepPoint(**last))
    return points


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]
