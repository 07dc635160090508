"""The curves of the steps: all rows of a run, kept as columns of numbers, thinned out to the points of a chart.

A run of a month has some millions of rows. As columns they take 56 bytes each. All are kept, so means are exact.
Rows are decoded block by block, and only what a curve needs of them, which takes a third of the time of whole rows.
"""

import contextlib
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from cluster.plots.job_facts import StepPoint
from train.metrics.records import ROW_KINDS, StepRow
from train.tools.filesystem import line_blocks, open_regular

from .activity import WorkClock

MAX_CURVE_POINTS = 400  # points of a curve: more cannot be told apart in a chart of this size
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # fits in a column


class CurveScalars(
    msgspec.Struct,
    gc=False,
    rename={
        "loss": "loss/train",
        "images_per_second": "times/images_per_second",
        "lr": "sizes/lr",
        "image_size": "sizes/image",
        "global_batch": "sizes/batch_total",
    },
):
    """The scalars of a row that the curves show; None for one that was not measured."""

    loss: float | None = None
    images_per_second: float | None = None
    lr: float | None = None
    image_size: float | None = None
    global_batch: float | None = None


class CurveRow(msgspec.Struct, gc=False):
    """What the curves need of a row of steps (`StepRow`). Rows of other kinds pass too, without scalars."""

    kind: str
    time: float
    images: Count
    attempt: Count
    scalars: CurveScalars = msgspec.field(default_factory=CurveScalars)


_decoder = msgspec.json.Decoder(CurveRow)


def read_curve_rows(path: Path) -> Iterator[CurveRow]:
    """Yield the rows of steps in a file of metrics. Damaged and incomplete lines are skipped.

    Raises `OSError` for anything but a missing file.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        for block, _ in line_blocks(file):
            try:
                rows = _decoder.decode_lines(block)
            except (ValueError, RecursionError):
                rows = _decode_line_by_line(block)
            for row in rows:
                if row.kind == ROW_KINDS[StepRow]:
                    yield row


def _decode_line_by_line(block: bytes) -> list[CurveRow]:
    rows = []
    for line in block.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(_decoder.decode(line))
    return rows


class StepColumns:
    """The rows of steps as columns. A scalar that was not measured is NaN: a row has no NaN of its own."""

    def __init__(self, rows: Iterable[CurveRow]) -> None:
        self.times = array("d")
        self.images = array("q")
        self.attempts = array("q")
        self.scalars = {name: array("d") for name in CurveScalars.__struct_fields__}
        columns = list(self.scalars.items())
        for row in rows:
            self.times.append(row.time)
            self.images.append(row.images)
            self.attempts.append(row.attempt)
            for name, column in columns:
                value = getattr(row.scalars, name)
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
            loss=self._aggregate(statistics.fmean, "loss", begin, end),
            lr=self._value("lr", last),
            image_size=self._value("image_size", last),
            global_batch=self._value("global_batch", last),
            images_per_second=self._aggregate(statistics.median, "images_per_second", begin, end),
        )

    def _value(self, name: str, index: int) -> float | None:
        value = self.scalars[name][index]
        return None if math.isnan(value) else value

    def _aggregate(self, function: Callable[[list[float]], float], name: str, begin: int, end: int) -> float | None:
        known_values = [value for value in self.scalars[name][begin:end] if not math.isnan(value)]
        return function(known_values) if known_values else None
