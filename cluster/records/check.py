"""Checks whether benchmark records are consistent. Pure functions; each problem is one line that names the row.

A TSV and an MLPerf log are checked by themselves, all formats against each other, against the run, and the run folder
against itself. `check_entry.py` checks DAWNBench's JSON by itself.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from train.tools.filesystem import json_roundtrip, parse_json

from . import writers
from .check_entry import CLOCK_TOLERANCE_SECONDS, INVALID_ACCURACIES, check_entry
from .differences import differences
from .writers import JsonMapping

MLLOG_PREFIX = ":::MLLOG "
MLLOG_KEYS = {"time_ms", "event_type", "key", "value", "metadata"}
TSV_NUMBERS = ("epoch", "hours", "top1", "top5")  # what the columns of a TSV hold; the last may be missing
AUTHORSHIP_FIELDS = ("author", "authorEmail", "codeURL", "logFilename", "version")  # the author's to choose
# Fields of a machine that change after the run: its bill goes on, and spot prices become known later.
LATE_BILLING_FIELDS = ("seconds", "dollars", "all")
# Fields of an epoch that must be equal in the metrics and in result.json. "where" is not among them: the seconds of the
# last checkpoint are added to it later.
FIELDS_IN_METRICS_AND_RESULT = (
    *("size", "global_batch", "steps", "lr", "seconds", "train_seconds", "val_seconds", "images_per_second"),
    *("train_images", "train_loss", "train_top1", "train_top5", "val_images", "val_loss", "view"),
    *("top1", "top5", "top1_square", "top5_square", "at", "clock"),
)
Row = tuple[str, JsonMapping]  # where it is, for messages, and its fields


class BadForm(Exception):
    """A TSV or a log is damaged. The text is one line that names the place."""


def find_problems(
    table: str | None = None,
    entry: JsonMapping | None = None,
    log: str | None = None,
    run_data: JsonMapping | None = None,
) -> Iterator[str]:
    """Yield the problems of a TSV, its JSON and its log, and of the run; each of them may be missing.

    Raises `ArithmeticError`, `AttributeError`, `LookupError`, `RecursionError`, `TypeError` or `ValueError` when a JSON
    or a log has a form that this program never writes.
    """
    prefix = ""  # of the text of a damage
    try:
        if run_data is not None:
            yield from check_metrics_against_result(run_data)
        table_rows = None if table is None else _parse_tsv(table, _tsv_columns(entry, run_data))
        if entry is not None:
            yield from check_entry(entry)
        if table_rows is not None and (reference := entry or (run_data and writers.dawnbench_entry(run_data))):
            yield from _check_rows(table_rows, _validated_rows(reference), "; the run says")
        if log is not None:
            prefix = "" if table is None and entry is None else "the log, "
            events = _parse_log(log)
            for problem in _check_log(log, events, table_rows, entry, run_data):
                yield f"{prefix}{problem}"
    except BadForm as damage:
        yield f"{prefix}{damage}"
        return
    if run_data is not None:
        if entry is not None:
            expected = _without_changing_fields(json_roundtrip(writers.dawnbench_entry(run_data)))
            yield from differences(_without_changing_fields(entry), expected, "; the run says", is_exact=True)
        yield from _check_run_times(run_data)


def _check_rows(rows: Sequence[Row], expected_rows: Sequence[JsonMapping], source: str) -> Iterator[str]:
    """Yield the accuracies, or their moments, that differ from the expected rows of validated epochs."""
    for (where, row), expected in zip(rows, expected_rows, strict=False):
        expected_row = {name: expected[name] for name in row if name in expected}  # CIFAR-10's TSV has no top-5
        yield from differences(row, expected_row, source, where)
    if len(rows) != len(expected_rows):
        yield f"it has {len(rows)} validated epochs{source} {len(expected_rows)}"


def _validated_rows(entry: JsonMapping) -> list[JsonMapping]:
    return [{**row, "hours": row["seconds"] / 3600} for row in writers.validated_epochs(entry["misc"])]


# --- the TSV --------------------------------------------------------------------------------------------------------


def _tsv_columns(entry: JsonMapping | None, run_data: JsonMapping | None) -> list[Sequence[str]]:
    """Return the possible columns of a TSV: those of the recipe, or all when it is unknown."""
    recipe = (run_data or (entry or {}).get("misc") or {}).get("recipe")
    return [writers.tsv_columns(recipe)] if recipe else [writers.TSV_COLUMNS, *writers.TSV_COLUMNS_BY_DATA.values()]


def _parse_tsv(table: str, possible_columns: Sequence[Sequence[str]]) -> list[Row]:
    """Return the rows of a TSV. Raises `BadForm` for wrong columns, and for the first row that cannot be right."""
    header, *lines = table.splitlines() or [""]
    possible_headers = ["\t".join(columns) for columns in possible_columns]
    if header not in possible_headers:
        raise BadForm(f"the first line is {header!r}, not the columns {possible_headers[0]!r}")
    if not lines:
        raise BadForm("there are no rows below the columns")
    names = TSV_NUMBERS[: len(header.split("\t"))]
    rows: list[Row] = []
    last = {"epoch": 0.0, "hours": 0.0}
    for number, line in enumerate(lines, 1):
        try:
            row = dict(zip(names, map(float, line.split("\t")), strict=True))
        except ValueError:
            raise BadForm(f"row {number}: {line!r} is not {len(names)} numbers with tabs between them") from None
        where = f"row {number} (epoch {row['epoch']:g}): "
        if not all(map(math.isfinite, row.values())) or not row["epoch"].is_integer():
            raise BadForm(f"{where}{line!r} is not a whole number and {len(row) - 1} finite numbers")
        for name, last_value in last.items():
            if row[name] <= last_value:
                raise BadForm(f"{where}{name} {row[name]:g} comes after {last_value:g}")
        if "top5" not in row and not 0 <= row["top1"] <= 100:
            raise BadForm(f"{where}top1 {row['top1']} is not an accuracy in percent")
        if "top5" in row and not 0 <= row["top1"] <= row["top5"] <= 100:
            raise BadForm(f"{where}top1 {row['top1']} and top5 {row['top5']} {INVALID_ACCURACIES}")
        rows.append((where, row))
        last = {name: row[name] for name in last}
    return rows


# --- the log --------------------------------------------------------------------------------------------------------


def _parse_log(log: str) -> list[Row]:
    """Return the events of a log. Raises `BadForm` for the first line that cannot be right.

    The times must be in order, each interval needs a begin and an end, and accuracies are fractions.
    """
    events: list[Row] = []
    last_time_ms = 0
    open_intervals: list[str] = []
    for number, line in enumerate(log.splitlines(), 1):
        try:
            event = parse_json(line.removeprefix(MLLOG_PREFIX).encode()) if line.startswith(MLLOG_PREFIX) else None
        except ValueError:
            event = None
        if not isinstance(event, Mapping) or not event.keys() >= MLLOG_KEYS:
            form = f"{MLLOG_PREFIX}and a JSON object with time, type, key, value and metadata"
            raise BadForm(f"line {number}: is not {form}")
        where = f"line {number} ({event['key']}): "
        if event["time_ms"] < last_time_ms:
            raise BadForm(f"{where}is earlier than the line above it")
        last_time_ms = event["time_ms"]
        interval = f"{event['key'].rpartition('_')[0]} {event['metadata'].get('epoch_num', '')}".strip()
        if event["event_type"] == writers.INTERVAL_START:
            open_intervals.append(interval)
        elif event["event_type"] == writers.INTERVAL_END:
            if interval not in open_intervals:
                raise BadForm(f"{where}ends an interval that has no beginning")
            open_intervals.remove(interval)
        if event["key"] == "eval_accuracy" and not 0 <= event["value"] <= event["metadata"].get("top5", 1) <= 1:
            raise BadForm(f"{where}{event['value']} is not between 0 and 1, or above its top-5")
        events.append((where, event))
    if open_intervals:
        raise BadForm(f"line {len(events)}: {open_intervals[0]} has a beginning and no end")
    return events


def _check_log(
    log: str,
    events: Sequence[Row],
    table_rows: Sequence[Row] | None,
    entry: JsonMapping | None,
    run_data: JsonMapping | None,
) -> Iterator[str]:
    """Yield the problems of a log, compared with the run, else with the JSON, else with the TSV."""
    if run_data is not None:
        lines = log.splitlines()
        org = next((event["value"] for _, event in events if event["key"] == "submission_org"), None)
        expected_lines = writers.render_mlperf_log(run_data, org).splitlines()  # the author's to choose
        for number, (line, expected) in enumerate(zip_longest(lines, expected_lines, fillvalue=""), 1):
            if line != expected:
                event, expected_event = line.removeprefix(MLLOG_PREFIX), expected.removeprefix(MLLOG_PREFIX)
                yield f"line {number}: {event or 'is missing'}; the run says {expected_event or 'nothing'}"
                return
    elif entry is not None:
        yield from _check_rows(_accuracy_rows(events), _validated_rows(entry), "; the file beside it says")
        yield from _check_log_settings(events, entry)
    elif table_rows is not None:
        expected_rows = [{**row, "seconds": 3600 * row["hours"]} for _, row in table_rows]
        yield from _check_rows(_accuracy_rows(events), expected_rows, "; the file beside it says")


def _accuracy_rows(events: Sequence[Row]) -> list[Row]:
    """Return the accuracies of a log as the other files have them. Without a run_start, their times are NaN."""
    start_ms = next((event["time_ms"] for _, event in events if event["key"] == "run_start"), math.nan)
    rows: list[Row] = []
    for where, event in events:
        if event["key"] == "eval_accuracy":
            top5 = event["metadata"].get("top5")
            row = {
                "epoch": event["metadata"].get("epoch_num"),
                "top1": 100 * event["value"],
                "top5": None if top5 is None else 100 * top5,
                "seconds": (event["time_ms"] - start_ms) / 1000,
            }
            rows.append((where, row))
    return rows


def _check_log_settings(events: Sequence[Row], entry: JsonMapping) -> Iterator[str]:
    """Yield the settings of a log, and its end, that differ from the JSON."""
    misc = entry["misc"]
    epochs = [{**row, "first_lr": row["lr"][0], "last_lr": row["lr"][1]} for row in misc["epochs"]]
    image_counts = {f"{split}_images": count for split, count in misc["images"].items()}
    settings = json_roundtrip(writers.mlperf_settings({"recipe": misc["recipe"], "epochs": epochs, **image_counts}))
    settings |= {"submission_benchmark": writers.MLPERF_BENCHMARK, "submission_platform": entry["hardware"]}
    batch_by_epoch = {row["epoch"]: row["global_batch"] for row in misc["epochs"]}
    end = {"status": "success" if writers.has_succeeded(misc) else "aborted", "day": entry["timestamp"]}
    for where, event in events:
        key = event["key"]
        epoch = event["metadata"].get("epoch_num")
        if key in settings:
            is_batch_of_epoch = key == "global_batch_size" and epoch is not None
            value = batch_by_epoch.get(epoch) if is_batch_of_epoch else settings[key]
            yield from differences(event, {"value": value}, "; the JSON says", where)
        if key == "run_stop":
            day = time.strftime("%Y-%m-%d", time.gmtime(event["time_ms"] / 1000))
            yield from differences({**event["metadata"], "day": day}, end, "; the JSON says", where)
    missing_keys = {*settings, "run_stop"} - {event["key"] for _, event in events}
    if missing_keys:
        yield f"{min(missing_keys)}: is missing"


# --- the run --------------------------------------------------------------------------------------------------------


def _without_changing_fields(entry: JsonMapping) -> JsonMapping:
    """Return a JSON without the fields that change after the run or that its author chooses."""
    misc = entry["misc"]
    machines = [_without(machine, LATE_BILLING_FIELDS) for machine in misc["machines"]]
    stable = {**_without(misc, ("state",)), "machines": machines, "cost": {**misc["cost"], "billed": None}}
    return {**_without(entry, AUTHORSHIP_FIELDS), "misc": stable}


def _without(row: JsonMapping, names: Sequence[str]) -> JsonMapping:
    return {name: value for name, value in row.items() if name not in names}


def _check_run_times(run_data: JsonMapping) -> Iterator[str]:
    """Yield the moments that the run folder notes twice with different values."""
    epochs = run_data["epochs"]
    moments = [(epochs[-1], run_data["result_seconds"], "result.json says")]
    for row in epochs:
        noted = None if row["noted_at"] is None else row["noted_at"] - run_data["loading_began_at"]
        moments.append((row, noted, "the metrics say"))
    for row, seconds, source in moments:
        if seconds is not None and abs(seconds - row["clock"]) > CLOCK_TOLERANCE_SECONDS:
            yield f"epoch {row['epoch']}: ends after {row['clock']:.2f} s; {source} {seconds:.2f}"


def check_metrics_against_result(run_data: JsonMapping) -> Iterator[str]:
    """Yield the epochs that differ between the metrics and result.json."""
    result_row_by_epoch = {row["epoch"]: row for row in run_data["result_epochs"]}
    for row in run_data["epochs"]:
        where = f"epoch {row['epoch']}: "
        if result_row := result_row_by_epoch.get(row["epoch"]):
            noted, expected = (
                {name: each.get(name) for name in FIELDS_IN_METRICS_AND_RESULT} for each in (row, result_row)
            )
            yield from differences(noted, expected, " in the metrics; result.json says", where, is_exact=True)
        elif run_data["state"] == "done":
            yield f"{where}is in the metrics, but not in result.json"
    if validated_rows := [row for row in run_data["result_epochs"] if row["top1"] is not None]:
        last_row = validated_rows[-1]
        expected = {name: last_row[name] for name in run_data["result_top"]}
        source = f"; its epoch {last_row['epoch']} has"
        yield from differences(run_data["result_top"], expected, source, "result.json: ", is_exact=True)
