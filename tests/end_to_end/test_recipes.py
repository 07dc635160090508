"""Each recipe cut short: all its phases, its optimizer and its rates on JPEG files, by the installed command.

Two processes stand for its GPUs; sizes are a quarter, batches a few images, rates as the linear rule has them for
these, and the net is a small one. The recipes' own nets: tests/train/models/test_registry.py.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place

from train.models import registry
from train.recipe import Model, Phase, Recipe
from train.recipe.files import read_recipes

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 8  # images of a process's batch
CASES = {  # a file, and which of its recipes; the others there have the same phases and optimizer, or one of them
    "resnet50_18min": "resnet50_18min", "resnet50_3hours": "resnet50_3hours", "resnet50_1hour": "resnet50_1hour",
    "resnet152_mxnet": "resnet152_mxnet_2560", "resnet50_lars": "resnet50_lars_32k", "resnet50_2026": "resnet50_2026",
    "finetune": "finetune", "sweeps": "trust_0.001",
}  # fmt: skip
ELSEWHERE = {"quickstart", "cifar10"}  # make demo, README
STEPS = 9  # of each: as many as the longest has phases
QUEUE = """\
import json

from train.recipe import Recipe


def recipes():
    return map(Recipe.from_json, json.loads({!r}))
"""


def test_every_recipe_file_is_run_here_or_elsewhere() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("[!_]*.py")} == CASES.keys() | ELSEWHERE


def cut_short(recipe: Recipe, weights: Path) -> Recipe:
    """The recipe for two processes and little images. What is not mentioned here stays as it is."""
    most = max(phase.batch for phase in recipe.phases)
    phases = [smaller(phase, most, 2 / recipe.nominal_gpus) for phase in recipe.phases]
    model = replace(recipe.model, name="resnet10_tiny", weights=str(weights) if recipe.model.weights else None)
    return replace(recipe, model=model, phases=phases, tables={}, machines=1, gpus=2)


def smaller(phase: Phase, most: int, gpus: float) -> Phase:
    batch = max(2, phase.batch * LARGEST // most)
    factor = gpus * batch / phase.batch
    rate: Any = tuple(one * factor for one in phase.lr_endpoints) if isinstance(phase.lr, tuple) else phase.lr * factor
    return replace(phase, size=max(32, phase.size // 4), batch=batch, lr=rate)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Any]:
    """A place where a queue of all of them has come to its end."""
    one = Place(tmp_path_factory.mktemp("recipes") / "place", images)
    try:
        weights, file = one.path / "before.pt", one.path / "cut.py"
        torch.save(registry.build_model(Model(name="resnet10_tiny"), 7, 0).state_dict(), weights)
        made = {name: cut_short(recipe(name), weights).to_json() for name in CASES}
        file.write_text(QUEUE.format(json.dumps(list(made.values()))))
        words = ["--procs", "2", "--workers", "0", "--data", str(images), "--max-steps", str(STEPS)]
        ran = one.cli("launch", "--local", "-y", *words, str(file), timeout=900)
        assert ran.code == 0, ran
        one.made = made  # type: ignore[attr-defined]
        yield one
    finally:
        left = one.close()
    assert not left, f"still running after the tmux server had ended: {left}"


def recipe(file: str) -> Recipe:
    """The one of a file's recipes that is run."""
    return next(one for one in read_recipes(str(ROOT / "recipes" / f"{file}.py")) if one.name == CASES[file])


@pytest.mark.parametrize(("number", "file"), list(enumerate(CASES, 1)), ids=list(CASES))
def test_a_recipe_runs_through_all_its_phases_on_two_processes_and_its_record_adds_up(
    number: int, file: str, jobs: Any
) -> None:
    result = json.loads((jobs.path / f"runs/job-{number}/result.json").read_text())
    phases = jobs.made[file]["phases"]
    assert (result["recipe"], result["state"]) == (CASES[file], "done")
    assert (result["steps"], result["procs"]) == (STEPS, 2)
    rows = result["schedule"]
    assert [(row["size"], row["batch"], row["shape"], row["augment"]) for row in rows] == [
        (phase["size"], phase["batch"], phase["shape"], phase["augment"]) for phase in phases
    ]
    assert all(row["steps"] >= 1 for row in rows)
    assert result["epochs"][-1]["val_images"] == 20 and 0 <= result["top1"] <= result["top5"] <= 100
    checked = jobs.cli("record", "--check", f"job-{number}")
    assert checked.code == 0, checked


def test_the_frozen_phase_of_finetuning_begins_with_the_weights_of_the_file(jobs: Any) -> None:
    said = jobs.cli("logs", f"job-{list(CASES).index('finetune') + 1}").out
    assert "its classifier is for 7 classes, ours for 10: it stays at its own start" in said
