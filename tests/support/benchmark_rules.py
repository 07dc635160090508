"""What MLCommons' compliance checker demands of a log of the open division, restated; each problem is one line.

Restated are the rulesets 1.0, 2.1, 3.1 and 4.0 of mlperf_logging 4.1; where they differ, the strictest.
"""

import json
from collections.abc import Iterator

MLLOG_PREFIX = ":::MLLOG "
KEYS_ONCE = (
    *("submission_org", "submission_platform", "submission_division", "submission_status", "submission_benchmark"),
    *("init_stop", "run_start", "run_stop", "train_samples", "eval_samples"),
)
KEYS_OF_EPOCHS = ("epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy")
ALLOWED_VALUES = {
    "submission_division": ("open",),
    "submission_status": ("cloud", "onprem", "preview", "research"),
    "submission_benchmark": ("resnet",),
}
ORDERED_KEYS = ["init_start", "init_stop", "run_start", "run_stop"]
MAX_INIT_MS = 30 * 60 * 1000


def mlperf_problems(log: str) -> Iterator[str]:
    """Yield why MLCommons' checker refuses a log in the open division."""
    events = [json.loads(line.removeprefix(MLLOG_PREFIX)) for line in log.splitlines()]
    keys = [event["key"] for event in events]
    yield from (f"{key}: is there {keys.count(key)} times" for key in KEYS_ONCE if keys.count(key) != 1)
    yield from (f"{key}: is missing" for key in ("cache_clear", "init_start", *KEYS_OF_EPOCHS) if key not in keys)
    if [key for key in keys if key in ORDERED_KEYS] != ORDERED_KEYS:
        yield f"{', '.join(ORDERED_KEYS)}: come in another order"
    times = [event["time_ms"] for event in events]
    if times != sorted(times):
        yield "the times are not in order"
    if times[keys.index("init_stop")] - times[keys.index("init_start")] >= MAX_INIT_MS:
        yield "init_stop: comes 30 minutes after init_start"
    for event in events:
        key, value = event["key"], event["value"]
        if value == "" or value not in ALLOWED_VALUES.get(key, (value,)):
            yield f"{key}: {value!r} is not allowed"
        if key in KEYS_OF_EPOCHS and "epoch_num" not in event["metadata"]:
            yield f"{key}: has no epoch_num"
        if key == "eval_accuracy" and not 0 <= value <= 1:
            yield f"{key}: {value} is no fraction"
        if key == "run_stop" and "status" not in event["metadata"]:
            yield f"{key}: has no status"
