"""The recipes of the project: their settings beside the learning rates, and their docstrings; no torch."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from cluster.cli.app import cli
from recipes.cifar10 import recipe as cifar10
from recipes.resnet50_18min import recipe as resnet50
from train.recipe import IMAGENET, Optim, Recipe
from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))

# min_scale, copy and rectangles by size, of the tables of diux-dev/imagenet18, train.py.
INPUTS = {128: (0.08, 160, False), 224: (0.087, 352, False), 288: (0.5, None, True)}
INPUTS_BY_MACHINES = {machines: INPUTS for machines in (1, 2, 4, 8)} | {16: {**INPUTS, 224: (0.08, None, False)}}


def recipes_by_name(file: str) -> dict[str, Recipe]:
    """Return the recipes of a file by name."""
    return {recipe.name: recipe for recipe in read_recipes(str(ROOT / "recipes" / f"{file}.py"))}


ALL_RECIPES = [recipe for name in FILES for recipe in recipes_by_name(name).values()]


def test_recipe_names_are_unique() -> None:
    names = [recipe.name for recipe in ALL_RECIPES]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_schedules_every_table_on_its_machines(recipe: Recipe) -> None:
    for machines in recipe.tables or (recipe.machines,):
        chosen = recipe.for_machines(machines)
        schedule = Schedule(chosen, chosen.data.train, chosen.nominal_gpus)
        assert schedule.scaling_note == "" and schedule.small_set_note == "" and chosen.machines == machines
        assert [epoch.number for epoch in schedule.epochs] == list(range(chosen.epochs))


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
    with pytest.raises(click.UsageError):
        cli.commands["plan"].make_context("plan", ["--lokal", "x"])


@pytest.mark.parametrize("machines", INPUTS_BY_MACHINES)
def test_18_minute_tables_have_the_inputs_of_2018(machines: int) -> None:
    recipe = resnet50.for_machines(machines)
    inputs = [(phase.min_scale, phase.copy, phase.rect_val) for phase in recipe.phases]
    assert inputs == [INPUTS_BY_MACHINES[machines][phase.final_size] for phase in recipe.phases]


def test_18_minute_recipe_has_the_settings_of_2018() -> None:
    assert resnet50.data == IMAGENET and resnet50.machines == 16
    assert (resnet50.model.name, resnet50.model.zero_gamma, resnet50.model.fc_std) == ("resnet50", True, 0.01)
    assert resnet50.optim == Optim(momentum=0.9, weight_decay=1e-4, norm_decay=False, bias_decay=True)
    assert resnet50.copy_sizes == (160,) and resnet50.for_machines(8).copy_sizes == (160, 352)


def test_1hour_recipes_have_the_papers_hyperparameters() -> None:
    recipes = recipes_by_name("resnet50_1hour")
    for name, recipe in recipes.items():
        assert recipe.model.name == ("resnet101" if "101" in name else "resnet50")
        assert (recipe.model.zero_gamma, recipe.model.fc_std) == (True, 0.01)
        assert (recipe.optim.momentum, recipe.optim.weight_decay, recipe.optim.norm_decay) == (0.9, 1e-4, False)
        assert recipe.optim.nesterov == ("plain" not in name)
        assert {phase.batch for phase in recipe.phases} == {32}


def test_mxnet_recipes_end_their_augmentation_at_epoch_100() -> None:
    for recipe in recipes_by_name("resnet152_mxnet").values():
        assert all(phase.augment == (phase.epochs[0] < 100) for phase in recipe.phases)
        assert {phase.batch for phase in recipe.phases} == {32}


def test_lars_recipes_have_the_papers_optimizer_and_network() -> None:
    for name, recipe in recipes_by_name("resnet50_lars").items():
        assert (recipe.optim.name, recipe.optim.norm_decay, recipe.optim.bias_decay) == ("lars", False, False)
        assert recipe.optim.lars_form == ("google" if name == "resnet50_lars_32k" else "paper")  # whose rates it has
        assert recipe.model.name == ("alexnet_bn" if "alexnet" in name else "resnet50")


def test_2026_recipes_scale_to_8192_images_and_then_use_lars() -> None:
    sgd, lars = recipes_by_name("resnet50_2026").values()
    global_batches = {
        machines: {phase.batch * 8 * machines for phase in sgd.for_machines(machines).phases} for machines in sgd.tables
    }
    assert global_batches == {1: {2048, 1024}, 2: {4096, 2048}, 4: {8192, 4096}, 8: {8192, 4096}}
    assert sgd.target == 93.0 and sgd.optim.label_smoothing == 0.1
    assert (lars.optim.name, lars.phases[0].batch * lars.nominal_gpus) == ("lars", 32_768)


def test_finetune_trains_the_classifier_first() -> None:
    (recipe,) = recipes_by_name("finetune").values()
    assert [phase.frozen for phase in recipe.phases] == [True, False] and recipe.model.weights


def test_sweeps_vary_one_setting_each() -> None:
    recipes = recipes_by_name("sweeps")
    for recipe in recipes.values():
        assert (recipe.data, recipe.model, recipe.epochs) == (cifar10.data, cifar10.model, 10)
    trust_sweep = [recipe for name, recipe in recipes.items() if name.startswith("trust")]
    assert len({recipe.optim.trust for recipe in trust_sweep}) == 4
    assert len({recipe.phases for recipe in trust_sweep}) == 1
