"""The recipes of the project: their tables to the digit, their steps, their docstrings; no torch."""

import ast
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import click
import pytest

from cluster.cli.app import cli
from recipes.cifar10 import recipe as cifar10
from recipes.quickstart import recipe as quickstart
from recipes.resnet50_18min import recipe as resnet50
from train.recipe import IMAGENET, SAMPLE, Optim, Recipe
from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))

# min_scale, copy and rectangles by size: the rest of the tables of diux-dev/imagenet18, train.py, whose epochs, sizes,
# batches, rates and steps tests/docs/test_paper_schedules.py compares.
INPUTS = {128: (0.08, 160, False), 224: (0.087, 352, False), 288: (0.5, None, True)}
INPUTS_BY_MACHINES = {machines: INPUTS for machines in (1, 2, 4, 8)} | {16: {**INPUTS, 224: (0.08, None, False)}}


def recipes_by_name(file: str) -> dict[str, Recipe]:
    """Return the recipes of a file by name."""
    return {recipe.name: recipe for recipe in read_recipes(str(ROOT / "recipes" / f"{file}.py"))}


ALL_RECIPES = [recipe for name in FILES for recipe in recipes_by_name(name).values()]


@pytest.mark.parametrize("name", FILES)
def test_single_recipe_of_a_file_has_its_name(name: str) -> None:
    recipes = recipes_by_name(name)
    assert len(recipes) > 1 or recipes.keys() == {name}


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
        assert all(0 <= rate < 50 for row in schedule.scheduled_phases for rate in row.scaled_lr_endpoints)


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_survives_json(recipe: Recipe) -> None:
    for machines in recipe.tables or (recipe.machines,):
        chosen = recipe.for_machines(machines)
        restored = Recipe.from_json(json.loads(json.dumps(chosen.to_json())))
        assert restored.to_json() == chosen.to_json()
        assert restored.phases == chosen.phases and restored.optim == chosen.optim


def docstring_of(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "recipes" / f"{name}.py").read_text())) or ""


@pytest.mark.parametrize("name", FILES)
def test_docstring_says_what_was_claimed_and_what_we_ran(name: str) -> None:
    text = docstring_of(name)
    if name not in ("cifar10", "quickstart"):
        assert "claimed" in text and "ours: no run yet" in text


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


def test_recipes_import_nothing_heavy() -> None:
    code = f"import sys; import {', '.join(f'recipes.{name}' for name in FILES)};"
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'cluster'} & sys.modules.keys()))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (completed.stdout, completed.stderr) == ("[]\n", "")


@pytest.mark.parametrize("machines", INPUTS_BY_MACHINES)
def test_18_minute_tables_have_the_inputs_of_2018(machines: int) -> None:
    recipe = resnet50.for_machines(machines)
    assert recipe.machines == machines and recipe.nominal_gpus == 8 * machines
    inputs = [(phase.min_scale, phase.copy, phase.rect_val) for phase in recipe.phases]
    assert inputs == [INPUTS_BY_MACHINES[machines][phase.final_size] for phase in recipe.phases]
    assert {phase.shape for phase in recipe.phases} == {"linear"}


@pytest.mark.parametrize("machines", INPUTS_BY_MACHINES)
def test_18_minute_schedules_run_every_epoch_once(machines: int) -> None:
    recipe = resnet50.for_machines(machines)
    schedule = Schedule(recipe, 1_281_167, 8 * machines)
    assert schedule.scaling_note == ""
    assert [epoch.number for epoch in schedule.epochs] == list(range(recipe.phases[-1].epochs[1]))
    assert schedule.images_at(len(schedule.epochs), 0) == 1_281_167 * len(schedule.epochs)


def test_18_minute_recipe_has_the_settings_of_2018() -> None:
    assert resnet50.data == IMAGENET and resnet50.machines == 16
    assert (resnet50.model.name, resnet50.model.zero_gamma, resnet50.model.fc_std) == ("resnet50", True, 0.01)
    assert resnet50.optim == Optim(momentum=0.9, weight_decay=1e-4, norm_decay=False, bias_decay=True)
    assert resnet50.copy_sizes == (160,) and resnet50.for_machines(8).copy_sizes == (160, 352)


@pytest.mark.parametrize("recipe", [quickstart, cifar10], ids=lambda recipe: recipe.name)
def test_small_recipes_warm_up_grow_the_batch_and_end_at_zero(recipe: Recipe) -> None:
    assert recipe.nominal_gpus == 1
    table = Schedule(recipe, recipe.data.train, 1).table()
    assert table[0].lr[0] < table[0].lr[1] and table[-1].lr[1] == 0
    assert table[0].batch < table[-1].batch
    assert max(rate for row in table for rate in row.lr) <= 0.4


def test_quickstart_uses_the_built_in_set_and_rectangles() -> None:
    assert quickstart.data == SAMPLE
    assert [phase.rect_val for phase in quickstart.phases] == [False, False, True]
    assert Schedule(quickstart, 4000, 1).steps < 1000


def test_cifar10_has_the_images_of_cifar10() -> None:
    assert (cifar10.data.train, cifar10.data.val) == (50_000, 10_000)
    assert {phase.size for phase in cifar10.phases} == {32}


def test_1hour_recipes_have_the_papers_hyperparameters() -> None:
    recipes = recipes_by_name("resnet50_1hour")
    assert len(recipes) == 7
    for name, recipe in recipes.items():
        assert recipe.model.name == ("resnet101" if "101" in name else "resnet50")
        assert (recipe.model.zero_gamma, recipe.model.fc_std) == (True, 0.01)
        assert (recipe.optim.momentum, recipe.optim.weight_decay, recipe.optim.norm_decay) == (0.9, 1e-4, False)
        assert recipe.optim.nesterov == ("plain" not in name)
        assert {phase.batch for phase in recipe.phases} == {32}
        assert recipe.phases[0].batch * recipe.nominal_gpus == (256 if name.endswith("_256") else 8192)


def test_mxnet_recipes_end_their_augmentation_at_epoch_100() -> None:
    recipes = recipes_by_name("resnet152_mxnet")
    for recipe in recipes.values():
        assert all(phase.augment == (phase.epochs[0] < 100) for phase in recipe.phases)
        assert recipe.epochs == 120 and {phase.batch for phase in recipe.phases} == {32}
    # The rate grows more slowly than the batch.
    first_lr_by_batch = {recipe.nominal_gpus * 32: recipe.phases[0].lr_endpoints[0] for recipe in recipes.values()}
    assert first_lr_by_batch == {256: 0.1, 2560: 0.5, 5120: 1.0}


def test_lars_recipes_warm_up_and_decay_by_a_square() -> None:
    recipes = recipes_by_name("resnet50_lars")
    assert {recipe.phases[0].batch * recipe.nominal_gpus for recipe in recipes.values()} == {32_768, 65_536}
    for name, recipe in recipes.items():
        assert (recipe.optim.name, recipe.optim.norm_decay, recipe.optim.bias_decay) == ("lars", False, False)
        assert recipe.optim.lars_form == ("google" if name == "resnet50_lars_32k" else "paper")  # whose rates it has
        assert [phase.shape for phase in recipe.phases] == ["linear", "polynomial"]
        warmup, decay = recipe.phases
        assert warmup.lr_endpoints[1] == decay.lr_endpoints[0] and decay.lr_endpoints[1] == 0
        assert recipe.model.name == ("alexnet_bn" if "alexnet" in name else "resnet50")


def test_2026_recipes_scale_to_8192_images_and_then_use_lars() -> None:
    sgd, lars = recipes_by_name("resnet50_2026").values()
    global_batches = {
        machines: {phase.batch * 8 * machines for phase in sgd.for_machines(machines).phases} for machines in sgd.tables
    }
    assert global_batches == {1: {2048, 1024}, 2: {4096, 2048}, 4: {8192, 4096}, 8: {8192, 4096}}
    assert sgd.target == 93.0 and sgd.optim.label_smoothing == 0.1
    assert (lars.optim.name, lars.phases[0].batch * lars.nominal_gpus) == ("lars", 32_768)
    for recipe in (*(sgd.for_machines(machines) for machines in sgd.tables), lars):
        for before, after in pairwise(recipe.phases):  # one line, halved with the batch
            factor = after.batch / before.batch
            assert before.lr_endpoints[1] * factor == pytest.approx(after.lr_endpoints[0], abs=1e-4)


def test_finetune_trains_the_classifier_first() -> None:
    (recipe,) = recipes_by_name("finetune").values()
    assert [phase.frozen for phase in recipe.phases] == [True, False] and recipe.model.weights
    assert recipe.phases[0].lr_endpoints[0] > recipe.phases[1].lr_endpoints[0]


def test_sweeps_vary_one_setting_each() -> None:
    recipes = recipes_by_name("sweeps")
    assert [sum(name.startswith(sweep) for name in recipes) for sweep in ("rate", "warmup", "trust", "batch")] == [
        5, 4, 4, 4,
    ]  # fmt: skip
    for recipe in recipes.values():
        assert (recipe.data, recipe.model, recipe.epochs) == (cifar10.data, cifar10.model, 10)
    trust_sweep = [recipe for name, recipe in recipes.items() if name.startswith("trust")]
    assert len({recipe.optim.trust for recipe in trust_sweep}) == 4
    assert len({recipe.phases for recipe in trust_sweep}) == 1
