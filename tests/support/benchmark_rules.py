"""What DAWNBench and MLPerf demand of a record, restated from their checkers; each problem is one line.

DAWNBench: tests/test_submissions.py of stanford-futuredata/dawn-bench-entries at fb27b82. MLPerf: the open division of
MLCommons' compliance checker (mlperf_logging 4.1, rulesets 1.0, 2.1, 3.1 and 4.0; where they differ, the strictest).
"""

import datetime
import json
from collections.abc import Iterator
from typing import Any

MLLOG_PREFIX = ":::MLLOG "
DAWNBENCH_FIELDS = ("version", "author", "authorEmail", "framework", "model", "hardware", "timestamp")
DAWNBENCH_COLUMNS = {
    "CIFAR10": ["epoch", "hours", "top1Accuracy"],
    "ImageNet": ["epoch", "hours", "top1Accuracy", "top5Accuracy"],
}
DAWNBENCH_THRESHOLDS = {"CIFAR10": ("top1Accuracy", 94.0), "ImageNet": ("top5Accuracy", 93.0)}

# How often a key must be there, and what its event must fulfil.
ONCE, AT_LEAST_ONCE = "once", "at least once"
MLPERF_OPEN_RULES: dict[str, tuple[str, Any]] = {
    "submission_org": (ONCE, lambda event: event["value"] != ""),
    "submission_platform": (ONCE, lambda event: event["value"] != ""),
    "submission_division": (ONCE, lambda event: event["value"] == "open"),
    "submission_status": (ONCE, lambda event: event["value"] in ("cloud", "onprem", "preview", "research")),
    "submission_benchmark": (ONCE, lambda event: event["value"] == "resnet"),
    "cache_clear": (AT_LEAST_ONCE, lambda event: True),
    "init_start": (AT_LEAST_ONCE, lambda event: True),
    "init_stop": (ONCE, lambda event: True),
    "run_start": (ONCE, lambda event: True),
    "run_stop": (ONCE, lambda event: "status" in event["metadata"]),
    "epoch_start": (AT_LEAST_ONCE, lambda event: "epoch_num" in event["metadata"]),
    "epoch_stop": (AT_LEAST_ONCE, lambda event: "epoch_num" in event["metadata"]),
    "eval_start": (AT_LEAST_ONCE, lambda event: "epoch_num" in event["metadata"]),
    "eval_stop": (AT_LEAST_ONCE, lambda event: "epoch_num" in event["metadata"]),
    "eval_accuracy": (AT_LEAST_ONCE, lambda event: "epoch_num" in event["metadata"]),
    "train_samples": (ONCE, lambda event: event["value"] != ""),
    "eval_samples": (ONCE, lambda event: event["value"] != ""),
}
ORDERED_KEYS = ("init_start", "init_stop", "run_start", "run_stop")
MAX_INIT_MS = 30 * 60 * 1000


def mlperf_problems(log: str) -> Iterator[str]:
    """Yield why MLCommons' checker refuses a log in the open division."""
    events = [json.loads(line.removeprefix(MLLOG_PREFIX)) for line in log.splitlines()]
    for key, (count_rule, is_valid) in MLPERF_OPEN_RULES.items():
        events_of_key = [event for event in events if event["key"] == key]
        if not events_of_key or (count_rule == ONCE and len(events_of_key) != 1):
            yield f"{key}: is there {len(events_of_key)} times, not {count_rule}"
        yield from (f"{key}: {event} is not valid" for event in events_of_key if not is_valid(event))
    keys = [event["key"] for event in events]
    positions = [keys.index(key) for key in ORDERED_KEYS if key in keys]
    if positions != sorted(positions):
        yield f"{', '.join(ORDERED_KEYS)}: come in another order"
    time_by_key = {event["key"]: event["time_ms"] for event in events}
    if time_by_key.get("init_stop", 0) - time_by_key.get("init_start", 0) >= MAX_INIT_MS:
        yield "init_stop: comes 30 minutes after init_start"
    if not any(event["value"] < 1 for event in events if event["key"] == "eval_accuracy"):
        yield "eval_accuracy: no accuracy is a fraction"


def dawnbench_problems(data_set: str, table: str, entry_text: str) -> Iterator[str]:
    """Yield why DAWNBench's tests refuse a record of one of its data sets."""
    entry = json.loads(entry_text)
    yield from (f"{field}: is missing" for field in DAWNBENCH_FIELDS if field not in entry)
    datetime.datetime.strptime(entry["timestamp"], "%Y-%m-%d")
    if entry["version"] != "v1.0":
        yield f"version: is {entry['version']}"
    columns, *rows = (line.split("\t") for line in table.splitlines())
    if sorted(columns) != sorted(DAWNBENCH_COLUMNS[data_set]):
        yield f"the columns are {columns}"
    column, threshold = DAWNBENCH_THRESHOLDS[data_set]
    if column in columns and max(float(row[columns.index(column)]) for row in rows) < threshold:
        yield f"{column}: is below {threshold}"
