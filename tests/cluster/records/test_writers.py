"""Tests of the benchmark records (DAWNBench, MLPerf), written from a simulated run folder, and of their checks."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.recorded_run import (
    IMAGES,
    LOADING_BEGAN,
    LOST_STEP,
    PAUSE_SECONDS,
    PRICE,
    RECIPE,
    SAVED_STEP,
    STEP_SECONDS,
    VAL_IMAGES,
    make_job,
)
from support.train_records import make_result

from cluster.errors import BadInput, ClusterError
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan
from cluster.records import check, run_data, writers
from cluster.records.run_data import RunData
from cluster.state import attempts
from cluster.state.result import target_outcome
from train.metrics.records import RunClock, StepRow
from train.tools import filesystem

Fixture = Any


@pytest.fixture
def facts(hand_made: Fixture) -> RunData:
    """The run data of a job on rented machines."""
    return run_data.collect_run_data(make_job(hand_made, "aws"))


def problems(**files: Any) -> list[str]:
    """Return the problems that the check finds in these files."""
    return list(check.find_problems(**files))


def json_copy(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry as it is read from a file."""
    return dict(json.loads(json.dumps(entry)))


# --- the writers ------------------------------------------------------------------------------------------------


def test_render_tsv_has_a_row_for_each_validated_epoch(facts: Any) -> None:
    lines = writers.render_tsv(facts).splitlines()
    assert lines[0] == "epoch\thours\ttop1Accuracy\ttop5Accuracy"
    rows = [line.split("\t") for line in lines[1:]]
    assert [(row[0], float(row[2]), float(row[3])) for row in rows] == [("1", 20, 50), ("2", 40, 72), ("4", 60, 94)]
    seconds = 20 + 32 * STEP_SECONDS + 5.0  # until the first step, 32 steps, validation
    assert float(rows[0][1]) == pytest.approx(seconds / 3600, abs=1e-6)


def test_dawnbench_entry_describes_rented_hardware_and_price(facts: Any) -> None:
    entry = writers.dawnbench_entry(
        facts, author="Ann", email="ann@example.org", code_url="https://example.org/x", log_filename="x.log"
    )
    assert tuple(entry) == tuple(field.name for field in fields(writers.DawnbenchEntry))
    assert (entry["author"], entry["authorEmail"], entry["codeURL"]) == (
        "Ann",
        "ann@example.org",
        "https://example.org/x",
    )
    assert (entry["model"], entry["timestamp"], entry["logFilename"]) == ("resnet18", "2023-11-14", "x.log")
    assert entry["hardware"] == "2 x p4d.24xlarge (8 x A100), AWS r-1a spot; 2 GPUs on NVIDIA A100"
    assert entry["framework"] == "imgnet-cluster 1, PyTorch 2" and entry["costPerHour"] == 2 * PRICE
    misc = entry["misc"]
    assert misc["dollars"] == pytest.approx(misc["hours"] * 2 * PRICE)
    assert misc["billed"] == pytest.approx((390 + 260 + 125) * PRICE / 3600)
    assert (misc["seconds_to_loading"], misc["seconds_to_first_step"]) == (100.0, 20.0)


def test_dawnbench_entry_schedule_is_the_executed_one(facts: Any) -> None:
    first, second = writers.dawnbench_entry(facts)["misc"]["schedule"]
    assert (first["start"], first["end"], first["steps"], first["global_batch"]) == (0, 2, 64, 32)
    assert (second["start"], second["end"], second["steps"], second["global_batch"]) == (2, 4, 32, 64)
    assert first["lr"] == pytest.approx([0.2, 0.8]) and second["lr"] == pytest.approx([0.4, 0.04])
    assert first["lr_per_256"] == pytest.approx([1.6, 6.4]) and (second["shape"], second["rect_val"]) == (
        "linear",
        True,
    )
    rows = writers.dawnbench_entry(facts)["misc"]["epochs"]
    assert [(row["epoch"], row["attempt"], row["step"]) for row in rows] == [
        (1, 1, 32),
        (2, 1, 64),
        (3, 2, 80),
        (4, 2, 96),
    ]
    _, second_attempt = writers.dawnbench_entry(facts)["misc"]["attempts"]
    assert second_attempt["seconds_lost"] == pytest.approx(
        (LOST_STEP - SAVED_STEP) * STEP_SECONDS + PAUSE_SECONDS + STEP_SECONDS
    )
    assert (second_attempt["machines"], second_attempt["processes"], second_attempt["reason"]) == (
        ["0", "1"],
        2,
        "lost",
    )


def test_effective_metrics_leaves_out_repeated_steps(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    attempts_by_number = {attempt.number: attempt for attempt in attempts.history(job.run_folder.shared)}
    steps = [(row.attempt, row.step) for row in run_data.effective_metrics(job, attempts_by_number, StepRow)]
    assert max(step for attempt, step in steps if attempt == 1) == SAVED_STEP
    assert min(step for attempt, step in steps if attempt == 2) == SAVED_STEP + 1


def test_dawnbench_entry_own_machines_unknown_fields_are_null(hand_made: Fixture) -> None:
    entry = writers.dawnbench_entry(run_data.collect_run_data(make_job(hand_made)))
    assert entry["author"] is entry["authorEmail"] is entry["codeURL"] is entry["logFilename"] is None
    assert entry["costPerHour"] is None and entry["misc"]["dollars"] is entry["misc"]["billed"] is None
    assert entry["hardware"] == "2 machines; 2 GPUs on NVIDIA A100"
    assert problems(entry=json_copy(entry)) == []


def test_dawnbench_entry_unknown_machine_price_makes_price_null(hand_made: Fixture) -> None:
    job = make_job(hand_made, "aws")
    path = job.path / "cloud.jsonl"
    first_line, *other_lines = path.read_text().splitlines()
    path.write_text("\n".join([first_line.replace(f'"price": {PRICE}', '"price": null'), *other_lines, ""]))
    entry = writers.dawnbench_entry(run_data.collect_run_data(job))
    assert entry["costPerHour"] is None and entry["misc"]["dollars"] is entry["misc"]["billed"] is None
    assert problems(entry=json_copy(entry)) == []


def test_render_mlperf_log_has_mlperf_keys_and_run_times(facts: Any) -> None:
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in writers.render_mlperf_log(facts).splitlines()]
    keys = [event["key"] for event in events]
    assert keys[-1] == "run_stop" and events[-1]["metadata"] == {"status": "success"}
    time_by_key = {event["key"]: event["time_ms"] for event in events}
    assert (time_by_key["run_start"], time_by_key["run_stop"]) == (
        1000 * LOADING_BEGAN,
        round(1000 * facts.epochs[-1].at),
    )
    assert time_by_key["init_start"] == 1000 * (LOADING_BEGAN - 8.0)
    settings = {event["key"]: event["value"] for event in events if event["time_ms"] <= time_by_key["run_start"]}
    assert (settings["submission_benchmark"], settings["model_name"]) == ("resnet", "resnet18")
    assert (settings["submission_division"], settings["submission_status"]) == ("open", "cloud")
    assert settings["submission_platform"] == writers.describe_hardware(facts) and settings["submission_org"] is None
    assert (settings["global_batch_size"], settings["opt_name"], settings["seed"]) == (32, "sgd", 0)
    assert settings["sgd_opt_base_learning_rate"] == pytest.approx(0.8) and settings["sgd_opt_momentum"] == 0.9
    assert settings["train_samples"] == IMAGES and settings["eval_samples"] == VAL_IMAGES
    accuracies = [
        (event["metadata"]["epoch_num"], event["value"]) for event in events if event["key"] == "eval_accuracy"
    ]
    assert accuracies == [(1, 0.2), (2, 0.4), (4, 0.6)]
    assert keys.count("epoch_start") == keys.count("epoch_stop") == 4 and keys.count("global_batch_size") == 2
    first_epoch_start = next(event["time_ms"] for event in events if event["key"] == "epoch_start")
    assert first_epoch_start == pytest.approx(1000 * (LOADING_BEGAN + 20), abs=1)


def test_render_mlperf_log_missed_target_is_aborted(hand_made: Fixture) -> None:
    assert '"status": "aborted"' in writers.render_mlperf_log(
        run_data.collect_run_data(make_job(hand_made, target="top5=99"))
    )


def test_collect_run_data_lost_line_comes_from_result(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    path = job.path / "metrics/000001.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 64]
    path.write_text("\n".join(lines) + "\n")
    facts = run_data.collect_run_data(job)
    assert [epoch.epoch for epoch in facts.epochs] == [1, 2, 3, 4]
    assert facts.epochs[1].last_lr is None and facts.epochs[1].trained_at is None
    assert (
        problems(
            table=writers.render_tsv(facts),
            entry=json_copy(writers.dawnbench_entry(facts)),
            log=writers.render_mlperf_log(facts),
            run=facts,
        )
        == []
    )


@pytest.mark.parametrize(
    "name, settings",
    [
        ("sgd", ("momentum", "nesterov", "norm_decay", "bias_decay")),
        ("lars", ("momentum", "nesterov", "trust", "lars_form")),
        ("lamb", ("betas", "eps")),
        ("adamw", ("betas", "eps", "norm_decay", "bias_decay")),
        (
            "theirs.optim:build",
            ("momentum", "nesterov", "betas", "eps", "trust", "lars_form", "norm_decay", "bias_decay"),
        ),
    ],
)
def test_dawnbench_entry_has_only_used_optimizer_settings(facts: Any, name: str, settings: tuple[str, ...]) -> None:
    facts = replace(facts, recipe=replace(facts.recipe, optim=replace(facts.recipe.optim, name=name)))
    entry = json_copy(writers.dawnbench_entry(facts))
    common = {"name", "weight_decay", "loss", "label_smoothing", "scaling"}
    assert entry["misc"]["optimizer"].keys() == entry["misc"]["recipe"]["optim"].keys() == common | {*settings}
    assert problems(table=writers.render_tsv(facts), entry=entry, log=writers.render_mlperf_log(facts), run=facts) == []
    assert problems(entry=entry, log=writers.render_mlperf_log(facts)) == []


# --- the target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_write_result_has_seconds_and_dollars_to_target(hand_made: Fixture, backend: str) -> None:
    job = make_job(hand_made, backend)
    target = job.result.target
    row = job.result.epochs[-1]
    assert (target.metric, target.goal, target.reached, target.epoch, target.best) == (
        "top5",
        93.0,
        True,
        4,
        94.0,
    )
    assert target.seconds == row.clock and target.minutes == row.clock / 60
    assert target.seconds_all == pytest.approx(row.clock + 100)
    dollars = (row.clock + 90 + 260 + row.clock - 175) * PRICE / 3600
    assert target.dollars == (None if backend == "local" else pytest.approx(dollars, abs=2 * PRICE / 3600))


def test_target_has_no_time_since_the_launch_when_the_clock_contradicts_it(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    run = replace(job.run, spec=replace(job.spec, created=job.result.target.at - 1.0))
    outcome = target_outcome(run, job.backend, job.result.epochs)
    assert outcome and outcome.reached and outcome.seconds == job.result.target.seconds
    assert outcome.seconds_all is None


def test_status_command_says_target_was_reached(hand_made: Fixture, sandbox: Any) -> None:
    make_job(hand_made)
    completed = sandbox.cli("status", "job-1")
    assert "top-5 of 93 % reached in epoch 4, " in completed.out and completed.code == 0


def test_collect_run_data_failed_job_has_its_epochs(hand_made: Fixture) -> None:
    job = make_job(hand_made, done=False, target="top5=99")
    assert job.state == "failed" and job.result.target.reached is False
    assert job.result.target.best == 94.0
    facts = run_data.collect_run_data(job)
    assert problems(table=writers.render_tsv(facts), entry=json_copy(writers.dawnbench_entry(facts)), run=facts) == []


def test_launch_invalid_target_is_one_line_usage_error(sandbox: Any) -> None:
    planned = plan(RECIPE, make_launch_options(target="top5=93.0"))
    assert plan(RECIPE).spec.train.target == "" and planned.spec.train.target == "top5=93"
    completed = sandbox.cli("launch", "--local", "--dry-run", "--target", "93", sandbox.write_recipe(1))
    reason = "'93' is no target; they look like top5=93 or top1=76.1, in percent"
    assert completed.err == f"error: Invalid value for '--target': {reason} (imgnet-cluster launch --help)\n"
    with pytest.raises(BadInput, match=f"^Invalid value for '--target': {reason}$"):
        make_launch_options(target="93")
    assert completed.code == 2


def test_collect_run_data_running_job_is_refused(hand_made: Fixture) -> None:
    run = hand_made(target="top5=93")
    run.write_status("training", step=8, steps=16)
    with run.hold_agent_lock():
        assert run.job.status().target == "top5=93"
        with pytest.raises(ClusterError, match="job-1 is running; a record can only be made of a job that has ended"):
            run_data.collect_run_data(run.job)


# --- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_find_problems_written_records_have_none(hand_made: Fixture, backend: str) -> None:
    facts = run_data.collect_run_data(make_job(hand_made, backend))
    entry = json_copy(writers.dawnbench_entry(facts, author="Ann"))
    assert problems(table=writers.render_tsv(facts), entry=entry, log=writers.render_mlperf_log(facts), run=facts) == []


def with_cell(row: int, column: int, text: str) -> Callable[[str], str]:
    """Return a function that replaces a cell of a TSV."""

    def change(table: str) -> str:
        lines = [line.split("\t") for line in table.splitlines()]
        lines[row][column] = text
        return "\n".join("\t".join(line) for line in lines) + "\n"

    return change


def without_line(index: int) -> Callable[[str], str]:
    """Return a function that removes a line of a TSV."""
    return lambda table: "".join(line for number, line in enumerate(table.splitlines(keepends=True)) if number != index)


@pytest.mark.parametrize(
    "change, message",
    [
        (with_cell(0, 1, "minutes"), ".*not the columns"),
        (with_cell(2, 0, "1"), "row 2 (epoch 1): epoch 1 comes after 1"),
        (with_cell(2, 0, "2.5"), "row 2 (epoch 2.5): .* is not a whole number"),
        (with_cell(3, 1, "0.03"), "row 3 (epoch 4): hours 0.03 comes after"),
        (with_cell(1, 1, "nan"), "row 1 (epoch 1)"),
        (with_cell(3, 2, "94.5"), "row 3 (epoch 4): top1 94.5 and top5 94.0"),
        (with_cell(3, 3, "104"), "row 3 (epoch 4): top1"),
        (with_cell(2, 3, ""), "row 2: .* is not 4 numbers"),
        (lambda table: table.splitlines()[0], "there are no rows"),
    ],
)
def test_check_tsv_changed_cell_is_found(facts: Any, change: Any, message: str) -> None:
    found_problems = problems(table=change(writers.render_tsv(facts)))
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    assert found_problems and re.match(pattern, found_problems[0]), found_problems


@pytest.mark.parametrize(
    "change, message",
    [
        (with_cell(2, 0, "3"), "row 2 (epoch 3): epoch is 3.0; the run says 2"),
        (with_cell(3, 1, "0.079"), "row 3 (epoch 4): hours is 0.079; the run says"),
        (with_cell(3, 2, "61"), "row 3 (epoch 4): top1 is 61.0; the run says 60"),
        (with_cell(3, 3, "94.002"), "row 3 (epoch 4): top5 is 94.002; the run says 94"),
        (without_line(2), "row 2 (epoch 4): epoch is 4.0; the run says 2"),
        (without_line(3), "it has 2 validated epochs; the run says 3"),
    ],
)
@pytest.mark.parametrize("beside", ["json", "job"])
def test_check_tsv_against_entry_changed_cell_is_found(facts: Any, beside: str, change: Any, message: str) -> None:
    reference = {"entry": json_copy(writers.dawnbench_entry(facts))} if beside == "json" else {"run": facts}
    assert problems(table=change(writers.render_tsv(facts)), **reference)[0].startswith(message)


def set_value(entry: dict[str, Any], path: str, value: Any) -> None:
    """Replace the value at a path such as misc.epochs.0.steps."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    container: Any = entry
    for part in parents:
        container = container[part]
    container[last] = value


MUTATIONS = [
    ("misc.epochs.0.steps", 31, "epoch 1: steps is 31; by the rest of the record it is 32"),
    ("misc.epochs.2.step", 81, "epoch 3: step is 81"),
    ("misc.epochs.2.global_batch", 128, "epoch 3: global_batch is 128; by the rest of the record it is 64"),
    ("misc.epochs.2.size", 128, "epoch 3: size is 128"),
    ("misc.epochs.1.train_images", 999, "epoch 2: train_images is 999"),
    ("misc.epochs.1.epoch", 3, "epoch 3: epoch is 3; by the rest of the record it is 2"),
    ("misc.epochs.0.first_lr", 0.1, "epoch 1: first_lr is 0.1; by the rest of the record it is 0.2"),
    ("misc.epochs.3.last_lr", 0.02, "epoch 4: last_lr is 0.02; by the rest of the record it is 0.04"),
    ("misc.epochs.1.images_per_second", 17.0, "epoch 2: images_per_second is 17"),
    ("misc.epochs.1.train_seconds", 60.0, "epoch 2: "),
    ("misc.epochs.1.val_seconds", 60.0, "epoch 2: the clock says 69.2 s for 64.0 s of steps, 60.0 s of validation"),
    ("misc.epochs.1.clock", 100.0, "epoch 2: the clock says 11.0 s"),
    ("misc.epochs.3.clock", 200.0, "epoch 4: the clock says"),
    ("misc.epochs.3.clock", 400.0, "epoch 4: the clock says"),
    ("misc.epochs.3.top5", 94.5, "epoch 4: top5 94.5 % of 50 images is not a whole number of images"),
    ("misc.epochs.3.top1", 96.0, "epoch 4: top1 96.0 and top5 94.0"),
    ("misc.epochs.3.top1_square", 99.0, "epoch 4: top1_square 99.0 and top5_square 94.0"),
    ("misc.epochs.3.top5_square", 101.0, "epoch 4: top1_square 60.0 and top5_square 101.0"),
    ("misc.epochs.3.top1_square", 59.0, "epoch 4: top1_square 59 % of 50 images is not a whole number"),
    ("misc.epochs.3.top5_square", None, "epoch 4: top1_square 60.0 and top5_square None"),
    ("misc.epochs.2.top1_square", 50.0, "epoch 3: "),
    ("misc.epochs.2.view", "rect", 'epoch 3: view is "rect"; by the rest of the record it is null'),
    ("misc.epochs.3.view", "square", 'epoch 4: view is "square"; by the rest of the record it is "rect"'),
    ("misc.epochs.0.view", "rect", 'epoch 1: view is "rect"; by the rest of the record it is "square"'),
    ("misc.epochs.0.top1_square", 18.0, "epoch 1: top1_square is 18.0; by the rest of the record it is 20"),
    ("misc.epochs.1.val_seconds", -0.2, "misc.epochs[1].val_seconds is -0.2; a time cannot be negative"),
    ("misc.seconds_to_loading", -100.0, "misc.seconds_to_loading is -100"),
    ("misc.attempts.1.seconds_lost", -1, "misc.attempts[1].seconds_lost is -1"),
    ("misc.recipe.phases.1.epochs.1", 10**30, "misc.recipe: 1000000000000000000000000000000 epochs; no run has more"),
    ("misc.epochs.3.val_images", 49, "epoch 4: val_images is 49; by the rest of the record it is 50"),
    ("hardware", "8 x H100", 'hardware is "8 x H100"; by the rest of the record it is "2 x p4d.24xlarge'),
    (
        "framework",
        "PyTorch 9",
        'framework is "PyTorch 9"; by the rest of the record it is "imgnet-cluster 1, PyTorch 2"',
    ),
    ("timestamp", "2030-01-01", 'timestamp is "2030-01-01"; by the rest of the record it is "2023-11-14"'),
    ("misc.machines.1.market", "on-demand", "hardware is "),
    ("misc.seconds_to_first_step", 1.0, "misc.seconds_to_first_step is 1.0; by the rest of the record it is 20.0"),
    ("misc.epochs.0.began_at", LOADING_BEGAN, "epoch 1: the clock says"),
    ("misc.epochs.1.noted_at", LOADING_BEGAN, "epoch 2: ends after 158.20 s; the metrics say 0.00"),
    ("misc.schedule.0.lr", [0.1, 0.8], "misc.schedule[0].lr[0] is 0.1; by the rest of the record it is 0.2"),
    ("misc.schedule.1.steps", 33, "misc.schedule[1].steps is 33"),
    ("misc.optimizer.momentum", 0.95, "misc.optimizer.momentum is 0.95; by the rest of the record it is 0.9"),
    ("misc.seed", 1, "misc.seed is 1; by the rest of the record it is 0"),
    ("model", "resnet50", 'model is "resnet50"; by the rest of the record it is "resnet18"'),
    ("misc.hours", 0.05, "misc.hours is 0.05; by the rest of the record it is"),
    ("misc.dollars", 0.3, "misc.dollars is 0.3; "),
    ("misc.dollars", None, "misc.dollars is null; by the rest of the record it is 0."),
    ("costPerHour", 2.5, "costPerHour is 2.5; by the rest of the record it is 5.0"),
    ("misc.machines.0.price", 1.0, "costPerHour is 5.0; by the rest of the record it is 3.5"),
    ("misc.target.epoch", 2, "misc.target.epoch is 2; by the rest of the record it is 4"),
    ("misc.target.reached", False, "misc.target.reached is false; by the rest of the record it is true"),
    ("misc.target.seconds", 200.0, "misc.target.seconds is 200.0; by the rest of the record it is"),
    ("misc.target.minutes", 2.0, "misc.target.minutes is 2.0"),
    ("misc.recipe.phases.0.lr", [0.1, 0.5], "epoch 1: last_lr is"),
    ("misc.gpus", 4, "epoch 1: global_batch is 32; by the rest of the record it is 64"),
    ("misc.train_images", 1200, "epoch 1: steps is 32; by the rest of the record it is 38"),
]


@pytest.mark.parametrize("path, value, message", MUTATIONS, ids=[f"{path}={value}" for path, value, _ in MUTATIONS])
def test_check_entry_changed_value_is_found(facts: Any, path: str, value: Any, message: str) -> None:
    entry = json_copy(writers.dawnbench_entry(facts))
    set_value(entry, path, value)
    found_problems = problems(entry=entry)
    assert found_problems and found_problems[0].startswith(message), found_problems
    assert problems(entry=entry, run=facts)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("misc.precision", "float32", 'misc.precision is "float32"; the run says "bfloat16"'),
        ("misc.epochs.0.train_loss", 0.5, "misc.epochs[0].train_loss is 0.5; the run says 1.0"),
        ("misc.attempts.1.reason", "", 'misc.attempts[1].reason is ""; the run says "lost"'),
        ("misc.commit", "abc", 'misc.commit is "abc"'),
        ("misc.more", 1, "misc.more is 1; the run says null"),
    ],
)
def test_check_entry_against_run_changed_value_is_found(facts: Any, path: str, value: Any, message: str) -> None:
    entry = json_copy(writers.dawnbench_entry(facts))
    set_value(entry, path, value)
    assert problems(entry=entry) == [] and problems(entry=entry, run=facts)[0].startswith(message)


def test_check_entry_against_run_ignores_author_and_later_bills(facts: Any) -> None:
    entry = json_copy(writers.dawnbench_entry(facts, author="Ann", code_url="https://example.org"))
    for path, value in (("logFilename", "x.log"), ("misc.billed", 9.0), ("misc.machines.0.seconds", 1.0)):
        set_value(entry, path, value)
    assert problems(entry=entry, run=facts) == []


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line"),
        (lambda lines: [*lines[:-2], lines[-1]], "line"),
        (lambda lines: lines[:-1], "line"),
        (lambda lines: [*lines[:3], "hello", *lines[3:]], "line 4: is not :::MLLOG"),
        (lambda lines: [line.replace('"value": 0.6', '"value": 0.95') for line in lines], "line"),
        (lambda lines: [line.replace('"value": 0.6', '"value": 0.61') for line in lines], "line"),
        (lambda lines: [line.replace("lars", "sgd").replace('"value": 0.9', '"value": 0.8') for line in lines], "line"),
    ],
)
def test_check_log_against_run_changed_line_is_found(facts: Any, change: Any, message: str) -> None:
    lines = writers.render_mlperf_log(facts).splitlines()
    found_problems = problems(log="\n".join(change(lines)) + "\n", run=facts)
    assert found_problems and found_problems[0].startswith(message), found_problems


def test_check_log_form_finds_wrong_order_and_open_intervals(facts: Any) -> None:
    lines = writers.render_mlperf_log(facts).splitlines()
    assert problems(log="\n".join(lines)) == []
    run_start = next(number for number, line in enumerate(lines) if '"run_start"' in line)
    moved_end = [*lines[: run_start + 1], lines[-1], *lines[run_start + 1 : -1]]
    assert problems(log="\n".join(moved_end))[0].endswith("is earlier than the line above it")
    assert "run has a beginning and no end" in problems(log="\n".join(lines[:-1]))[0]
    without_start = [*lines[:run_start], *lines[run_start + 1 :]]
    assert "ends an interval that has no beginning" in problems(log="\n".join(without_start))[0]


def with_line(key: str, old: str, new: str) -> Callable[[str], str]:
    """Return a function that replaces `old` by `new` in the last line of a log that has this key."""

    def change(log: str) -> str:
        lines = log.splitlines()
        index = max(number for number, line in enumerate(lines) if f'"key": "{key}"' in line)
        assert old in lines[index]
        lines[index] = lines[index].replace(old, new)
        return "\n".join(lines) + "\n"

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (
            with_line("eval_accuracy", '"value": 0.6', '"value": 0.7'),
            "top1 is 70.0; the file beside it says 60.0",
        ),
        (
            with_line("eval_accuracy", '"top5": 0.94', '"top5": 0.96'),
            "top5 is 96.0; the file beside it says 94.0",
        ),
        (with_line("eval_accuracy", ', "top5": 0.94', ""), "top5 is null"),
        (
            with_line("eval_accuracy", '"epoch_num": 4', '"epoch_num": 3'),
            "epoch is 3; the file beside it says 4",
        ),
        (
            with_line("eval_accuracy", '"eval_accuracy"', '"eval_loss"'),
            "it has 2 validated epochs; the file beside it says 3",
        ),
        (
            lambda log: log.replace(
                f'"time_ms": {1000 * LOADING_BEGAN:.0f}', f'"time_ms": {1000 * LOADING_BEGAN - 50:.0f}'
            ),
            "hours is",
        ),
    ],
)
@pytest.mark.parametrize("beside", ["json", "tsv"])
def test_check_log_accuracies_changed_line_is_found(facts: Any, beside: str, change: Any, message: str) -> None:
    log = writers.render_mlperf_log(facts)
    reference: dict[str, Any] = {"table": writers.render_tsv(facts)}
    if beside == "json":
        reference = {"entry": json_copy(writers.dawnbench_entry(facts))}
    assert problems(log=log, **reference) == []
    found_problems = problems(log=change(log), **reference)
    assert found_problems, "the change was not found"
    expected = "; the JSON says {" if beside == "json" else message
    assert found_problems[0].startswith("the log, ") and expected in found_problems[0], found_problems


@pytest.mark.parametrize(
    "change, message",
    [
        (with_line("seed", '"value": 0', '"value": 1'), '"seed", "value": 1, '),
        (with_line("sgd_opt_momentum", "0.9", "0.8"), '"sgd_opt_momentum", "value": 0.8, '),
        (with_line("train_samples", '"train_samples"', '"samples"'), '"samples", "value": 1000, '),
        (with_line("global_batch_size", '"value": 64', '"value": 128'), '"global_batch_size", "value": 128, '),
        (with_line("run_stop", "success", "aborted"), '{"status": "aborted"}'),
    ],
)
def test_check_log_settings_changed_line_is_found(facts: Any, change: Any, message: str) -> None:
    log = change(writers.render_mlperf_log(facts))
    (problem,) = problems(log=log, entry=writers.dawnbench_entry(facts))
    changed, _, expected = problem.partition("; the JSON says ")
    assert message in changed and expected.startswith("{") and message not in expected, problem


def test_check_log_settings_other_day_is_found(facts: Any) -> None:
    entry = json_copy(writers.dawnbench_entry(facts)) | {"timestamp": "2023-11-15"}
    assert (
        'timestamp is "2023-11-15"; by the rest of the record it is "2023-11-14"'
        in problems(entry=entry, log=writers.render_mlperf_log(facts))[0]
    )


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[" * 100_000])
def test_check_log_refuses_numbers_that_are_not_finite(facts: Any, text: str) -> None:
    log = writers.render_mlperf_log(facts).splitlines()
    log[1] = f':::MLLOG {{"time_ms": {text}, "event_type": "POINT_IN_TIME", "key": "x", "value": 1, "metadata": {{}}}}'
    assert problems(log="\n".join(log))[0].startswith("line 2: is not :::MLLOG and a JSON object")


def test_find_problems_too_deep_entry_is_one_line_error(facts: Any) -> None:
    entry = json_copy(writers.dawnbench_entry(facts))
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    set_value(entry, "misc.processor", nested)
    (problem,) = problems(entry=entry)
    assert problem.startswith("no record of this program: ") and "processor" in problem and "\n" not in problem


# --- the run folder against itself ----------------------------------------------------------------------------------


def replace_last(path: Path, old: str, new: str) -> None:
    """Replace the last occurrence of `old` in a file."""
    before, separator, after = path.read_text().rpartition(old)
    assert separator
    path.write_text(before + new + after)


@pytest.mark.parametrize("name", ["metrics/000002.jsonl", "result.json"])
@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"top1": 60.0', '"top1": 70.0', "epoch 4: top1 is"),
        ('"top5": 94.0', '"top5": 96.0', "epoch 4: top5 is"),
        ('"top1_square": 60.0', '"top1_square": 50.0', "epoch 4: top1_square is"),
        ('"top5_square": 94.0', '"top5_square": 90.0', "epoch 4: top5_square is"),
        ('"val_loss": 2.0', '"val_loss": 1.0', "epoch 4: val_loss is"),
        ('"train_loss": 1.0', '"train_loss": 2.0', "epoch 4: train_loss is"),
        ('"view": "rect"', '"view": "square"', "epoch 4: view is"),
        ('"steps": 16', '"steps": 15', "epoch 4: steps is"),
        ('"seconds": 37.0', '"seconds": 36.0', "epoch 4: seconds is"),
        ('"lr": 0.04', '"lr": 0.03', "epoch 4: lr is"),
    ],
)
def test_check_metrics_against_result_changed_epoch_is_found(
    hand_made: Fixture, name: str, old: str, new: str, message: str
) -> None:
    job = make_job(hand_made)
    result = json.loads((job.path / "result.json").read_text())
    del result["target"]["best"]  # it has an accuracy too
    rows = result.pop("epochs")
    (job.path / "result.json").write_text(json.dumps({**result, "schedule": [], "epochs": rows}))
    assert list(check.check_metrics_against_result(run_data.collect_run_data(job), job.result)) == []
    replace_last(job.path / name, old, new)
    found_problems = problems(run=run_data.collect_run_data(job), result=job.result)
    assert found_problems, "the change was not found"
    assert found_problems[0].startswith(message) and "result.json says" in found_problems[0], found_problems


@pytest.mark.parametrize("name", ["metrics/000002.jsonl", "result.json"])
def test_collect_run_data_value_that_is_no_number_is_damage(hand_made: Fixture, name: str) -> None:
    job = make_job(hand_made)
    replace_last(job.path / name, '"train_loss": 1.0', '"train_loss": NaN')
    with (
        pytest.raises(ClusterError, match=f"damaged .*{name}.*: NaN is not a finite number"),
        job.report_damaged_files(),
    ):
        run_data.collect_run_data(job)


def test_check_metrics_against_result_missing_epoch_is_found(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    result = json.loads((job.path / "result.json").read_text())
    path = job.path / "result.json"
    path.write_text(json.dumps({**result, "top1": 61.0}))
    assert problems(run=run_data.collect_run_data(job), result=job.result) == [
        "result.json: top1 is 61.0; its epoch 4 has 60.0"
    ]
    path.write_text(json.dumps({**result, "epochs": result["epochs"][:2], "top1": 40.0, "top5": 72.0}))
    assert (
        problems(run=run_data.collect_run_data(job), result=job.result)[0]
        == "epoch 3: is in the metrics, but not in result.json"
    )


def test_record_command_inconsistent_run_folder_writes_nothing(hand_made: Fixture, sandbox: Any) -> None:
    job = make_job(hand_made)
    replace_last(job.path / "metrics/000002.jsonl", '"top1": 60.0', '"top1": 70.0')
    for arguments in (("job-1",), ("job-1", "-o", "mine"), ("--check", "job-1")):
        completed = sandbox.cli("record", *arguments)
        assert completed.code == 1 and completed.out == "" and len(completed.err.splitlines()) == 1
        assert "job-1: epoch 4: top1 is 70.0 in the metrics; result.json says 60.0" in completed.err
    assert not list(sandbox.path.glob("mine*"))


@pytest.mark.parametrize("name", ["result", "noted"])
def test_check_run_times_different_clocks_are_found(facts: Any, name: str) -> None:
    result = make_result(*facts.epochs, clock=RunClock(begun=LOADING_BEGAN, seconds=facts.epochs[-1].clock))
    assert problems(run=facts, result=result) == []
    if name == "result":
        assert result.clock and result.clock.seconds
        result = replace(result, clock=replace(result.clock, seconds=result.clock.seconds + 2.0))
    else:
        first, second, *others = facts.epochs
        facts = replace(facts, epochs=(first, replace(second, noted_at=second.noted_at + 2.0), *others))
    assert len(problems(run=facts, result=result)) == 1


# --- the command ----------------------------------------------------------------------------------------------------


def test_record_command_writes_and_checks_all_formats(hand_made: Fixture, sandbox: Any) -> None:
    make_job(hand_made)
    completed = sandbox.cli("record", "job-1", "-o", "mine", "--author", "Ann")
    assert completed.code == 0 and completed.out.split("written: ")[1:] == ["mine.tsv\n", "mine.json\n", "mine.log\n"]
    entry = json.loads((sandbox.path / "mine.json").read_text())
    assert (entry["author"], entry["logFilename"]) == ("Ann", "mine.log")
    assert sandbox.cli("record").out == (sandbox.path / "mine.tsv").read_text()
    for name in ("mine.tsv", "mine.json", "job-1"):
        completed = sandbox.cli("record", "--check", name)
        assert completed.code == 0 and "add up" in completed.out and "as job-1 ran" in completed.out, completed
    assert sandbox.cli("record", "--check", "mine.log", "job-1").code == 0
    text = (sandbox.path / "mine.tsv").read_text()
    (sandbox.path / "mine.tsv").write_text(text.replace("94.0000", "95.0000"))
    completed = sandbox.cli("record", "--check", "mine.tsv")
    assert (
        completed.code == 1 and completed.err == "error: mine.tsv: row 3 (epoch 4): top5 is 95.0; the run says 94.0\n"
    )
    (sandbox.path / "alone.tsv").write_text(text)
    assert "cannot be checked without" in sandbox.cli("record", "--check", "alone.tsv").out
    (sandbox.path / "mine.json").write_text("{}")
    assert sandbox.cli("record", "--check", "mine.json").err.startswith(
        "error: mine.json: no record of this program: Object missing required field"
    )


def test_record_command_unvalidated_job_is_one_line_error(hand_made: Fixture, sandbox: Any) -> None:
    run = hand_made()
    run.write_status("failed", reason="rank 1 was killed", ended=True)
    run.write_attempt(1, "0.a")
    completed = sandbox.cli("record", "job-1")
    assert completed.code == 1 and completed.out == "" and len(completed.err.splitlines()) == 1
    assert (
        "job-1 has validated no epoch, so there is nothing to record; it is failed: rank 1 was killed" in completed.err
    )


def test_collect_run_data_older_version_is_refused(hand_made: Fixture) -> None:
    job = make_job(hand_made)
    for path in (job.path / "metrics").iterdir():
        path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    with pytest.raises(ClusterError, match="older version, which did not note when loading began"):
        run_data.collect_run_data(job)


@pytest.mark.parametrize("arguments", [("--check", "job-1", "-o", "x"), ("--check", "nothing.tsv"), ("job-9",)])
def test_record_command_impossible_request_is_one_line_error(
    hand_made: Fixture, sandbox: Any, arguments: tuple[str, ...]
) -> None:
    make_job(hand_made)
    completed = sandbox.cli("record", *arguments)
    assert (
        completed.code in (1, 2, 102) and len(completed.err.splitlines()) == 1 and completed.err.startswith("error: ")
    )


@pytest.mark.parametrize(
    "arguments", [("-o", "."), ("-o", ""), ("-o", "/"), ("-o", ".."), ("--format", "json", "-o", "f")]
)
def test_record_command_bad_output_name_is_usage_error(
    hand_made: Fixture, sandbox: Any, arguments: tuple[str, ...]
) -> None:
    make_job(hand_made)
    (sandbox.path / "f").mkdir()
    before = {*sandbox.path.iterdir(), *sandbox.path.parent.iterdir()}
    completed = sandbox.cli("record", "job-1", *arguments)
    assert completed.code == 2 and len(completed.err.splitlines()) == 1 and completed.err.startswith("error: -o "), (
        completed
    )
    assert {*sandbox.path.iterdir(), *sandbox.path.parent.iterdir()} == before


def test_write_atomic_impossible_name_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        filesystem.write_atomic(tmp_path / "folder", b"x")
    assert caught.value.filename == str(tmp_path / "folder") and [*tmp_path.iterdir()] == [tmp_path / "folder"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught_in_file:
        filesystem.write_atomic(tmp_path / "file/name", b"x")
    assert caught_in_file.value.filename == str(tmp_path / "file/name")


def test_record_command_changed_files_are_one_line_errors(hand_made: Fixture, sandbox: Any) -> None:
    job = make_job(hand_made)
    assert sandbox.cli("record", "job-1", "-o", "mine").code == 0
    shutil.rmtree(job.path)
    completed = sandbox.cli("record", "--check", "mine.log")
    assert completed.code == 0 and "3 validated epochs, 96 steps in" in completed.out
    assert "lines of the log\n" in completed.out
    text = (sandbox.path / "mine.json").read_text()
    too_deep = text.replace('"author": null', f'"author": {"[" * 50_000}{"]" * 50_000}')
    for changed_text, message in (
        (re.sub('"hours": [0-9.]+', '"hours": NaN', text), "mine.json: is no JSON: NaN is not a finite number"),
        (
            text.replace(f'"train_images": {IMAGES},', '"train_images": Infinity,'),
            "mine.json: is no JSON: Infinity is not a finite",
        ),
        (
            text.replace(f'"train_images": {IMAGES},', f'"train_images": 1{"0" * 400},'),
            "mine.json: is no JSON: 1000000",
        ),
        (
            text.replace(f'"train_images": {IMAGES},', '"train_images": "many",'),
            "mine.json: no record of this program: Expected `int`, got `str` - at `$.misc",
        ),
        (too_deep, "mine.json: is no JSON: it is nested too deep"),
    ):
        (sandbox.path / "mine.json").write_text(changed_text)
        completed = sandbox.cli("record", "--check", "mine.json")
        assert completed.code == 1 and len(completed.err.splitlines()) == 1 and message in completed.err, completed
    (sandbox.path / "mine.json").write_text(text)
    replace_last(sandbox.path / "mine.log", '"value": 0.6', '"value": 0.7')
    completed = sandbox.cli("record", "--check", "mine.json")
    assert completed.code == 1 and completed.err.startswith("error: mine.json: the log, line "), completed
    (sandbox.path / "mine.log").rename(sandbox.path / "alone.log")
    completed = sandbox.cli("record", "--check", "alone.log")
    assert completed.code == 0 and "accuracies and rates cannot be checked without its JSON" in completed.out, completed
