"""Does a record add up? What is wrong with one, in order, each as a line that names the row: a table and a log by
themselves, all forms against each other, against the run, and the run against itself. Pure.
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

SECONDS_TOLERANCE, PERCENT_TOLERANCE = 0.01, 1e-4  # seconds and percent by which a rounded number may differ
MLLOG_PREFIX = ":::MLLOG "
AUTHORSHIP_FIELDS = ("author", "authorEmail", "codeURL", "logFilename", "version")  # who wrote it down, and where
LATE_BILLING_FIELDS = ("seconds", "dollars", "all")  # of a machine: its bill goes on, and spot prices are known later
FIELDS_IN_METRICS_AND_RESULT = (  # of an epoch: its line of the metrics and its row of result.json say the same; "where" grows by a last save
    "size", "global_batch", "steps", "lr", "seconds", "train_seconds", "val_seconds", "images_per_second",
    "train_images", "train_loss", "train_top1", "train_top5", "val_images", "val_loss", "view", "top1", "top5",
    "top1_square", "top5_square", "at", "clock",
)  # fmt: skip
ValidationRows = Sequence[tuple[float, float, float, float]]  # of each validated epoch: number, seconds, top-1, top-5


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` where it is none, or too deep, or a number is not finite."""
    try:
        return json.loads(text, parse_constant=_parse_finite_float, parse_float=_parse_finite_float)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _parse_finite_float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no finite number")
    return found


def find_problems(
    table: str | None = None,
    entry: JsonMapping | None = None,
    log: str | None = None,
    run_data: JsonMapping | None = None,
) -> Iterator[str]:
    """Yield what is wrong with a TSV, its JSON and a log, of which some may be missing; `ran` is what was run.

    Raises `ArithmeticError`, `AttributeError`, `LookupError`, `RecursionError`, `TypeError` or `ValueError` where a
    JSON or log is not of our making.
    """
    if run_data is not None:
        yield from check_metrics_against_result(run_data)
    known = entry if entry is not None else writers.dawnbench_entry(run_data) if run_data else None
    if table is not None and (wrong := list(check_tsv(table))):
        yield from wrong
        return
    if entry is not None:
        yield from check_entry(entry)
    if table is not None and known is not None:
        yield from check_tsv_against_entry(table, known)
    if log is not None:
        where = "" if table is None and entry is None else "the log, "
        yield from (where + one for one in check_mlperf_log(log, table, entry, run_data))
    if run_data is None:
        return
    if entry is not None:
        yield from check_entry_against_run(entry, run_data)
    yield from check_run_times(run_data)


# --- the TSV --------------------------------------------------------------------------------------------------------


def parse_tsv_rows(table: str) -> list[list[float]]:
    """Return the numbers of a TSV's rows. Raises `ValueError` where there are none."""
    return [[float(cell) for cell in line.split("\t")] for line in table.splitlines()[1:]]


def check_tsv(table: str) -> Iterator[str]:
    """Yield what is wrong within a TSV: columns, order, accuracies."""
    head, *lines = table.splitlines() or [""]
    if head != writers.TSV_HEADER:
        yield f"the first line is {head!r}, not the columns {writers.TSV_HEADER!r}"
        return
    if not lines:
        yield "there are no rows below the columns"
    before = (0.0, 0.0)
    for place, line in enumerate(lines, 1):
        cells = line.split("\t")
        try:
            epoch, hours, top1, top5 = map(float, cells)
        except ValueError:
            yield f"row {place}: {line!r} is not four numbers with tabs between them"
            return
        where = f"row {place} (epoch {cells[0]})"
        if not all(map(math.isfinite, (epoch, hours, top1, top5))) or epoch != int(epoch):
            yield f"{where}: {line!r} is not a whole number and three finite ones"
        if epoch <= before[0]:
            yield f"{where}: comes after epoch {before[0]:g}"
        if hours <= before[1]:
            yield f"{where}: {hours:g} hours come after {before[1]:g}"
        if not 0 <= top1 <= top5 <= 100:
            yield f"{where}: {INVALID_ACCURACIES_MESSAGE.format(top1, top5, '')}"
        before = epoch, hours


def check_tsv_against_entry(table: str, entry: JsonMapping) -> Iterator[str]:
    """Yield where a TSV says something else than its JSON."""
    told = writers.validated_epochs(entry["misc"])
    mine = parse_tsv_rows(table)
    for place, (row, (epoch, hours, top1, top5)) in enumerate(zip(told, mine, strict=False), 1):
        where = f"row {place} (epoch {epoch:g})"
        if row["epoch"] != epoch:
            yield f"{where}: the run validated epoch {row['epoch']} there"
        if abs(3600 * hours - row["seconds"]) > SECONDS_TOLERANCE:
            yield f"{where}: {hours:g} hours; the run says {row['seconds'] / 3600:.6f}"
        for name, value in zip(ACCURACY_FIELD_PAIRS[0], (top1, top5), strict=True):
            if abs(row[name] - value) > PERCENT_TOLERANCE:
                yield f"{where}: {name} {value:g}; the run says {row[name]:.4f}"
    if len(mine) != len(told):
        yield f"row {min(len(mine), len(told)) + 1}: the run validated {len(told)} epochs, the table has {len(mine)}"


# --- the log --------------------------------------------------------------------------------------------------------


def check_mlperf_log(
    log: str, table: str | None, entry: JsonMapping | None, run_data: JsonMapping | None
) -> Iterator[str]:
    """Yield what is wrong with a log: by itself, then against the run, else the JSON, else the TSV."""
    if wrong := list(check_log_form(log)):
        yield from wrong
    elif run_data is not None:
        yield from check_log_against_run(log, writers.render_mlperf_log(run_data))
    elif entry is not None:
        rows = writers.validated_epochs(entry["misc"])
        yield from check_log_accuracies(log, [(row["epoch"], row["seconds"], row["top1"], row["top5"]) for row in rows])
        yield from check_log_settings(log, entry)
    elif table is not None:
        yield from check_log_accuracies(
            log, [(epoch, 3600 * hours, top1, top5) for epoch, hours, top1, top5 in parse_tsv_rows(table)]
        )


def check_log_form(log: str) -> Iterator[str]:
    """Yield what is wrong within a log: its form, the order of times, what was begun and not ended."""
    before, open_ones = 0, list[str]()
    for place, line in enumerate(log.splitlines(), 1):
        try:
            said = parse_json(line.removeprefix(MLLOG_PREFIX)) if line.startswith(MLLOG_PREFIX) else None
        except ValueError:
            said = None
        if not isinstance(said, Mapping) or not {"time_ms", "event_type", "key", "value", "metadata"} <= said.keys():
            yield f"line {place}: is not {MLLOG_PREFIX.strip()} and a JSON object with time, type, key, value and metadata"
            return
        if said["time_ms"] < before:
            yield f"line {place} ({said['key']}): comes before the line above it"
        before = said["time_ms"]
        name = f"{said['key'].rpartition('_')[0]} {said['metadata'].get('epoch_num', '')}".strip()
        if said["event_type"] == writers.INTERVAL_START:
            open_ones.append(name)
        elif said["event_type"] == writers.INTERVAL_END:
            if name not in open_ones:
                yield f"line {place} ({said['key']}): ends what was not begun"
            else:
                open_ones.remove(name)
        if said["key"] == "eval_accuracy" and not 0 <= said["value"] <= said["metadata"].get("top5", 1) <= 1:
            yield f"line {place} (eval_accuracy): {said['value']} is no share of 1, or above its top-5"
    if open_ones:
        yield f"line {len(log.splitlines())}: {open_ones[0]} was begun and not ended"


def parse_log_lines(log: str) -> list[tuple[str, JsonMapping]]:
    """Return the lines of a log as data, each with its place."""
    rows = [parse_json(line.removeprefix(MLLOG_PREFIX)) for line in log.splitlines()]
    return [(f"line {place} ({row['key']})", row) for place, row in enumerate(rows, 1)]


def check_log_accuracies(log: str, expected_rows: ValidationRows) -> Iterator[str]:
    """Yield where a log's accuracies, or their moments, are not those of the rows beside it."""
    rows = parse_log_lines(log)
    begun = next((row["time_ms"] for _, row in rows if row["key"] == "run_start"), math.nan)
    mine = [(where, row) for where, row in rows if row["key"] == "eval_accuracy"]
    for (where, row), (epoch, seconds, top1, top5) in zip(mine, expected_rows, strict=False):
        more = row["metadata"]
        if more.get("epoch_num") != epoch:
            yield f"{where}: epoch {more.get('epoch_num')}; beside it epoch {epoch:g} was validated there"
        for name, share, value in (("top1", row["value"], top1), ("top5", more.get("top5"), top5)):
            if share is None or abs(100 * share - value) > PERCENT_TOLERANCE:
                yield f"{where}: {name} {share}; beside it epoch {epoch:g} has {value:.4f} %"
        took = (row["time_ms"] - begun) / 1000
        if not abs(took - seconds) <= SECONDS_TOLERANCE:
            yield f"{where}: {took:.2f} s after the start; beside it epoch {epoch:g} ends at {seconds:.2f}"
    if len(mine) != len(expected_rows):
        yield f"eval_accuracy: stands there {len(mine)} times; beside it {len(expected_rows)} epochs were validated"


def check_log_settings(log: str, entry: JsonMapping) -> Iterator[str]:
    """Yield where a log's settings and its end are not those of the JSON."""
    misc, rows, heard = entry["misc"], entry["misc"]["epochs"], set()
    rated = [{**row, "first_lr": row["lr"][0], "last_lr": row["lr"][1]} for row in rows]
    images = {f"{name}_images": count for name, count in misc["images"].items()}
    told = json_roundtrip(writers.mlperf_settings({"recipe": misc["recipe"], "epochs": rated, **images}))
    batches = {row["epoch"]: row["global_batch"] for row in rows}
    status = "success" if writers.has_succeeded(misc) else "aborted"
    for where, row in parse_log_lines(log):
        key, value, number = row["key"], row["value"], row["metadata"].get("epoch_num")
        heard.add(key)
        of_epoch = key == "global_batch_size" and number is not None
        if key in told and value != (other := batches.get(number) if of_epoch else told[key]):
            yield f"{where}: {json.dumps(value)}; the JSON says {json.dumps(other)}"
        if key == "run_stop":
            if row["metadata"].get("status") != status:
                yield f"{where}: {row['metadata'].get('status')}; by the JSON {status}"
            if (day := time.strftime("%Y-%m-%d", time.gmtime(row["time_ms"] / 1000))) != entry["timestamp"]:
                yield f"{where}: on {day}; the timestamp of the JSON is {entry['timestamp']}"
    if missing := {*told, "run_stop"} - heard:
        yield f"{min(missing)}: is not there"


def check_log_against_run(log: str, expected_log: str) -> Iterator[str]:
    """Yield the first line in which a log differs from what the run says."""
    mine, theirs = log.splitlines(), expected_log.splitlines()
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False), 1):
        if one != other:
            yield f"line {place}: {one.removeprefix(MLLOG_PREFIX)}; the run says {other.removeprefix(MLLOG_PREFIX)}"
            return
    if len(mine) != len(theirs):
        yield f"line {min(len(mine), len(theirs)) + 1}: the log has {len(mine)} lines, the run says {len(theirs)}"


# --- the run --------------------------------------------------------------------------------------------------------


def check_entry_against_run(entry: JsonMapping, run_data: JsonMapping) -> Iterator[str]:
    """Yield where a JSON says something else than the run folder, by the place in it."""
    told = json_roundtrip(writers.dawnbench_entry(run_data))
    differ = first_difference(without_changing_fields(entry), without_changing_fields(told))
    if differ:
        yield f"{differ[0]} is {json.dumps(differ[1])}; the run says {json.dumps(differ[2])}"


def without_changing_fields(entry: JsonMapping) -> dict[str, Any]:
    """Return what of a JSON does not change after the run, nor with who writes it down."""
    found = {name: one for name, one in entry.items() if name not in AUTHORSHIP_FIELDS}
    misc = {name: one for name, one in found["misc"].items() if name != "state"}
    machines = [
        {name: one for name, one in each.items() if name not in LATE_BILLING_FIELDS} for each in misc["machines"]
    ]
    return {**found, "misc": {**misc, "machines": machines, "cost": {**misc["cost"], "billed": None}}}


def first_difference(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place in which two plain values differ, with both; None where they are equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        pairs = [(f"{path}.{name}".lstrip("."), left.get(name), right.get(name)) for name in {**right, **left}]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(left, right, strict=True))]
    else:
        return None if left == right else (path, left, right)
    return next((found for name, mine, its in pairs if (found := first_difference(mine, its, name))), None)


def check_run_times(run_data: JsonMapping) -> Iterator[str]:
    """Yield where the run folder itself tells the same moment twice, and differently."""
    last = run_data["epochs"][-1]
    told = run_data["result_seconds"]
    if told is not None and abs(told - last["clock"]) > CLOCK_TOLERANCE_SECONDS:
        yield f"epoch {last['epoch']}: ends after {last['clock']:.2f} s; result.json says {told:.2f}"
    for row in run_data["epochs"]:
        if row["noted"] is not None and abs(row["noted"] - run_data["begun"] - row["clock"]) > CLOCK_TOLERANCE_SECONDS:
            yield f"epoch {row['epoch']}: ends after {row['clock']:.2f} s; the metrics noted it at {row['noted']:.2f}"


def check_metrics_against_result(run_data: JsonMapping) -> Iterator[str]:
    """Yield where the run folder tells an epoch twice, in the metrics and in result.json, and differently."""
    told = {row["epoch"]: row for row in run_data["result_epochs"]}
    for row in run_data["epochs"]:
        other = told.get(row["epoch"])
        if other is None:
            if run_data["state"] == "done":
                yield f"epoch {row['epoch']}: stands in the metrics; result.json has no such epoch"
            continue
        for name in FIELDS_IN_METRICS_AND_RESULT:
            if row.get(name) != other.get(name):
                one, its = json.dumps(row.get(name)), json.dumps(other.get(name))
                yield f"epoch {row['epoch']}: {name} is {one} in the metrics; result.json says {its}"
    for last in [row for row in run_data["result_epochs"] if row["top1"] is not None][-1:]:
        for name, value in run_data["result_top"].items():
            if value != last[name]:
                yield f"result.json: {name} is {json.dumps(value)}; epoch {last['epoch']} in it has {last[name]}"
