"""Records of ImageNet and CIFAR-10 under the rules of DAWNBench and MLPerf: restated, and by their own checkers."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benchmark_rules import dawnbench_problems, mlperf_problems
from support.peers import PEERS_FOLDER, peer_python
from support.recorded_run import make_job

from cluster.records import check, run_data, writers
from train.tools.filesystem import to_json_bytes

Fixture = Any
DATA_SETS = {"CIFAR10": "cifar10", "ImageNet": "imagenet"}  # DAWNBench's name: the recipe's
DAWNBENCH_TESTS = PEERS_FOLDER / "dawnbench" / "test_submissions.py"
MLPERF_RULESETS = ("1.0.0", "2.1.0", "3.1.0", "4.0.0")


@pytest.fixture(params=["local", "aws"])
def make_run_data(request: Any, hand_made: Fixture) -> Any:
    """Return a function that returns the run data of a job, on this computer or rented, by the name of its data set."""
    return lambda data="imagenet": run_data.collect_run_data(make_job(hand_made, request.param, data=data))


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_record_follows_dawnbenchs_rules(data_set: str, make_run_data: Any) -> None:
    facts = make_run_data(DATA_SETS[data_set])
    table, entry_text = writers.render_tsv(facts), to_json_bytes(writers.dawnbench_entry(facts)).decode()
    # The accuracies of the simulated run are too low for CIFAR-10; all else must be right.
    expected = ["top1Accuracy: is below 94.0"] if data_set == "CIFAR10" else []
    assert list(dawnbench_problems(data_set, table, entry_text)) == expected


def test_check_finds_the_columns_of_another_data_set(make_run_data: Any) -> None:
    facts = make_run_data("cifar10")
    entry, log = writers.dawnbench_entry(facts), writers.render_mlperf_log(facts)
    table = writers.render_tsv(facts)
    assert list(check.find_problems(table, entry, log, facts)) == []
    assert list(check.find_problems(table, log=log)) == list(check.find_problems(table)) == []
    table_of_imagenet = table.replace("\ttop1Accuracy\n", "\ttop1Accuracy\ttop5Accuracy\n")
    for beside in ({"entry": entry}, {"run": facts}):
        (problem,) = check.find_problems(table_of_imagenet, **beside)
        assert problem.endswith(r"not the columns 'epoch\thours\ttop1Accuracy'")
    wrong_table = table.replace("\t60.0000", "\t160.0000")
    assert next(check.find_problems(wrong_table)) == "row 3 (epoch 4): top1 160.0 is not an accuracy in percent"
    assert next(check.find_problems(table.replace("\t60.0000", "\t61.0000"), entry)).startswith(
        "row 3 (epoch 4): top1 is 61"
    )


def test_log_follows_mlperfs_rules_of_the_open_division(make_run_data: Any) -> None:
    assert list(mlperf_problems(writers.render_mlperf_log(make_run_data()))) == []


def test_log_names_who_submits_it(make_run_data: Any) -> None:
    facts = make_run_data()
    log = writers.render_mlperf_log(facts, org="Ann")
    assert '"key": "submission_org", "value": "Ann"' in log
    assert list(check.find_problems(log=log, run=facts)) == []


@pytest.mark.parametrize("ruleset", MLPERF_RULESETS)
def test_log_passes_mlcommons_checker(ruleset: str, make_run_data: Any, tmp_path: Path) -> None:
    python = peer_python("mlperf_logging")
    path = tmp_path / "result_0.txt"
    path.write_text(writers.render_mlperf_log(make_run_data()))
    checker = [python, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset, path]
    completed = subprocess.run([str(part) for part in checker], capture_output=True, text=True)
    assert completed.returncode == 0 and "SUCCESS" in completed.stdout + completed.stderr, completed.stderr


def test_record_passes_dawnbenchs_own_tests(make_run_data: Any, tmp_path: Path) -> None:
    python = peer_python("pandas", "pytest")
    if not DAWNBENCH_TESTS.exists():
        pytest.skip(f"{DAWNBENCH_TESTS} is not there; make peers fetches it from GitHub")
    (tmp_path / "tests").mkdir()
    shutil.copy(DAWNBENCH_TESTS, tmp_path / "tests")
    facts = make_run_data()
    for data_set, name in DATA_SETS.items():
        *epochs, last_epoch = facts.epochs
        last_epoch = replace(last_epoch, top1=94.0 if name == "cifar10" else 60.0, top5=96.0)
        recipe = replace(facts.recipe, data=replace(facts.recipe.data, name=name))
        facts = replace(facts, recipe=recipe, epochs=(*epochs, last_epoch))
        folder = tmp_path / data_set / "train"
        folder.mkdir(parents=True)
        (folder / "ours.json").write_bytes(to_json_bytes(writers.dawnbench_entry(facts)))
        (folder / "ours.tsv").write_text(writers.render_tsv(facts))
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "ours", "tests"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0 and "8 passed" in completed.stdout, completed.stdout
