"""Random schedules of faults (benchmarks/elastic/trials.py): each job ends like one that nobody disturbed."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from train.tools import checkpoint_io

# One process of pytest runs all trials: they are one fixture, several at a time.
pytestmark = pytest.mark.xdist_group("random schedules")

COUNT = 20
FIRST_SEED = 2000
MAX_PARALLEL = 4
TRIALS_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "elastic" / "trials.py"


@pytest.fixture(scope="module")
def trials() -> Iterator[Any]:
    """The module benchmarks/elastic/trials.py, which puts the repository on sys.path."""
    path_before = list(sys.path)
    spec = importlib.util.spec_from_file_location("trials", TRIALS_PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path_before


@pytest.fixture(
    scope="module", params=[pytest.param(True, marks=pytest.mark.release), False], ids=["in place", "restart"]
)
def outcomes(
    trials: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[Any]]:
    """The outcomes of all trials. The folder of a trial that failed stays as long as pytest keeps it."""
    bench = trials.TrialBench(
        tmp_path_factory.mktemp("trials") / "bench", fork=True, small=True, in_place=request.param
    )
    try:
        yield trials.run_trials(bench, list(range(FIRST_SEED, FIRST_SEED + COUNT)), MAX_PARALLEL)
    finally:
        bench.close()


@pytest.mark.parametrize("index", range(COUNT))
def test_disturbed_job_ends_like_an_undisturbed_one(index: int, outcomes: list[Any]) -> None:
    outcome = outcomes[index]
    assert not outcome.problems, (outcome.plan, outcome.folder, outcome.log_lines, outcome.problems)


def test_schedules_contain_enough_kills_and_joins(outcomes: list[Any], request: pytest.FixtureRequest) -> None:
    counts = sum((outcome.event_counts for outcome in outcomes), Counter[str]())
    assert counts["kill in link"] + counts["kill in save"] + counts["kill at result"] >= COUNT // 4, counts
    assert counts["join"] >= COUNT // 4 and counts.total() >= 2 * COUNT, counts
    attempts_in_place = sum(outcome.attempts_in_place for outcome in outcomes)
    is_in_place = "in place" in request.node.callspec.id
    assert attempts_in_place >= COUNT if is_in_place else not attempts_in_place


def test_checkpoint_differences_sees_a_single_changed_bit(trials: Any, tmp_path: Path) -> None:
    def save(name: str, weight: float = 0.0, mean: float = 0.0, momentum: float = 0.0) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        state = {
            "epoch": 1,
            "step": 0,
            "model": {"weight": torch.tensor([1.0, weight]), "norm.running_mean": torch.tensor([mean])},
            "optimizer": {"state": {0: {"momentum_buffer": torch.tensor([1.0, momentum])}}},
        }
        checkpoint_io.write_checkpoint(folder, 8, state)
        return folder / "step-00000008.pt"

    reference = save("reference")
    assert trials.checkpoint_differences(save("same"), reference) == []
    assert trials.checkpoint_differences(save("weight", weight=2.0**-60), reference) == ["weight differs"]
    assert trials.checkpoint_differences(save("mean", mean=2.0**-60), reference) == ["norm.running_mean differs"]
    assert trials.checkpoint_differences(save("momentum", momentum=2.0**-60), reference) == ["momentum 0 differs"]
