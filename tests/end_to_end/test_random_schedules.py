"""Twenty random schedules of losses (benchmarks/elastic/trials.py): each job comes out as if nothing had happened."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COUNT, SEED, PARALLEL = 20, 2000, 4
PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "elastic" / "trials.py"


@pytest.fixture(scope="module")
def trials() -> Iterator[Any]:
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("trials", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def outcomes(trials: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What became of them; a failed one's folder is named, and stays as long as pytest keeps it."""
    bench = trials.Bench(tmp_path_factory.mktemp("trials") / "bench", fork=True, small=True)
    try:
        yield trials.run(bench, list(range(SEED, SEED + COUNT)), PARALLEL)
    finally:
        bench.close()


@pytest.mark.parametrize("number", range(COUNT))
def test_a_disturbed_job_ends_as_an_undisturbed_one(number: int, outcomes: list[Any]) -> None:
    one = outcomes[number]
    assert not one.wrong, (one.plan, one.folder, one.story, one.wrong)


def test_the_schedules_did_what_they_are_for(outcomes: list[Any]) -> None:
    done = sum((one.done for one in outcomes), Counter[str]())
    assert done["kill in link"] + done["kill in save"] + done["kill at result"] >= COUNT // 4, done
    assert done["join"] >= COUNT // 4 and done.total() >= 2 * COUNT, done


def test_a_trial_that_lost_a_bit_would_be_seen(trials: Any, tmp_path: Path) -> None:
    import torch

    from train.tools import checkpoint_io

    def saved(name: str, weight: float = 0.0, momentum: float = 0.0) -> Path:
        state = {
            "epoch": 1, "step": 0,
            "model": {"weight": torch.tensor([1.0, weight]), "norm.running_mean": torch.rand(1)},
            "optimizer": {"state": {0: {"momentum_buffer": torch.tensor([1.0, momentum])}}},
        }  # fmt: skip
        checkpoint_io.write_checkpoint(tmp_path / name, 8, state)
        return tmp_path / name / "step-00000008.pt"

    for name in ("one", "same", "weight", "momentum"):
        (tmp_path / name).mkdir()
    one = saved("one")
    assert trials.different(saved("same"), one) == []
    assert trials.different(saved("weight", weight=2.0**-60), one) == ["weight differs"]
    assert trials.different(saved("momentum", momentum=2.0**-60), one) == ["momentum 0 differs"]
