"""Random schedules of faults (benchmarks/elastic/trials.py): each job ends like one that nobody disturbed."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    "in_place", [pytest.param(True, marks=pytest.mark.release), False], ids=["in place", "restart"]
)
def test_disturbed_jobs_end_like_undisturbed_ones(trials: Any, in_place: bool, tmp_path: Path) -> None:
    """All trials in one test, several at a time: pytest would run tests that share them in several processes."""
    bench = trials.TrialBench(tmp_path / "bench", fork=True, small=True, in_place=in_place)
    try:
        seeds = range(FIRST_SEED, FIRST_SEED + COUNT)
        outcomes = trials.run_trials(
            lambda seed: trials.Trial(bench, trials.TrialPlan.from_seed(seed, True)), seeds, MAX_PARALLEL
        )
    finally:
        bench.close()
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, [(each.plan, each.folder, each.log_lines, each.problems) for each in failed]
    counts = sum((outcome.event_counts for outcome in outcomes), Counter[str]())
    assert counts["kill in link"] + counts["kill in save"] + counts["kill at result"] >= COUNT // 4, counts
    assert counts["join"] >= COUNT // 4 and counts.total() >= 2 * COUNT, counts
    attempts_in_place = sum(outcome.attempts_in_place for outcome in outcomes)
    assert attempts_in_place >= COUNT if in_place else not attempts_in_place
