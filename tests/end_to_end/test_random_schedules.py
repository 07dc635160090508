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
    "in_place", [True, pytest.param(False, marks=pytest.mark.release)], ids=["in place", "restart"]
)
def test_disturbed_jobs_end_like_undisturbed_ones(trials: Any, in_place: bool, tmp_path: Path) -> None:
    """All trials in one test, several at a time: pytest would run tests that share them in several processes."""
    bench = trials.TrialBench(tmp_path / "bench", small=True, in_place=in_place)
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
    assert all(outcome.findings.steps > 50 for outcome in outcomes), "each step was compared"
    assert counts["join"] >= COUNT // 4 and counts.total() >= 2 * COUNT, counts
    attempts_in_place = sum(outcome.attempts_in_place for outcome in outcomes)
    assert attempts_in_place >= COUNT if in_place else not attempts_in_place


def test_step_log_shows_a_wrong_step_a_repeated_one_and_another_process(trials: Any, tmp_path: Path) -> None:
    """Rows of a process: steps 1 and 2 in attempt 1, on rank 0, then those of each case on rank 0 of attempt 2."""
    from benchmarks.elastic import step_log
    from cluster.state.attempts import Attempt

    history = [Attempt(number=1, members=("0.a", "1.b")), Attempt(number=2, members=("0.a",), live_step=2)]

    def check(*later_rows: tuple[int, int, str], hit: str = "") -> tuple[int, int, int, str]:
        """Check later rows: process, step, digest."""
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        for name, rows in (
            ("alone", [(7, step, 1, f"d{step}") for step in (1, 2, 3)]),
            (
                "trial",
                [
                    *[(7, step, 1, f"d{step}") for step in (1, 2)],
                    *[(pid, step, 2, digest) for pid, step, digest in later_rows],
                ],
            ),
        ):
            (folder / name).mkdir(parents=True)
            for pid, step, attempt, digest in rows:
                with (folder / name / f"{pid}.jsonl").open("a") as file:
                    file.write(f'[{step}, {attempt}, 0, "{digest}", 20, 5, 300.0]\n')
        found = step_log.check_steps(folder / "trial", folder / "alone", history, 1, [hit])
        return found.lost, found.kept, found.replaced, "; ".join(found.problems)

    assert check((7, 3, "d3")) == (0, 1, 0, "")
    assert check((7, 3, "wrong"))[3].endswith("differs")
    assert check((7, 2, "d2"), (7, 3, "d3")) == (1, 1, 0, "process 7 has done a step again")
    assert check((8, 3, "d3")) == (0, 0, 1, "process 0 of 0.a was replaced in attempt 2")
    assert check((8, 3, "d3"), hit="0") == (0, 0, 1, "")
    assert check() == (0, 0, 0, "no process has made the steps [3]")


def test_step_log_shows_a_process_that_grows_with_each_regroup(tmp_path: Path) -> None:
    from benchmarks.elastic import step_log
    from cluster.state.attempts import Attempt

    steps = range(1, 41)
    history = [Attempt(number=step, members=("0.a",), live_step=step - 1 or None) for step in steps]
    for growth, problem in ((0, ""), (1, "a process has grown from [40, 5, 300.0] to [60, 5, 300.0]")):
        (folder := tmp_path / str(growth)).mkdir()
        lines = [f'[{step}, {step}, 0, "d{step}", {20 + growth * step}, 5, 300.0]' for step in steps]
        (folder / "7.jsonl").write_text("\n".join(lines))
        found = step_log.check_steps(folder, folder, history, 1, [])
        assert "; ".join(found.problems).removesuffix(" (descriptors, threads, megabytes)") == problem
        assert [row[0] for row in found.usage][-1] == 39 and len(found.usage) <= 12
