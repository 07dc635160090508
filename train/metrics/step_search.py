"""Finds steps in a file of metrics by offset, so that the time does not grow with the file. Imports no torch.

The first process of an attempt appends a line about once a second, so steps and times ascend within a file. What was
found is cached as long as the file does not change, so polling a run does not read its earlier attempts again.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from train.tools.files import FileVersion, file_version, open_regular
from train.tools.text_files import MAX_LINE_BYTES, lines_backwards, lines_from_here

from .records import EpochRow, StepRow, parse_row

MAX_KEPT_ANSWERS = 20_000
SEARCH_BYTES = 2048  # a part of a file that is read line by line


@dataclass(frozen=True)
class StepTime:
    """A step of the run, the images seen until then, and when it was logged as a Unix time."""

    step: int
    images: int
    time: float


@dataclass(frozen=True)
class StepEnds:
    """The first and the last step that an attempt has logged."""

    first: StepTime
    last: StepTime


def first_and_last_step(path: Path) -> StepEnds | None:
    """Return the first and the last step in a file of metrics, None when there is none."""
    version = file_version(path)
    return _find_ends(path, version) if version else None


def last_step_until(path: Path, step: int) -> StepTime | None:
    """Return the last step in a file of metrics that is not beyond a step, None when there is none.

    Its time is that of the epoch's end, with its validation, where it is the last step of an epoch.
    """
    version = file_version(path)
    return _find_last_until(path, version, step) if version else None


@lru_cache(MAX_KEPT_ANSWERS)
def _find_ends(path: Path, _: FileVersion) -> StepEnds | None:
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        first = next((step for _, step in _steps_from(file, 0, _parse_step)), None)
        if first:
            steps_backwards = map(_parse_step, lines_backwards(file))
            return StepEnds(first, next((step for step in steps_backwards if step), first))
    return None


@lru_cache(MAX_KEPT_ANSWERS)
def _find_last_until(path: Path, version: FileVersion, step: int) -> StepTime | None:
    ends = _find_ends(path, version)
    if ends is None or step < ends.first.step:
        return None
    last = ends.first
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        if step >= ends.last.step:
            marks_backwards = map(_parse_mark, lines_backwards(file))
            return next((mark for mark in marks_backwards if mark and mark.step <= step), ends.last)
        # No line that begins before `begin` is beyond the step, and all that begin at `end` or later are.
        begin, end = 0, version.size
        while end - begin > SEARCH_BYTES:
            middle = (begin + end) // 2
            offset, found = next(_steps_from(file, middle, _parse_mark), (end, None))
            if found and found.step <= step:
                begin, last = offset, found
            else:
                end = middle
        for offset, found in _steps_from(file, begin, _parse_mark):
            if offset >= end or found.step > step:
                break
            last = found
    return last


def _steps_from(
    file: BinaryIO, offset: int, parse: Callable[[bytes], StepTime | None]
) -> Iterator[tuple[int, StepTime]]:
    """Yield the steps whose lines begin at an offset of a file or later, each with its own offset."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline(MAX_LINE_BYTES)  # the rest of the line that begins before
    position = file.tell()
    for line in lines_from_here(file):
        if found := parse(line):
            yield position, found
        position = file.tell()


def _parse_step(line: bytes) -> StepTime | None:
    row = parse_row(line, StepRow)
    return StepTime(row.step, row.images, row.time) if row else None


def _parse_mark(line: bytes) -> StepTime | None:
    """Return the step in a line, also in that of an epoch's end."""
    row = parse_row(line, StepRow) or parse_row(line, EpochRow)
    return StepTime(row.step, row.images, row.time) if row else None
