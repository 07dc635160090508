"""Checks whether benchmark records are consistent. Pure functions; each problem is one line that names the row.

A TSV and a log are checked by themselves (here), as is a JSON (`check_entry.py`). A JSON describes its run, so that TSV
and log are compared with what the writers make of the run in the JSON, or of the run folder, which comes first.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from train.metrics.records import TrainResult
from train.recipe.history import EpochResult
from train.tools.records import DamagedRecord, decode_json

from . import writers
from .check_entry import CLOCK_TOLERANCE_SECONDS, INVALID_ACCURACIES, check_entry, expected_entry
from .differences import differences
from .run_data import RunData
from .writers import JsonDict

MLLOG_PREFIX = ":::MLLOG "
TSV_NUMBERS = ("epoch", "hours", "top1", "top5")  # what the columns of a TSV hold; the last may be missing
# Values of a JSON that change after the run: its bill goes on, and spot prices become known later.
CHANGING_VALUES = re.compile(r"misc\.(state|billed|machines\[\d+\]\.(seconds|dollars|total_dollars)) is ")
# Fields that metrics and result.json need not share: the seconds of the last checkpoint are added to it later.
LATE_FIELDS = ("where", "gap_steps")
Row = tuple[str, JsonDict]  # where it is, for messages, and its fields


@dataclass(frozen=True, kw_only=True)
class EventMetadata:
    """What MLPerf's log says beside the value of an event."""

    epoch_num: int | None = None
    top5: float | None = None


@dataclass(frozen=True, kw_only=True)
class MlperfEvent:
    """A line of MLPerf's log."""

    time_ms: int
    event_type: str
    key: str
    value: Any  # Any: text, number or null, as the key wants it
    metadata: EventMetadata = field(default_factory=EventMetadata)


def find_problems(
    table: str | None = None,
    entry: JsonDict | None = None,
    log: str | None = None,
    run: RunData | None = None,
    result: TrainResult | None = None,
) -> Iterator[str]:
    """Yield the problems of a TSV, its JSON and its log, and of the run with its result; each of them may be missing.

    Raises `ArithmeticError`, `LookupError`, `TypeError` or `ValueError` for values that this program never writes.
    """
    try:
        if run and result:
            yield from check_metrics_against_result(run, result)
        described_run = None if entry is None else writers.decode_entry(entry)
        reference = run or described_run
        table_rows = None if table is None else _parse_tsv(table, reference)
        if entry is not None and described_run:
            yield from check_entry(entry, described_run)
        if table_rows and reference:
            yield from _check_rows(table_rows, _parse_tsv(writers.render_tsv(reference), reference), "; the run says")
        if log is not None:
            prefix = "" if table is None and entry is None else "the log, "
            for problem in _check_log(log, table_rows, reference, "the run" if run else "the JSON"):
                yield f"{prefix}{problem}"
    except DamagedRecord as damage:
        yield str(damage)
        return
    if run and entry is not None:
        for problem in differences(entry, expected_entry(entry, run), "; the run says", is_exact=True):
            if not CHANGING_VALUES.match(problem):
                yield problem
    if reference:
        yield from _check_moments(reference, result)


def _check_rows(rows: Sequence[Row], expected_rows: Sequence[Row], source: str) -> Iterator[str]:
    """Yield the accuracies, or their moments, that differ from the expected rows of validated epochs."""
    for (where, row), (_, expected) in zip(rows, expected_rows, strict=False):
        yield from differences(row, expected, source, where)
    if len(rows) != len(expected_rows):
        yield f"it has {len(rows)} validated epochs{source} {len(expected_rows)}"


def _parse_tsv(table: str, run: RunData | None) -> list[Row]:
    """Return the rows of a TSV. Raises `DamagedRecord` for wrong columns, and for the first row that cannot be right.

    The columns are those of the run's recipe; without a run, those of any data set.
    """
    possible_columns = (
        [writers.tsv_columns(run.recipe)] if run else [writers.TSV_COLUMNS, *writers.TSV_COLUMNS_BY_DATA.values()]
    )
    possible_headers = ["\t".join(columns) for columns in possible_columns]
    header, *lines = table.splitlines() or [""]
    if header not in possible_headers:
        raise DamagedRecord(f"the first line is {header!r}, not the columns {possible_headers[0]!r}")
    if not lines:
        raise DamagedRecord("there are no rows below the columns")
    names = TSV_NUMBERS[: len(header.split("\t"))]
    rows: list[Row] = []
    last = {"epoch": 0.0, "hours": 0.0}
    for number, line in enumerate(lines, 1):
        try:
            row = dict(zip(names, map(float, line.split("\t")), strict=True))
        except ValueError:
            raise DamagedRecord(f"row {number}: {line!r} is not {len(names)} numbers with tabs between them") from None
        where = f"row {number} (epoch {row['epoch']:g}): "
        if not all(map(math.isfinite, row.values())) or not row["epoch"].is_integer():
            raise DamagedRecord(f"{where}{line!r} is not a whole number and {len(row) - 1} finite numbers")
        for name, last_value in last.items():
            if row[name] <= last_value:
                raise DamagedRecord(f"{where}{name} {row[name]:g} comes after {last_value:g}")
        if not 0 <= row["top1"] <= row.get("top5", 100.0) <= 100:
            rule = f"and top5 {row['top5']} {INVALID_ACCURACIES}" if "top5" in row else "is not an accuracy in percent"
            raise DamagedRecord(f"{where}top1 {row['top1']} {rule}")
        rows.append((where, row))
        last = {name: row[name] for name in last}
    return rows


def _check_log(log: str, table_rows: Sequence[Row] | None, run: RunData | None, source: str) -> Iterator[str]:
    """Yield the problems of a log, compared with the run, else with the TSV. Raises `DamagedRecord`."""
    events = _parse_log(log)
    if run:
        org = next((event.value for event in events if event.key == "submission_org"), None)  # the author's to choose
        expected_lines = writers.render_mlperf_log(run, org).splitlines()
        for number, (line, expected) in enumerate(zip_longest(log.splitlines(), expected_lines, fillvalue=""), 1):
            if line != expected:
                event, expected_event = line.removeprefix(MLLOG_PREFIX), expected.removeprefix(MLLOG_PREFIX)
                yield f"line {number}: {event or 'is missing'}; {source} says {expected_event or 'nothing'}"
                return
    elif table_rows is not None:
        yield from _check_rows(_accuracy_rows(events), table_rows, "; the file beside it says")


def _parse_log(log: str) -> list[MlperfEvent]:
    """Return the events of a log. Raises `DamagedRecord` for the first line that cannot be right.

    The times must be in order, each interval needs a begin and an end, and accuracies are fractions.
    """
    events: list[MlperfEvent] = []
    open_intervals: list[str] = []
    for number, line in enumerate(log.splitlines(), 1):
        text = line.removeprefix(MLLOG_PREFIX) if line.startswith(MLLOG_PREFIX) else ""
        try:
            event = decode_json(MlperfEvent, text.encode())
        except DamagedRecord as error:
            raise DamagedRecord(f"line {number}: is not {MLLOG_PREFIX}and a JSON object: {error}") from None
        where = f"line {number} ({event.key}): "
        if events and event.time_ms < events[-1].time_ms:
            raise DamagedRecord(f"{where}is earlier than the line above it")
        interval = f"{event.key.rpartition('_')[0]} {event.metadata.epoch_num or ''}".strip()
        if event.event_type == writers.INTERVAL_START:
            open_intervals.append(interval)
        elif event.event_type == writers.INTERVAL_END:
            if interval not in open_intervals:
                raise DamagedRecord(f"{where}ends an interval that has no beginning")
            open_intervals.remove(interval)
        top5 = 1.0 if event.metadata.top5 is None else event.metadata.top5
        if event.key == "eval_accuracy" and not 0 <= event.value <= top5 <= 1:
            raise DamagedRecord(f"{where}{event.value} is not between 0 and 1, or above its top-5")
        events.append(event)
    if open_intervals:
        raise DamagedRecord(f"line {len(events)}: {open_intervals[0]} has a beginning and no end")
    return events


def _accuracy_rows(events: Sequence[MlperfEvent]) -> list[Row]:
    """Return the accuracies of a log as a TSV has them. Without a run_start, their times are NaN."""
    start_ms = next((event.time_ms for event in events if event.key == "run_start"), math.nan)
    return [
        (
            f"line {number} ({event.key}): ",
            {
                "epoch": event.metadata.epoch_num,
                "hours": (event.time_ms - start_ms) / 3_600_000,
                "top1": 100 * event.value,
                "top5": None if event.metadata.top5 is None else 100 * event.metadata.top5,
            },
        )
        for number, event in enumerate(events, 1)
        if event.key == "eval_accuracy"
    ]


def _check_moments(run: RunData, result: TrainResult | None) -> Iterator[str]:
    """Yield the moments that a run notes twice with different values."""
    moments = [(epoch, epoch.noted_at, "the metrics say") for epoch in run.epochs]
    if result and result.clock and result.clock.seconds is not None:
        moments.append((run.epochs[-1], run.loading_began_at + result.clock.seconds, "result.json says"))
    for epoch, noted_at, source in moments:
        seconds = math.nan if noted_at is None else noted_at - run.loading_began_at
        if epoch.clock is not None and abs(seconds - epoch.clock) > CLOCK_TOLERANCE_SECONDS:
            yield f"epoch {epoch.epoch}: ends after {epoch.clock:.2f} s; {source} {seconds:.2f}"


def check_metrics_against_result(run: RunData, result: TrainResult) -> Iterator[str]:
    """Yield the epochs that differ between the metrics and result.json."""
    names = [each.name for each in fields(EpochResult) if each.name not in LATE_FIELDS]
    result_by_epoch = {epoch.epoch: epoch for epoch in result.epochs}
    for epoch in run.epochs:
        where = f"epoch {epoch.epoch}: "
        if in_result := result_by_epoch.get(epoch.epoch):
            noted, expected = ({name: getattr(each, name) for name in names} for each in (epoch, in_result))
            yield from differences(noted, expected, " in the metrics; result.json says", where, is_exact=True)
        elif run.state == "done":
            yield f"{where}is in the metrics, but not in result.json"
    if validated_epochs := [epoch for epoch in result.epochs if epoch.top1 is not None]:
        last = validated_epochs[-1]
        top, expected = ({"top1": each.top1, "top5": each.top5} for each in (result, last))
        yield from differences(top, expected, f"; its epoch {last.epoch} has", "result.json: ", is_exact=True)
