"""Whole runs of `python -m train`: killed and resumed, on one, two and three processes, honest ends, the result."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from train import checkpoint
from train.recipe import Phase, Recipe
from train.schedule import Schedule

STEPS = 4 + 4 + 2 + 4  # 50 images: by 16, 16, 32, 16
SEEN = 4 * 50


def folder(out: Path, attempt: int = 1) -> Path:
    return out / "checkpoints" / f"{attempt:06d}"


def final(out: Path, attempt: int = 1) -> dict[str, Any]:
    path = checkpoint.newest(folder(out, attempt))
    assert path is not None
    return checkpoint.load(path)


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What training computes: weights, momenta, and every process's running statistics."""
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    return {**state["model"], **momenta, "statistics": state["statistics"]}


def assert_bit_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["epoch"], one["step"]) == (other["epoch"], other["step"])
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys() and len(mine) > 50
    differ = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not differ
    for name in ("train_loss", "top1", "top5", "top1_square", "val_loss", "lr"):
        assert [row[name] for row in one["history"]] == [row[name] for row in other["history"]], name


@pytest.fixture(scope="session")
def alone(runs: Any) -> Path:
    """One process that accumulates the gradients of two GPUs, undisturbed."""
    out: Path = runs.folder / "alone"
    runs.run(out, "--procs", "1", "--gpus", "2")
    return out


@pytest.fixture(scope="session")
def pair(runs: Any) -> Path:
    """Two processes, undisturbed."""
    out: Path = runs.folder / "pair"
    runs.run(out, "--procs", "2")
    return out


def has_step(out: Path, step: int) -> Callable[[], bool]:
    return (folder(out) / f"step-{step:08d}.pt").exists


def is_saving(out: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written beyond those that were there."""
    before = set(folder(out).glob("*"))

    def check() -> bool:
        return any(name.startswith(".step-") for name in os.listdir(folder(out)) if folder(out) / name not in before)

    return check


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(world: int, runs: Any, alone: Path, pair: Path) -> None:
    out = runs.folder / f"killed-{world}"
    argv = ("--procs", str(world), "--gpus", "2", "--save-seconds", "0")
    runs.kill_when(out, has_step(out, 1), *argv)  # in the middle of an epoch
    runs.kill_when(out, is_saving(out), *argv)  # in the middle of a write
    runs.kill_when(out, has_step(out, 9), *argv)  # in the phase of another batch
    said = runs.run(out, *argv)
    assert said.count("resumed from") == 3 * 1
    assert_bit_equal(final(out), final(alone if world == 1 else pair))
    assert result(out)["steps"] == STEPS and result(out)["images"] == SEEN


def test_a_run_killed_before_its_result_was_written_only_writes_it(runs: Any, alone: Path) -> None:
    out = runs.folder / "no-result"
    shutil.copytree(alone, out)
    (out / "result.json").unlink()
    before = sorted(folder(out).iterdir())
    said = runs.run(out, "--gpus", "2")
    assert f"at step {STEPS}" in said
    assert sorted(folder(out).iterdir()) == before
    mine, theirs = result(out), result(alone)
    assert mine["epochs"] == theirs["epochs"] and mine["steps"] == STEPS
    assert mine["goodput"] == pytest.approx(theirs["goodput"], abs=0.05)
