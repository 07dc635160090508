"""Checks whether benchmark records are consistent. Pure functions; each problem is one line that names the row.

A TSV and an MLPerf log are checked by themselves, all formats against each other, against the run, and the run folder
against itself. `check_entry.py` checks DAWNBench's JSON by itself.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.tools.filesystem import json_roundtrip

from . import writers
from .check_entry import ACCURACY_FIELD_PAIRS, CLOCK_TOLERANCE_SECONDS, INVALID_ACCURACIES_MESSAGE, check_entry
from .writers import JsonMapping

SECONDS_TOLERANCE = 0.01  # by which a rounded number of seconds may differ
PERCENT_TOLERANCE = 1e-4  # by which a rounded accuracy in percent may differ
MLLOG_PREFIX = ":::MLLOG "
MLLOG_KEYS = {"time_ms", "event_type", "key", "value", "metadata"}
AUTHORSHIP_FIELDS = ("author", "authorEmail", "codeURL", "logFilename", "version")  # the author's to choose
# Fields of a machine that change after the run: its bill goes on, and spot prices become known later.
LATE_BILLING_FIELDS = ("seconds", "dollars", "all")
# Fields of an epoch that must be equal in the metrics and in result.json. "where" is not among them: the time of a last
# checkpoint is added to it later.
FIELDS_IN_METRICS_AND_RESULT = (
    "size",
    "global_batch",
    "steps",
    "lr",
    "seconds",
    "train_seconds",
    "val_seconds",
    "images_per_second",
    "train_images",
    "train_loss",
    "train_top1",
    "train_top5",
    "val_images",
    "val_loss",
    "view",
    "top1",
    "top5",
    "top1_square",
    "top5_square",
    "at",
    "clock",
)
ValidationRows = Sequence[tuple[float, float, float, float]]  # of each validated epoch: number, seconds, top-1, top-5


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` when it is not JSON, is nested too deep, or contains a number that is not finite.
    """
    try:
        return json.loads(text, parse_constant=_parse_finite_float, parse_float=_parse_finite_float)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


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
    if run_data is not None:
        yield from check_metrics_against_result(run_data)
    if table is not None:
        table_problems = list(check_tsv(table))
        if table_problems:
            yield from table_problems
            return
    if entry is not None:
        yield from check_entry(entry)
    if table is not None:
        expected_entry = entry
        if expected_entry is None and run_data:
            expected_entry = writers.dawnbench_entry(run_data)
        if expected_entry is not None:
            yield from check_tsv_against_entry(table, expected_entry)
    if log is not None:
        prefix = "" if table is None and entry is None else "the log, "
        for problem in check_mlperf_log(log, table, entry, run_data):
            yield prefix + problem
    if run_data is None:
        return
    if entry is not None:
        yield from check_entry_against_run(entry, run_data)
    yield from check_run_times(run_data)


# --- the TSV --------------------------------------------------------------------------------------------------------


def parse_tsv_rows(table: str) -> list[list[float]]:
    """Return the numbers of a TSV's rows. Raises `ValueError` for a cell that is not a number."""
    return [[float(cell) for cell in line.split("\t")] for line in table.splitlines()[1:]]


def check_tsv(table: str) -> Iterator[str]:
    """Yield the problems within a TSV: columns, order, accuracies."""
    header, *lines = table.splitlines() or [""]
    if header != writers.TSV_HEADER:
        yield f"the first line is {header!r}, not the columns {writers.TSV_HEADER!r}"
        return
    if not lines:
        yield "there are no rows below the columns"
    last_epoch = 0.0
    last_hours = 0.0
    for row_number, line in enumerate(lines, 1):
        cells = line.split("\t")
        try:
            epoch, hours, top1, top5 = map(float, cells)
        except ValueError:
            yield f"row {row_number}: {line!r} is not four numbers with tabs between them"
            return
        where = f"row {row_number} (epoch {cells[0]})"
        if not all(map(math.isfinite, (epoch, hours, top1, top5))) or epoch != int(epoch):
            yield f"{where}: {line!r} is not a whole number and three finite numbers"
        if epoch <= last_epoch:
            yield f"{where}: comes after epoch {last_epoch:g}"
        if hours <= last_hours:
            yield f"{where}: {hours:g} hours come after {last_hours:g}"
        if not 0 <= top1 <= top5 <= 100:
            yield f"{where}: {INVALID_ACCURACIES_MESSAGE.format(top1, top5, '')}"
        last_epoch = epoch
        last_hours = hours


def check_tsv_against_entry(table: str, entry: JsonMapping) -> Iterator[str]:
    """Yield the rows in which a TSV and its JSON disagree."""
    expected_rows = writers.validated_epochs(entry["misc"])
    rows = parse_tsv_rows(table)
    for row_number, (expected, (epoch, hours, top1, top5)) in enumerate(zip(expected_rows, rows, strict=False), 1):
        where = f"row {row_number} (epoch {epoch:g})"
        if expected["epoch"] != epoch:
            yield f"{where}: the run validated epoch {expected['epoch']} there"
        if abs(3600 * hours - expected["seconds"]) > SECONDS_TOLERANCE:
            yield f"{where}: {hours:g} hours; the run says {expected['seconds'] / 3600:.6f}"
        for name, value in zip(ACCURACY_FIELD_PAIRS[0], (top1, top5), strict=True):
            if abs(expected[name] - value) > PERCENT_TOLERANCE:
                yield f"{where}: {name} {value:g}; the run says {expected[name]:.4f}"
    if len(rows) != len(expected_rows):
        first_missing = min(len(rows), len(expected_rows)) + 1
        yield f"row {first_missing}: the run validated {len(expected_rows)} epochs, the table has {len(rows)}"


# --- the log --------------------------------------------------------------------------------------------------------


def check_mlperf_log(
    log: str, table: str | None, entry: JsonMapping | None, run_data: JsonMapping | None
) -> Iterator[str]:
    """Yield the problems of a log: by itself, then against the run, else against the JSON, else against the TSV."""
    form_problems = list(check_log_form(log))
    if form_problems:
        yield from form_problems
    elif run_data is not None:
        yield from check_log_against_run(log, writers.render_mlperf_log(run_data))
    elif entry is not None:
        rows = writers.validated_epochs(entry["misc"])
        yield from check_log_accuracies(log, [(row["epoch"], row["seconds"], row["top1"], row["top5"]) for row in rows])
        yield from check_log_settings(log, entry)
    elif table is not None:
        tsv_rows = parse_tsv_rows(table)
        yield from check_log_accuracies(
            log, [(epoch, 3600 * hours, top1, top5) for epoch, hours, top1, top5 in tsv_rows]
        )


def check_log_form(log: str) -> Iterator[str]:
    """Yield the problems within a log: its form, the order of times, intervals without begin or end."""
    last_time_ms = 0
    open_intervals: list[str] = []
    lines = log.splitlines()
    for line_number, line in enumerate(lines, 1):
        try:
            event = parse_json(line.removeprefix(MLLOG_PREFIX)) if line.startswith(MLLOG_PREFIX) else None
        except ValueError:
            event = None
        if not isinstance(event, Mapping) or not event.keys() >= MLLOG_KEYS:
            yield (
                f"line {line_number}: is not {MLLOG_PREFIX.strip()} and a JSON object with time, type, key, value and "
                "metadata"
            )
            return
        where = f"line {line_number} ({event['key']})"
        if event["time_ms"] < last_time_ms:
            yield f"{where}: is earlier than the line above it"
        last_time_ms = event["time_ms"]
        interval = f"{event['key'].rpartition('_')[0]} {event['metadata'].get('epoch_num', '')}".strip()
        if event["event_type"] == writers.INTERVAL_START:
            open_intervals.append(interval)
        elif event["event_type"] == writers.INTERVAL_END:
            if interval in open_intervals:
                open_intervals.remove(interval)
            else:
                yield f"{where}: ends an interval that has no beginning"
        if event["key"] == "eval_accuracy" and not 0 <= event["value"] <= event["metadata"].get("top5", 1) <= 1:
            yield f"{where}: {event['value']} is not between 0 and 1, or above its top-5"
    if open_intervals:
        yield f"line {len(lines)}: {open_intervals[0]} has a beginning and no end"


def parse_log_lines(log: str) -> list[tuple[str, JsonMapping]]:
    """Return the events of a log, each with the name of its line for messages."""
    events = [parse_json(line.removeprefix(MLLOG_PREFIX)) for line in log.splitlines()]
    return [(f"line {line_number} ({event['key']})", event) for line_number, event in enumerate(events, 1)]


def check_log_accuracies(log: str, expected_rows: ValidationRows) -> Iterator[str]:
    """Yield a problem for each accuracy of a log, or its time, that differs from the TSV or JSON of the same record."""
    events = parse_log_lines(log)
    start_ms = next((event["time_ms"] for _, event in events if event["key"] == "run_start"), math.nan)
    accuracy_events = [(where, event) for where, event in events if event["key"] == "eval_accuracy"]
    for (where, event), (epoch, seconds, top1, top5) in zip(accuracy_events, expected_rows, strict=False):
        metadata = event["metadata"]
        if metadata.get("epoch_num") != epoch:
            yield f"{where}: epoch {metadata.get('epoch_num')}; the file beside it has epoch {epoch:g} there"
        for name, fraction, percent in (("top1", event["value"], top1), ("top5", metadata.get("top5"), top5)):
            if fraction is None or abs(100 * fraction - percent) > PERCENT_TOLERANCE:
                yield f"{where}: {name} {fraction}; the file beside it has {percent:.4f} % for epoch {epoch:g}"
        seconds_in_log = (event["time_ms"] - start_ms) / 1000
        if not abs(seconds_in_log - seconds) <= SECONDS_TOLERANCE:  # also true when the log has no run_start
            yield (
                f"{where}: {seconds_in_log:.2f} s after the start; in the file beside it, epoch {epoch:g} ends at "
                f"{seconds:.2f}"
            )
    if len(accuracy_events) != len(expected_rows):
        yield (
            f"eval_accuracy: the log has {len(accuracy_events)} lines of it; the file beside it has "
            f"{len(expected_rows)} validated epochs"
        )


def check_log_settings(log: str, entry: JsonMapping) -> Iterator[str]:
    """Yield the settings of a log, and its end, that differ from the JSON."""
    misc = entry["misc"]
    epochs = [{**row, "first_lr": row["lr"][0], "last_lr": row["lr"][1]} for row in misc["epochs"]]
    image_counts = {f"{split}_images": count for split, count in misc["images"].items()}
    settings_data = {"recipe": misc["recipe"], "epochs": epochs, **image_counts}
    expected_settings = json_roundtrip(writers.mlperf_settings(settings_data))
    batch_by_epoch = {row["epoch"]: row["global_batch"] for row in misc["epochs"]}
    expected_status = "success" if writers.has_succeeded(misc) else "aborted"
    keys_in_log = set()
    for where, event in parse_log_lines(log):
        key = event["key"]
        epoch = event["metadata"].get("epoch_num")
        keys_in_log.add(key)
        if key in expected_settings:
            is_batch_of_epoch = key == "global_batch_size" and epoch is not None
            expected = batch_by_epoch.get(epoch) if is_batch_of_epoch else expected_settings[key]
            if event["value"] != expected:
                yield f"{where}: {json.dumps(event['value'])}; the JSON says {json.dumps(expected)}"
        if key == "run_stop":
            status = event["metadata"].get("status")
            if status != expected_status:
                yield f"{where}: {status}; the JSON says {expected_status}"
            day = time.strftime("%Y-%m-%d", time.gmtime(event["time_ms"] / 1000))
            if day != entry["timestamp"]:
                yield f"{where}: on {day}; the timestamp of the JSON is {entry['timestamp']}"
    missing_keys = {*expected_settings, "run_stop"} - keys_in_log
    if missing_keys:
        yield f"{min(missing_keys)}: is missing"


def check_log_against_run(log: str, expected_log: str) -> Iterator[str]:
    """Yield the first line in which a log differs from the log that the run would have now."""
    lines = log.splitlines()
    expected_lines = expected_log.splitlines()
    for line_number, (line, expected) in enumerate(zip(lines, expected_lines, strict=False), 1):
        if line != expected:
            event_text = line.removeprefix(MLLOG_PREFIX)
            yield f"line {line_number}: {event_text}; the run says {expected.removeprefix(MLLOG_PREFIX)}"
            return
    if len(lines) != len(expected_lines):
        first_missing = min(len(lines), len(expected_lines)) + 1
        yield f"line {first_missing}: the log has {len(lines)} lines, the run has {len(expected_lines)}"


# --- the run --------------------------------------------------------------------------------------------------------


def check_entry_against_run(entry: JsonMapping, run_data: JsonMapping) -> Iterator[str]:
    """Yield the first field in which a JSON differs from the run folder."""
    expected_entry = json_roundtrip(writers.dawnbench_entry(run_data))
    difference = first_difference(without_changing_fields(entry), without_changing_fields(expected_entry))
    if difference:
        path, value, expected = difference
        yield f"{path} is {json.dumps(value)}; the run says {json.dumps(expected)}"


def without_changing_fields(entry: JsonMapping) -> dict[str, Any]:
    """Return a JSON without the fields that change after the run or that its author chooses."""
    fields = {name: value for name, value in entry.items() if name not in AUTHORSHIP_FIELDS}
    misc = {name: value for name, value in fields["misc"].items() if name != "state"}
    machines = [
        {name: value for name, value in machine.items() if name not in LATE_BILLING_FIELDS}
        for machine in misc["machines"]
    ]
    return {**fields, "misc": {**misc, "machines": machines, "cost": {**misc["cost"], "billed": None}}}


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path of the first difference between two plain values, and both values; None when they are equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        pairs = [(f"{path}.{name}".lstrip("."), left.get(name), right.get(name)) for name in {**right, **left}]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{path}[{index}]", *values) for index, values in enumerate(zip(left, right, strict=True))]
    else:
        return None if left == right else (path, left, right)
    for child_path, left_child, right_child in pairs:
        difference = first_difference(left_child, right_child, child_path)
        if difference:
            return difference
    return None


def check_run_times(run_data: JsonMapping) -> Iterator[str]:
    """Yield a problem for each time of an epoch that two files of the run folder state differently."""
    last_epoch = run_data["epochs"][-1]
    result_seconds = run_data["result_seconds"]
    if result_seconds is not None and abs(result_seconds - last_epoch["clock"]) > CLOCK_TOLERANCE_SECONDS:
        where = f"epoch {last_epoch['epoch']}"
        yield f"{where}: ends after {last_epoch['clock']:.2f} s; result.json says {result_seconds:.2f}"
    for row in run_data["epochs"]:
        if row["noted_at"] is None:
            continue
        noted_seconds = row["noted_at"] - run_data["loading_began_at"]
        if abs(noted_seconds - row["clock"]) > CLOCK_TOLERANCE_SECONDS:
            yield f"epoch {row['epoch']}: ends after {row['clock']:.2f} s; the metrics say {noted_seconds:.2f}"


def check_metrics_against_result(run_data: JsonMapping) -> Iterator[str]:
    """Yield the epochs that differ between the metrics and result.json."""
    result_row_by_epoch = {row["epoch"]: row for row in run_data["result_epochs"]}
    for row in run_data["epochs"]:
        result_row = result_row_by_epoch.get(row["epoch"])
        if result_row is None:
            if run_data["state"] == "done":
                yield f"epoch {row['epoch']}: is in the metrics, but not in result.json"
            continue
        for name in FIELDS_IN_METRICS_AND_RESULT:
            if row.get(name) != result_row.get(name):
                value = json.dumps(row.get(name))
                result_value = json.dumps(result_row.get(name))
                yield f"epoch {row['epoch']}: {name} is {value} in the metrics; result.json says {result_value}"
    validated_rows = [row for row in run_data["result_epochs"] if row["top1"] is not None]
    if validated_rows:
        last_row = validated_rows[-1]
        for name, value in run_data["result_top"].items():
            if value != last_row[name]:
                yield f"result.json: {name} is {json.dumps(value)}; its epoch {last_row['epoch']} has {last_row[name]}"
