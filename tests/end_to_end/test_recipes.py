"""Each recipe cut short: all its phases, its optimizer and its rates, on JPEG files, by the installed command.

Two processes stand for the recipe's GPUs. Image sizes are a quarter, batches are a few images, rates follow the linear
rule for these batches, and the network is a small one. The recipes' own networks: tests/train/models/test_registry.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.sandbox import Sandbox

from train.models import registry
from train.recipe import Model, Phase, Recipe
from train.recipe.recipe_files import read_recipes

ROOT = Path(__file__).resolve().parents[2]
MAX_BATCH = 8  # images of a process's largest batch
# The name of the recipe that is run from each file. Others in a file share its phases and optimizer, or one of them.
RECIPE_NAMES = {
    "resnet50_18min": "resnet50_18min",
    "resnet50_3hours": "resnet50_3hours",
    "resnet50_1hour": "resnet50_1hour",
    "resnet152_mxnet": "resnet152_mxnet_2560",
    "resnet50_lars": "resnet50_lars_32k",
    "resnet50_2026": "resnet50_2026",
    "finetune": "finetune",
    "sweeps": "trust_0.001",
}
RUN_ELSEWHERE = {"quickstart", "cifar10"}  # by `make demo`, and by the README's commands
STEPS = 9  # of each job: as many as the longest recipe has phases
QUEUE_FILE = """\
import json

from train.recipe import Recipe


def recipes():
    return map(Recipe.from_json, json.loads({!r}))
"""


def test_every_recipe_file_is_run_here_or_elsewhere() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("[!_]*.py")} == RECIPE_NAMES.keys() | RUN_ELSEWHERE


def read_recipe(file: str) -> Recipe:
    recipes = read_recipes(str(ROOT / "recipes" / f"{file}.py"))
    return next(recipe for recipe in recipes if recipe.name == RECIPE_NAMES[file])


def shorten(recipe: Recipe, weights: Path) -> Recipe:
    """Return the recipe for two processes, small images and a small network. All else stays as it is."""
    largest_batch = max(phase.batch for phase in recipe.phases)
    phases = [shorten_phase(phase, largest_batch, 2 / recipe.nominal_gpus) for phase in recipe.phases]
    model = replace(recipe.model, name="resnet10_tiny", weights=str(weights) if recipe.model.weights else None)
    return replace(recipe, model=model, phases=phases, tables={}, machines=1, gpus=2)


def shorten_phase(phase: Phase, largest_batch: int, gpu_ratio: float) -> Phase:
    """Return a phase with smaller images and batches, and the rates that the linear rule gives for these."""
    batch = max(2, phase.batch * MAX_BATCH // largest_batch)
    factor = gpu_ratio * batch / phase.batch
    lr: Any = tuple(rate * factor for rate in phase.lr_endpoints) if isinstance(phase.lr, tuple) else phase.lr * factor
    return replace(phase, size=max(32, phase.final_size // 4), batch=batch, lr=lr)


def test_recipes_run_all_phases(sandbox: Sandbox) -> None:
    """Each recipe is a job of one queue, which runs one job after the other."""
    weights = sandbox.path / "before.pt"
    torch.save(registry.build_model(Model(name="resnet10_tiny"), 7, 0).state_dict(), weights)
    recipes = [shorten(read_recipe(file), weights) for file in RECIPE_NAMES]
    queue_file = sandbox.path / "cut.py"
    queue_file.write_text(QUEUE_FILE.format(json.dumps([recipe.to_json() for recipe in recipes])))
    options = ("--procs", "2", "--workers", "0", "--data", sandbox.data, "--max-steps", STEPS)
    launched = sandbox.cli("launch", "--local", "-y", *options, queue_file, timeout=900)
    assert launched.code == 0, launched
    for number, recipe in enumerate(recipes, 1):
        result = json.loads((sandbox.path / f"runs/job-{number}/result.json").read_text())
        assert (result["recipe"], result["state"]) == (recipe.name, "done")
        assert (result["steps"], result["procs"]) == (STEPS, 2), recipe.name
        rows = result["schedule"]
        assert [(row["size"], row["batch"], row["shape"], row["augment"]) for row in rows] == [
            (phase.size, phase.batch, phase.shape, phase.augment) for phase in recipe.phases
        ], recipe.name
        assert all(row["steps"] >= 1 for row in rows), recipe.name
        assert result["epochs"][-1]["val_images"] == 20 and 0 <= result["top1"] <= result["top5"] <= 100, recipe.name
        assert sum(epoch["steps"] for epoch in result["epochs"]) == STEPS, recipe.name
