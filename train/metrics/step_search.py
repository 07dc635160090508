"""Finds steps in a file of metrics by offset, so that the time does not grow with the file. Imports no torch.

The first process of an attempt appends a line about once a second, so steps and times ascend within a file. What was
found is cached as long as the file does not change, so polling a run does not read its earlier attempts again.
"""

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from train.tools.files import FileVersion, file_version, open_regular
from train.tools.text_files import MAX_LINE_BYTES, lines_backwards, lines_from_here

from .records import EpochRow, MetricsRow, StepRow, parse_row

MAX_KEPT_ANSWERS = 20_000
SEARCH_BYTES = 2048  # parts of a file, of which the one with the step is read line by line


@dataclass(frozen=True)
class StepEnds:
    """The first and the last step that an attempt has logged."""

    first: MetricsRow
    last: MetricsRow


def first_and_last_step(path: Path) -> StepEnds | None:
    """Return the first and the last step in a file of metrics, None when there is none."""
    version = file_version(path)
    return _find_ends(path, version) if version else None


def last_step_until(path: Path, step: int) -> MetricsRow | None:
    """Return the last step in a file of metrics that is not beyond a step, None when there is none.

    Its time is that of the epoch's end, with its validation, where it is the last step of an epoch.
    """
    version = file_version(path)
    return _find_last_until(path, version, step) if version else None


@lru_cache(MAX_KEPT_ANSWERS)
def _find_ends(path: Path, _: FileVersion) -> StepEnds | None:
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        parse = partial(parse_row, row_type=StepRow)
        if first := next(_steps_from(file, 0, parse), None):
            return StepEnds(first, next(filter(None, map(parse, lines_backwards(file))), first))
    return None


@lru_cache(MAX_KEPT_ANSWERS)
def _find_last_until(path: Path, version: FileVersion, step: int) -> MetricsRow | None:
    ends = _find_ends(path, version)
    if ends is None or step < ends.first.step:
        return None
    last = ends.first
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        if step >= ends.last.step:
            marks_backwards = map(_parse_mark, lines_backwards(file))
            return next((mark for mark in marks_backwards if mark and mark.step <= step), ends.last)

        def step_from(offset: int) -> float:
            return next((found.step for found in _steps_from(file, offset, _parse_mark)), math.inf)

        offsets = range(0, version.size, SEARCH_BYTES)
        begin = offsets[max(0, bisect.bisect_right(offsets, float(step), key=step_from) - 1)]
        for found in takewhile(lambda found: found.step <= step, _steps_from(file, begin, _parse_mark)):
            last = found
    return last


def _steps_from(file: BinaryIO, offset: int, parse: Callable[[bytes], MetricsRow | None]) -> Iterator[MetricsRow]:
    """Yield the steps whose lines begin at an offset of a file or later."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline(MAX_LINE_BYTES)  # the rest of the line that begins before
    yield from filter(None, map(parse, lines_from_here(file)))


def _parse_mark(line: bytes) -> MetricsRow | None:
    """Return the step in a line, also in that of an epoch's end."""
    return parse_row(line, StepRow) or parse_row(line, EpochRow)
