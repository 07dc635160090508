"""Records of ImageNet and CIFAR-10 under the rules of DAWNBench and MLPerf: restated, and by their own checkers."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benchmark_rules import mlperf_problems
from support.peers import peer_python
from support.recorded_run import make_job

from cluster.records import run_data, writers
from cluster.records.run_data import RunData

Fixture = Any
# What DAWNBench's tests demand (stanford-futuredata/dawn-bench-entries at fb27b82), by the name of the data set.
DAWNBENCH_FIELDS = {"version", "author", "authorEmail", "framework", "model", "hardware", "timestamp"}
DAWNBENCH_COLUMNS = {
    "cifar10": ["epoch", "hours", "top1Accuracy"],
    "imagenet": ["epoch", "hours", "top1Accuracy", "top5Accuracy"],
}
MLPERF_RULESETS = ("1.0.0", "2.1.0", "3.1.0", "4.0.0")


@pytest.fixture(params=["local", "aws"])
def run(request: Any, hand_made: Fixture) -> RunData:
    """The run data of a job, on this computer or rented."""
    return run_data.collect_run_data(make_job(hand_made, request.param))


def with_data(run: RunData, data: str) -> RunData:
    """Return the run on another data set, with accuracies that DAWNBench accepts."""
    recipe = replace(run.recipe, data=replace(run.recipe.data, name=data))
    return replace(run, recipe=recipe, epochs=(*run.epochs[:-1], replace(run.epochs[-1], top1=94.0, top5=96.0)))


@pytest.mark.parametrize("data", DAWNBENCH_COLUMNS)
def test_record_follows_dawnbenchs_rules(data: str, run: RunData) -> None:
    run = with_data(run, data)
    entry = writers.dawnbench_entry(run, None, None, None, None)
    assert entry.keys() >= DAWNBENCH_FIELDS and entry["version"] == "v1.0"
    time.strptime(entry["timestamp"], "%Y-%m-%d")
    assert writers.render_tsv(run).splitlines()[0].split("\t") == DAWNBENCH_COLUMNS[data]


def test_log_follows_mlperfs_rules_of_the_open_division(run: RunData) -> None:
    assert list(mlperf_problems(writers.render_mlperf_log(run, "Ann"))) == []


@pytest.mark.parametrize("ruleset", MLPERF_RULESETS)
def test_log_passes_mlcommons_checker(ruleset: str, run: RunData, tmp_path: Path) -> None:
    python = peer_python("mlperf_logging")
    path = tmp_path / "result_0.txt"
    path.write_text(writers.render_mlperf_log(run, None))
    checker = [python, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset, path]
    completed = subprocess.run([str(part) for part in checker], capture_output=True, text=True)
    assert completed.returncode == 0 and "SUCCESS" in completed.stdout + completed.stderr, completed.stderr
