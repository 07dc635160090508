"""The benchmark records (DAWNBench, MLPerf) of a simulated run, their benchmarks' rules, and the command `record`.

The rules of MLPerf are checked by MLCommons' own checker.
"""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.peers import peer_python
from support.recorded_run import IMAGES, LOADING_BEGAN, PRICE, SAVED_STEP, STEP_SECONDS, VAL_IMAGES, make_job

from cluster import records
from cluster.errors import ClusterError
from cluster.records import RunData

SECONDS_OF_FIRST_EPOCH = 20 + 32 * STEP_SECONDS + 5.0  # until the first step, 32 steps, validation


@pytest.fixture
def run(hand_made: Any) -> RunData:
    return records.collect_run_data(make_job(hand_made, "aws"))


def log_events(run: RunData) -> list[dict[str, Any]]:
    lines = records.render_mlperf_log(run, None).splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.mark.parametrize(("data", "done"), [("imagenet", True), ("cifar10", False)])
def test_table_has_a_row_for_each_validated_epoch_also_of_a_failed_job(hand_made: Any, data: str, done: bool) -> None:
    table = records.render_tsv(records.collect_run_data(make_job(hand_made, done=done, data=data)))
    columns, *rows = [line.split("\t") for line in table.splitlines()]
    with_top5 = [["1", 20, 50], ["2", 40, 72], ["4", 60, 94]]
    assert columns == ["epoch", "hours", "top1Accuracy", "top5Accuracy"][: 3 if data == "cifar10" else 4]
    assert [[row[0], *map(float, row[2:])] for row in rows] == [row[: len(columns) - 1] for row in with_top5]
    assert float(rows[0][1]) == pytest.approx(SECONDS_OF_FIRST_EPOCH / 3600, abs=1e-6)


def test_entry_describes_hardware_price_epochs_and_attempts(run: RunData) -> None:
    entry = records.dawnbench_entry(run, None, None)
    assert (entry["model"], entry["timestamp"], entry["costPerHour"]) == ("resnet18", "2023-11-14", 2 * PRICE)
    assert (entry["version"], entry["framework"]) == ("v1.0", "imgnet-cluster 1, PyTorch 2")
    # What DAWNBench's tests demand (stanford-futuredata/dawn-bench-entries at fb27b82), also of the table's columns.
    assert entry.keys() >= {"version", "author", "authorEmail", "framework", "model", "hardware", "timestamp"}
    for part in ("2 x p4d.24xlarge (8 x A100)", "r-1a spot", "GPUs: 2 on NVIDIA A100"):
        assert part in entry["hardware"]
    misc = json.loads(json.dumps(entry["misc"]))
    assert misc["hours"] == run.epoch_ends[-1] / 3600
    assert misc["dollars"] == pytest.approx(misc["hours"] * 2 * PRICE)
    assert misc["billed"] == pytest.approx((390 + 260 + 125) * PRICE / 3600)
    assert misc["seconds_to_loading"] == 100.0
    epochs = [(row["epoch"], row["steps"], row["global_batch"], row["size"]) for row in misc["epochs"]]
    assert epochs == [(1, 32, 32, 64), (2, 32, 32, 64), (3, 16, 64, 96), (4, 16, 64, 96)]
    assert [row["lr"] for row in misc["epochs"]][1::2] == pytest.approx([0.8, 0.04])
    assert [(row["machines"], row["first_step"]) for row in misc["timeline"] if row["machines"]] == [
        (["0", "1"], 0),
        (["0", "1"], SAVED_STEP),
    ]


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_entry_has_null_for_what_is_not_known(hand_made: Any, backend: str) -> None:
    job = make_job(hand_made, backend)
    if backend == "aws":  # the price of one machine is not known
        path = job.path / "cloud.jsonl"
        path.write_text(path.read_text().replace(f'"price": {PRICE}', '"price": null', 1))
    entry = records.dawnbench_entry(records.collect_run_data(job), None, None)
    assert entry["author"] is entry["authorEmail"] is entry["codeURL"] is entry["logFilename"] is None
    assert entry["costPerHour"] is entry["misc"]["dollars"] is entry["misc"]["billed"] is None


def test_log_has_settings_times_and_accuracies_and_follows_mlperfs_rules(run: RunData) -> None:
    events = log_events(run)
    time_by_key = {event["key"]: event["time_ms"] for event in events}
    run_end = LOADING_BEGAN + run.epoch_ends[-1]
    assert (time_by_key["run_start"], time_by_key["run_stop"]) == (1000 * LOADING_BEGAN, round(1000 * run_end))
    assert time_by_key["init_start"] == 1000 * (LOADING_BEGAN - 8.0)
    settings = {event["key"]: event["value"] for event in events if event["time_ms"] <= time_by_key["run_start"]}
    assert (settings["model_name"], settings["submission_status"]) == ("resnet18", "cloud")
    assert (settings["global_batch_size"], settings["opt_name"], settings["seed"]) == (32, "sgd", 0)
    assert settings["sgd_opt_base_learning_rate"] == pytest.approx(0.8) and settings["sgd_opt_momentum"] == 0.9
    assert settings["sgd_opt_end_learning_rate"] == pytest.approx(0.04)
    assert (settings["train_samples"], settings["eval_samples"]) == (IMAGES, VAL_IMAGES)
    values = {
        key: [(event["metadata"].get("epoch_num"), event["value"]) for event in events if event["key"] == key]
        for key in ("eval_accuracy", "global_batch_size")
    }
    assert values["eval_accuracy"] == [(1, 0.2), (2, 0.4), (4, 0.6)]
    assert values["global_batch_size"] == [(None, 32), (3, 64)]
    trained_at = [event["time_ms"] for event in events if event["key"] == "epoch_stop"]
    assert len(trained_at) == 4
    order = ["init_start", "init_stop", "run_start", "run_stop"]
    assert [event["key"] for event in events if event["key"] in order] == order
    times = [event["time_ms"] for event in events]
    assert times == sorted(times) and times[-1] > times[0]
    assert trained_at[0] == 1000 * (LOADING_BEGAN + SECONDS_OF_FIRST_EPOCH - 5.0)


@pytest.mark.parametrize("ruleset", ["1.0.0", "2.1.0", "3.1.0", "4.0.0"])
def test_log_passes_mlcommons_checker(ruleset: str, run: RunData, tmp_path: Path) -> None:
    python = peer_python("mlperf_logging")
    path = tmp_path / "result_0.txt"
    path.write_text(records.render_mlperf_log(run, None))
    checker = [python, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset, path]
    completed = subprocess.run([str(part) for part in checker], capture_output=True, text=True)
    assert completed.returncode == 0 and "SUCCESS" in completed.stdout + completed.stderr, completed.stderr


@pytest.mark.parametrize("target, status", [("top5=93", "success"), ("top5=99", "aborted")])
def test_log_says_whether_the_target_was_reached(hand_made: Any, target: str, status: str) -> None:
    events = log_events(records.collect_run_data(make_job(hand_made, target=target)))
    assert events[-1]["key"] == "run_stop" and events[-1]["metadata"] == {"status": status}


@pytest.mark.parametrize(("state", "message"), [
    ("training", "only be made of a job that has ended"),
    ("failed", "job-1 has no validated epoch to record; it is failed: rank 1 was killed"),
])  # fmt: skip
def test_job_without_an_end_or_a_validated_epoch_has_no_record(hand_made: Any, state: str, message: str) -> None:
    run = hand_made()
    run.write_attempt(1, "0.a")
    run.write_status(state, reason="rank 1 was killed", ended=state == "failed")
    with run.hold_agent_lock() if state == "training" else contextlib.nullcontext():
        run.job.refresh()
        with pytest.raises(ClusterError, match=message):
            records.collect_run_data(run.job)


@pytest.mark.parametrize("old, new, message", [
    ('"clock": 2', '"clock": null, "x": 2', "the clock jumped between two of its attempts"),
    ('"train_loss": 2.5', '"train_loss": NaN', "result.json: NaN is not a finite number"),
    ('"clock": 2', '"clock": 1e300, "x": 2', "a file of its run folder is damaged"),
])  # fmt: skip
def test_damaged_result_is_a_one_line_error_and_nothing_is_written(
    hand_made: Any, sandbox: Any, old: str, new: str, message: str
) -> None:
    path = make_job(hand_made).path / "result.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    completed = sandbox.cli("record", "job-1", "-o", "mine")
    assert completed.code == 1 and len(completed.err.splitlines()) == 1 and message in completed.err
    assert not list(sandbox.path.glob("mine*"))


def test_command_writes_all_formats_and_one_to_stdout(hand_made: Any, sandbox: Any) -> None:
    make_job(hand_made)
    completed = sandbox.cli("record", "job-1", "-o", "mine", "--author", "Ann")
    assert completed.code == 0 and completed.out.split("written: ")[1:] == ["mine.tsv\n", "mine.json\n", "mine.log\n"]
    entry = json.loads((sandbox.path / "mine.json").read_text())
    assert (entry["author"], entry["logFilename"]) == ("Ann", "mine.log")
    assert '"key": "submission_org", "value": "Ann"' in (sandbox.path / "mine.log").read_text()
    assert sandbox.cli("record").out == (sandbox.path / "mine.tsv").read_text()
    assert sandbox.cli("record", "-o", "one.json").code == 0
    entry = json.loads((sandbox.path / "one.json").read_text())
    assert entry["author"] is entry["logFilename"] is None
    assert not (sandbox.path / "one.log").exists()
    assert sandbox.cli("record", "-o", "one.log").code == 0
    assert (sandbox.path / "one.log").read_text().startswith(":::MLLOG ")


@pytest.mark.parametrize("arguments", [("-o", ""), ("-o", "/"), ("-o", ".."), ("-o", "f.json")])
def test_command_refuses_output_that_is_no_file_name(hand_made: Any, sandbox: Any, arguments: tuple[str, ...]) -> None:
    make_job(hand_made)
    (sandbox.path / "f.json").mkdir()
    before = {*sandbox.path.iterdir(), *sandbox.path.parent.iterdir()}
    completed = sandbox.cli("record", "job-1", *arguments)
    assert completed.code == 2 and len(completed.err.splitlines()) == 1 and completed.err.startswith("error: -o ")
    assert {*sandbox.path.iterdir(), *sandbox.path.parent.iterdir()} == before
