"""Whole runs with rectangular training: on one and two processes, killed and resumed, every image once an epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.data.order import usage_log
from train.recipe import Phase
from train.tools import checkpoint_io

STEPS, EPOCHS = 12, 3  # 50 images by 16
ROWS = [
    Phase(epochs=(0, 2), size=32, batch=8, lr=0.01, min_scale=0.35, rect_train=True),
    Phase(epochs=(2, 3), size=64, batch=8, lr=(0.01, 0.0), min_scale=0.5, rect_train=True, rect_val=True),
]
WORDS = ("--gpus", "2", "--save-seconds", "0", "--log-ids")


@pytest.fixture(scope="module")
def recipe(runs: Any, tiny: Any) -> Path:
    path: Path = runs.recipe(tiny(name="rectangles", phases=ROWS))
    return path


@pytest.fixture(scope="module")
def undisturbed(runs: Any, recipe: Path) -> dict[int, Path]:
    """The run's folder by the number of processes."""
    found = {world: runs.folder / f"rect-{world}" for world in (1, 2)}
    for world, out in found.items():
        runs.run(out, *WORDS, world=world, recipe=recipe)
    return found


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def final(out: Path) -> dict[str, Any]:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None
    return checkpoint_io.load_checkpoint(path)


@pytest.mark.parametrize("world", [1, 2])
def test_every_image_is_used_once_an_epoch_in_steps_of_several_shapes(world: int, undisturbed: dict[int, Path]) -> None:
    out = undisturbed[world]
    assert usage_log.find_usage_errors(out / "ids", {1: 0}, 50, dict.fromkeys(range(EPOCHS), 4)) == []
    found = result(out)
    assert (found["steps"], found["images"], found["state"]) == (STEPS, 150, "done")
    assert [row["rect_train"] for row in found["schedule"]] == [True, True]
    shapes = [key.split()[3:] for key in final(out)["times"]["by_shape"] if key.startswith("train")]
    assert any(one[0] != one[1] for one in shapes)


def test_two_processes_take_the_same_steps_as_one(undisturbed: dict[int, Path]) -> None:
    one, two = (result(undisturbed[world]) for world in (1, 2))
    for mine, theirs in zip(one["epochs"], two["epochs"], strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)

    def by_step(out: Path) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for path in (out / "ids").glob("*.jsonl"):
            for row in map(json.loads, path.read_text().splitlines()):
                found.setdefault(row["step"], set()).update(row["ids"])
        return found

    assert by_step(undisturbed[1]) == by_step(undisturbed[2])


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(
    world: int, runs: Any, recipe: Path, undisturbed: dict[int, Path]
) -> None:
    out = runs.folder / f"rect-killed-{world}"

    def has_step(least: int) -> Any:
        folder = out / "checkpoints" / "000001"
        return lambda: any(int(path.stem.removeprefix("step-")) >= least for path in folder.glob("step-*.pt"))

    runs.kill_when(out, has_step(2), *WORDS[:-1], world=world, recipe=recipe)
    runs.kill_when(out, has_step(7), *WORDS[:-1], world=world, recipe=recipe)
    assert runs.run(out, *WORDS[:-1], world=world, recipe=recipe).count("resumed from") == 2
    mine, theirs = final(out), final(undisturbed[world])
    assert mine["model"].keys() == theirs["model"].keys()
    assert all(torch.equal(one, theirs["model"][name]) for name, one in mine["model"].items())
    assert [row["train_loss"] for row in mine["history"]] == [row["train_loss"] for row in theirs["history"]]
