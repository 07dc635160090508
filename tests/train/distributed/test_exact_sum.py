"""Runs with --exact: the same bits on any number of processes, also when a resume changes the number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_outputs import final_state, has_step

from train.data.order import usage_log
from train.recipe import Phase

STEPS = 3  # of each of two epochs: 50 images in global batches of 3 x 8
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


def final_tensors(out: Path, attempt: int = 1) -> dict[str, torch.Tensor]:
    """Return the final weights, running statistics and momenta, and the losses of the validations."""
    state = final_state(out, attempt)
    weights = state["model"]
    val_losses = {f"epoch {row['epoch']}": torch.tensor(row["val_loss"]) for row in state["history"]}
    assert state["epoch"] == len(val_losses) == 2 and all(map(torch.isfinite, val_losses.values()))
    momenta = {f"momentum {key}": tensor["momentum_buffer"] for key, tensor in state["optimizer"]["state"].items()}
    assert all(tensor.dtype == torch.float64 for tensor in weights.values() if tensor.is_floating_point())
    assert len(weights) >= len(momenta) > 20
    return weights | momenta | val_losses


def differing_names(out: Path, other: Path, attempt: int = 1) -> list[str]:
    tensors, expected = final_tensors(out, attempt), final_tensors(other)
    assert tensors.keys() == expected.keys()
    return [name for name in tensors if not torch.equal(tensors[name], expected[name])]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_exact_run_resumed_on_another_number_has_the_same_bits(
    before: int, after: int, runs: Any, recipe: Path, alone: Path
) -> None:
    out = runs.folder / f"exact-{before}-{after}"
    argv = ("--gpus", "3", *OPTIONS, "--save-seconds", "0")
    runs.kill_when(out, has_step(out, 2), *argv, world=before, recipe=recipe)
    output = runs.run(out, *argv, "--attempt", "2", world=after, recipe=recipe)
    assert differing_names(out, alone, attempt=2) == []
    resumed = int(output.rpartition("at step ")[2].split()[0])
    assert resumed >= 2 and usage_log.find_usage_errors(out / "ids", {1: 0, 2: resumed}, 50, {0: STEPS, 1: STEPS}) == []
