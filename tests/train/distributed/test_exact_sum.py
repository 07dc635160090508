"""The same bits on any number of processes with `--exact`, and after a kill on another number than before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train.data.order import usage_log
from train.recipe import Phase
from train.tools import checkpoint_io

STEPS = 3  # of each of two epochs: 50 images by 3 x 8
OPTIONS = ("--exact", "--log-ids", "--workers", "0")


@pytest.fixture(scope="session")
def recipe(runs: Any, tiny: Any) -> Path:
    """Two epochs for three GPUs; the last step has two images, one chunk for all processes."""
    rows = [Phase(epochs=(0, 2), size=32, batch=8, lr=(0.01, 0.02), min_scale=0.35)]
    path: Path = runs.recipe(tiny(name="exact", gpus=3, phases=rows))
    return path


@pytest.fixture(scope="session")
def alone(runs: Any, recipe: Path) -> Path:
    out: Path = runs.folder / "exact-1"
    runs.run(out, "--gpus", "3", *OPTIONS, recipe=recipe)
    return out


def parameters(out: Path, attempt: int = 1) -> dict[str, torch.Tensor]:
    """Weights and momenta at the end."""
    path = checkpoint_io.newest_checkpoint(out / f"checkpoints/{attempt:06d}")
    assert path is not None and path.stem == f"step-{2 * STEPS:08d}"
    state = checkpoint_io.load_checkpoint(path)
    own = ("running_mean", "running_var", "num_batches_tracked")
    weights = {name: one for name, one in state["model"].items() if not name.endswith(own)}
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    assert all(one.dtype == torch.float64 for one in weights.values()) and len(weights) >= len(momenta) > 20
    return weights | momenta


def differing(out: Path, other: Path, attempt: int = 1) -> list[str]:
    mine, theirs = parameters(out, attempt), parameters(other)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def has_step(out: Path, least: int) -> Callable[[], bool]:
    folder = out / "checkpoints/000001"
    return lambda: any(int(path.stem.removeprefix("step-")) >= least for path in folder.glob("step-*.pt"))


@pytest.mark.parametrize("world", [2, 3])
def test_on_any_number_of_processes_the_parameters_are_equal_bit_for_bit(
    world: int, runs: Any, recipe: Path, alone: Path
) -> None:
    out = runs.folder / f"exact-{world}"
    runs.run(out, "--gpus", "3", *OPTIONS, world=world, recipe=recipe)
    assert differing(out, alone) == []
    assert usage_log.find_usage_errors(out / "ids", {1: 0}, 50, {0: STEPS, 1: STEPS}) == []


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_killed_and_resumed_on_another_number_they_are_too(
    before: int, after: int, runs: Any, recipe: Path, alone: Path
) -> None:
    out = runs.folder / f"exact-{before}-{after}"
    argv = ("--gpus", "3", *OPTIONS, "--save-seconds", "0")
    runs.kill_when(out, has_step(out, 2), *argv, world=before, recipe=recipe)
    said = runs.run(out, *argv, "--attempt", "2", world=after, recipe=recipe)
    assert differing(out, alone, attempt=2) == []
    resumed = int(said.rpartition("at step ")[2].split()[0])
    assert resumed >= 2 and usage_log.find_usage_errors(out / "ids", {1: 0, 2: resumed}, 50, {0: STEPS, 1: STEPS}) == []


def test_without_it_they_differ(runs: Any, recipe: Path, alone: Path) -> None:
    """Else the tests above would say nothing."""
    states = []
    for world in (1, 3):
        out = runs.folder / f"inexact-{world}"
        runs.run(out, "--gpus", "3", "--workers", "0", world=world, recipe=recipe)
        path = checkpoint_io.newest_checkpoint(out / "checkpoints/000001")
        assert path is not None
        states.append(checkpoint_io.load_checkpoint(path)["model"])
    weights = [name for name, one in states[0].items() if one.is_floating_point() and "running_" not in name]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in weights)
