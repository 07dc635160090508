"""Whole runs with rectangular training batches: on one and two processes, killed and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.data.order import usage_log
from train.recipe import Phase
from train.tools import checkpoint_io

pytestmark = pytest.mark.rehearsal  # whole processes, which take long

STEPS, EPOCHS = 12, 3  # 50 images in global batches of 16
PHASES = [
    Phase(epochs=(0, 2), size=32, batch=8, lr=0.01, min_scale=0.35, rect_train=True),
    Phase(epochs=(2, 3), size=64, batch=8, lr=(0.01, 0.0), min_scale=0.5, rect_train=True, rect_val=True),
]
OPTIONS = ("--gpus", "2", "--save-seconds", "0", "--log-ids")


@pytest.fixture(scope="module")
def recipe(runs: Any, tiny: Any) -> Path:
    path: Path = runs.recipe(tiny(name="rectangles", phases=PHASES))
    return path


@pytest.fixture(scope="module")
def uninterrupted(runs: Any, recipe: Path) -> dict[int, Path]:
    """Folders of uninterrupted runs, by number of processes."""
    folders = {world: runs.folder / f"rect-{world}" for world in (1, 2)}
    for world, out in folders.items():
        runs.run(out, *OPTIONS, world=world, recipe=recipe)
    return folders


def read_result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def final_state(out: Path) -> dict[str, Any]:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None
    return checkpoint_io.load_checkpoint(path)


@pytest.mark.parametrize("world", [1, 2])
def test_run_rect_train_uses_each_image_once_an_epoch(world: int, uninterrupted: dict[int, Path]) -> None:
    out = uninterrupted[world]
    assert usage_log.find_usage_errors(out / "ids", {1: 0}, 50, dict.fromkeys(range(EPOCHS), 4)) == []
    summary = read_result(out)
    assert (summary["steps"], summary["images"]) == (STEPS, 150)
    assert [row["rect_train"] for row in summary["schedule"]] == [True, True]
    shapes = [key.split()[3:] for key in final_state(out)["times"]["seconds_by_shape"] if key.startswith("train")]
    assert any(shape[0] != shape[1] for shape in shapes)


def test_run_rect_train_same_steps_on_one_and_two_processes(uninterrupted: dict[int, Path]) -> None:
    single, double = (read_result(uninterrupted[world]) for world in (1, 2))
    for single_row, double_row in zip(single["epochs"], double["epochs"], strict=True):
        assert single_row["train_loss"] == pytest.approx(double_row["train_loss"], rel=1e-3)

    def by_step(out: Path) -> dict[int, set[int]]:
        ids_by_step: dict[int, set[int]] = {}
        for path in (out / "ids").glob("*.jsonl"):
            for row in map(json.loads, path.read_text().splitlines()):
                ids_by_step.setdefault(row["step"], set()).update(row["ids"])
        return ids_by_step

    assert by_step(uninterrupted[1]) == by_step(uninterrupted[2])


@pytest.mark.parametrize("world", [1, 2])
def test_run_rect_train_killed_and_resumed_ends_with_same_bits(
    world: int, runs: Any, recipe: Path, uninterrupted: dict[int, Path]
) -> None:
    out = runs.folder / f"rect-killed-{world}"

    def has_step(step: int) -> Any:
        folder = out / "checkpoints" / "000001"
        return lambda: any(int(path.stem.removeprefix("step-")) >= step for path in folder.glob("step-*.pt"))

    runs.kill_when(out, has_step(2), *OPTIONS[:-1], world=world, recipe=recipe)
    runs.kill_when(out, has_step(7), *OPTIONS[:-1], world=world, recipe=recipe)
    assert runs.run(out, *OPTIONS[:-1], world=world, recipe=recipe).count("resumed from") == 2
    state, expected = final_state(out), final_state(uninterrupted[world])
    assert state["model"].keys() == expected["model"].keys()
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in state["model"].items())
    assert [row["train_loss"] for row in state["history"]] == [row["train_loss"] for row in expected["history"]]
