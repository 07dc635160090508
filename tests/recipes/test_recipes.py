"""The recipes of the project: their schedules and inputs, and their docstrings; no torch.

tests/train/rules/test_rates.py compares each shape of a rate with its formula in every step, and
tests/docs/test_generated_pages.py the first and last rate of each phase with those of the papers.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest

from cluster.cli.app import cli
from recipes.resnet50_18min import recipe as resnet50
from train.recipe import Recipe
from train.recipe.recipe_files import read_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))

# min_scale, copy and rectangles by size, of the tables of diux-dev/imagenet18, train.py.
INPUTS = {128: (0.08, 160, False), 224: (0.087, 352, False), 288: (0.5, None, True)}
INPUTS_BY_MACHINES = {machines: INPUTS for machines in (1, 2, 4, 8)} | {16: {**INPUTS, 224: (0.08, None, False)}}

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


def recipes_by_name(file: str) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in read_recipes(str(ROOT / "recipes" / f"{file}.py"))}


ALL_RECIPES = [recipe for name in FILES for recipe in recipes_by_name(name).values()]


def test_recipe_names_are_unique() -> None:
    names = [recipe.name for recipe in ALL_RECIPES]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_schedules_every_table_on_its_machines_with_the_rates_of_its_paper(recipe: Recipe) -> None:
    for machines in recipe.tables or (recipe.machines,):
        chosen = recipe.for_machines(machines)
        schedule = Schedule(chosen, chosen.data.train, chosen.nominal_gpus)
        assert schedule.scaling_note == "" and schedule.small_set_note == "" and chosen.machines == machines
        assert [epoch.number for epoch in schedule.epochs] == list(range(chosen.epochs))
        shapes = [phase.shape for phase in chosen.phases]
        assert shapes == SHAPES.get(recipe.name, ["linear"] * len(shapes))


def docstring_of(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "recipes" / f"{name}.py").read_text())) or ""


@pytest.mark.parametrize("name", FILES)
def test_docstring_commands_parse_and_name_existing_recipes(name: str) -> None:
    lines = re.findall(r"^ *(imgnet-cluster [^#\n]+?)(?: *#.*)?$", docstring_of(name), re.MULTILINE)
    assert lines
    for line in lines:
        _, verb, *arguments = shlex.split(line)
        context = cli.commands[verb].make_context(verb, list(arguments))
        if "recipe" in context.params or "recipes" in context.params:
            assert f"recipes/{name}.py" in arguments
        assert set(context.params.get("only", ())) <= recipes_by_name(name).keys()


@pytest.mark.parametrize("machines", INPUTS_BY_MACHINES)
def test_18_minute_tables_have_the_inputs_of_2018(machines: int) -> None:
    recipe = resnet50.for_machines(machines)
    inputs = [(phase.min_scale, phase.copy, phase.rect_val) for phase in recipe.phases]
    assert inputs == [INPUTS_BY_MACHINES[machines][phase.final_size] for phase in recipe.phases]
