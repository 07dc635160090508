"""Which course the learning rate takes in each phase of the recipes that follow a paper.

tests/train/rules/test_rates.py compares each shape with its formula in every step, and
tests/docs/test_paper_schedules.py the first and last rate of each phase with those of the papers.
"""

from pathlib import Path

import pytest

from train.recipe.files import read_recipes

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LINES = ["linear"] * 4
LARS = ["linear", "polynomial"]
SHAPES = {  # of the phases of all other recipes: straight lines
    "resnet50_1hour": ["gradual_warmup", *LINES],
    "resnet50_1hour_constant": ["constant_warmup", *LINES],
    "resnet50_1hour_plain": ["gradual_warmup", *LINES],
    "resnet101_1hour": ["gradual_warmup", *LINES],
    "resnet50_2026": ["gradual_warmup", *LINES],
    "resnet50_lars_32k": LARS,
    "resnet50_lars_64k": LARS,
    "alexnet_lars_32k": LARS,
    "alexnet_lars_64k": LARS,
    "finetune": ["one_cycle", "one_cycle"],
}


@pytest.mark.parametrize("path", RECIPES.glob("[!_]*.py"), ids=lambda path: path.stem)
def test_rates_of_each_phase_have_the_shape_of_the_paper(path: Path) -> None:
    for recipe in read_recipes(str(path)):
        for machines in recipe.tables or (recipe.machines,):
            shapes = [phase.shape for phase in recipe.for_machines(machines).phases]
            assert shapes == SHAPES.get(recipe.name, ["linear"] * len(shapes)), recipe.name
