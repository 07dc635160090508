"""The recipes that come with the project: their tables to the digit, their steps, no torch."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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
NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))

# Epochs, size, batch per GPU, rate, min_scale, copy, rectangles: as published (diux-dev/imagenet18, train.py; for 2
# machines cybertronai/imagenet18), with one row for each change.
TABLES: dict[int, list[tuple[Any, ...]]] = {
    1: [
        ((0, 7), 128, 512, (1.0, 2.0), 0.08, 160, False),
        ((7, 13), 128, 512, (2.0, 0.25), 0.08, 160, False),
        ((13, 22), 224, 224, (0.4375, 0.04375), 0.087, 352, False),
        ((22, 25), 224, 224, (0.04375, 0.004375), 0.087, 352, False),
        ((25, 28), 288, 128, (0.0025, 0.00025), 0.5, None, True),
    ],
    2: [
        ((0, 6), 128, 256, (1.5, 3.0), 0.08, 160, False),
        ((6, 11), 128, 512, (3.0, 3.0), 0.08, 160, False),
        ((11, 13), 128, 512, (3.0, 1.5), 0.08, 160, False),
        ((13, 16), 224, 224, (1.3125, 1.3125), 0.087, 352, False),
        ((16, 23), 224, 224, (1.3125, 0.13125), 0.087, 352, False),
        ((23, 28), 224, 224, (0.13125, 0.013125), 0.087, 352, False),
        ((28, 30), 288, 128, (0.0075, 0.00075), 0.5, None, True),
    ],
    4: [
        ((0, 6), 128, 256, (2.0, 4.0), 0.08, 160, False),
        ((6, 11), 128, 512, (4.0, 4.0), 0.08, 160, False),
        ((11, 13), 128, 512, (4.0, 2.0), 0.08, 160, False),
        ((13, 16), 224, 224, (1.75, 1.75), 0.087, 352, False),
        ((16, 24), 224, 224, (1.75, 0.175), 0.087, 352, False),
        ((24, 28), 224, 224, (0.175, 0.0175), 0.087, 352, False),
        ((28, 30), 288, 128, (0.01, 0.001), 0.5, None, True),
    ],
    8: [
        ((0, 6), 128, 128, (1.92, 3.84), 0.08, 160, False),
        ((6, 11), 128, 256, (3.84, 3.84), 0.08, 160, False),
        ((11, 14), 128, 256, (3.84, 1.92), 0.08, 160, False),
        ((14, 17), 224, 128, (1.92, 1.92), 0.087, 352, False),
        ((17, 23), 224, 224, (1.92, 0.336), 0.087, 352, False),
        ((23, 29), 224, 224, (0.336, 0.0336), 0.087, 352, False),
        ((29, 36), 288, 128, (0.0192, 0.00192), 0.5, None, True),
    ],
    16: [
        ((0, 6), 128, 64, (1.88, 3.76), 0.08, 160, False),
        ((6, 16), 128, 128, (3.76, 3.76), 0.08, 160, False),
        ((16, 19), 224, 64, (1.88, 1.88), 0.08, None, False),
        ((19, 31), 224, 192, (0.564, 0.564), 0.08, None, False),
        ((31, 37), 224, 192, (0.0564, 0.0564), 0.08, None, False),
        ((37, 38), 288, 128, (0.0376, 0.0376), 0.5, None, True),
        ((38, 50), 288, 128, (0.00376, 0.00376), 0.5, None, True),
    ],
}
STEPS = {1: 16405, 2: 9599, 4: 4806, 8: 4224, 16: 4184}


def of(file: str) -> dict[str, Recipe]:
    """The recipes of a file by name."""
    return {one.name: one for one in read_recipes(str(ROOT / "recipes" / f"{file}.py"))}


ALL = [one for name in NAMES for one in of(name).values()]


@pytest.mark.parametrize("name", NAMES)
def test_the_only_recipe_of_a_file_has_the_name_of_the_file(name: str) -> None:
    found = of(name)
    assert len(found) > 1 or found.keys() == {name}


def test_no_two_recipes_have_one_name() -> None:
    names = [one.name for one in ALL]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("recipe", ALL, ids=lambda one: one.name)
def test_a_recipe_plans_every_table_on_its_own_machines(recipe: Recipe) -> None:
    for machines in recipe.tables or (recipe.machines,):
        one = recipe.for_machines(machines)
        schedule = Schedule(one, one.data.train, one.nominal_gpus)
        assert schedule.scaling_note == "" and one.machines == machines
        assert [epoch.number for epoch in schedule.epochs] == list(range(one.epochs))
        assert all(0 <= rate < 50 for row in schedule.scheduled_phases for rate in row.scaled_lr_endpoints)


@pytest.mark.parametrize("recipe", ALL, ids=lambda one: one.name)
def test_a_recipe_is_the_same_after_json(recipe: Recipe) -> None:
    for machines in recipe.tables or (recipe.machines,):
        one = recipe.for_machines(machines)
        again = Recipe.from_json(json.loads(json.dumps(one.to_json())))
        assert again.to_json() == one.to_json() and again.phases == one.phases and again.optim == one.optim


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "recipes" / f"{name}.py").read_text())) or ""


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_where_its_rows_are_from_what_was_claimed_and_that_none_is_ours_yet(name: str) -> None:
    text = docstring(name)
    if name not in ("cifar10", "quickstart"):
        assert "claimed" in text and "ours: no run yet" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_file_can_be_typed_and_name_recipes_that_it_has(name: str) -> None:
    lines = re.findall(r"^ *(imgnet-cluster [^#\n]+?)(?: *#.*)?$", docstring(name), re.MULTILINE)
    assert lines
    for line in lines:
        _, verb, *words = shlex.split(line)
        context = cli.commands[verb].make_context(verb, list(words))  # type: ignore[attr-defined]
        if "recipe" in context.params or "recipes" in context.params:
            assert f"recipes/{name}.py" in words
        assert set(context.params.get("only", ())) <= of(name).keys()
    with pytest.raises(click.UsageError):
        cli.commands["plan"].make_context("plan", ["--lokal", "x"])  # type: ignore[attr-defined]


def test_loading_them_all_imports_nothing_heavy() -> None:
    code = f"import sys; import {', '.join(f'recipes.{name}' for name in NAMES)};"
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'cluster'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize("machines", TABLES)
def test_the_18_minute_tables_are_those_of_2018(machines: int) -> None:
    found = resnet50.for_machines(machines)
    assert found.machines == machines and found.nominal_gpus == 8 * machines
    rows = [(p.epochs, p.size, p.batch, p.lr_endpoints, p.min_scale, p.copy, p.rect_val) for p in found.phases]
    assert rows == TABLES[machines]
    assert {phase.shape for phase in found.phases} == {"linear"}


@pytest.mark.parametrize("machines", STEPS)
def test_the_18_minute_schedules_have_the_steps_of_2018(machines: int) -> None:
    schedule = Schedule(resnet50.for_machines(machines), 1_281_167, 8 * machines)
    assert schedule.steps == STEPS[machines] and schedule.scaling_note == ""


@pytest.mark.parametrize("machines", STEPS)
def test_the_18_minute_tables_go_through_every_epoch_once(machines: int) -> None:
    schedule = Schedule(resnet50.for_machines(machines), 1_281_167, 8 * machines)
    assert [epoch.number for epoch in schedule.epochs] == list(range(TABLES[machines][-1][0][1]))
    assert schedule.images_at(len(schedule.epochs), 0) == 1_281_167 * len(schedule.epochs)


def test_the_18_minute_recipe_trains_resnet50_without_decay_on_norms_only() -> None:
    assert resnet50.data == IMAGENET and resnet50.machines == 16
    assert (resnet50.model.name, resnet50.model.zero_gamma, resnet50.model.fc_std) == ("resnet50", True, 0.01)
    assert resnet50.optim == Optim(momentum=0.9, weight_decay=1e-4, norm_decay=False, bias_decay=True)
    assert resnet50.copy_sizes == (160,) and resnet50.for_machines(8).copy_sizes == (160, 352)


@pytest.mark.parametrize("recipe", [quickstart, cifar10], ids=lambda one: one.name)
def test_the_small_recipes_warm_up_grow_the_batch_and_end_at_rate_zero(recipe: Recipe) -> None:
    assert recipe.nominal_gpus == 1
    table = Schedule(recipe, recipe.data.train, 1).table()
    assert table[0]["lr"][0] < table[0]["lr"][1] and table[-1]["lr"][1] == 0
    assert table[0]["batch"] < table[-1]["batch"]
    assert max(rate for row in table for rate in row["lr"]) <= 0.4


def test_quickstart_uses_the_built_in_set_and_ends_on_rectangles() -> None:
    assert quickstart.data == SAMPLE
    assert [phase.rect_val for phase in quickstart.phases] == [False, False, True]
    assert Schedule(quickstart, 4000, 1).steps < 1000


def test_cifar10_has_the_images_of_cifar10() -> None:
    assert (cifar10.data.train, cifar10.data.val) == (50_000, 10_000)
    assert {phase.size for phase in cifar10.phases} == {32}


def test_the_hour_has_the_hyperparameters_of_section_5_and_32_images_a_gpu_in_all_its_recipes() -> None:
    found = of("resnet50_1hour")
    assert len(found) == 7
    for name, one in found.items():
        assert one.model.name == ("resnet101" if "101" in name else "resnet50")
        assert (one.model.zero_gamma, one.model.fc_std) == (True, 0.01)
        assert (one.optim.momentum, one.optim.weight_decay, one.optim.norm_decay) == (0.9, 1e-4, False)
        assert one.optim.nesterov == ("plain" not in name)
        assert {phase.batch for phase in one.phases} == {32}
        assert one.phases[0].batch * one.nominal_gpus == (256 if name.endswith("_256") else 8192)


def test_the_mxnet_recipes_end_their_augmentation_at_epoch_100_and_grow_the_rate_slower_than_the_batch() -> None:
    found = of("resnet152_mxnet")
    for one in found.values():
        assert [(p.epochs[0] >= 100, p.augment) for p in one.phases] == [
            (p.epochs[0] >= 100, p.epochs[0] < 100) for p in one.phases
        ]
        assert one.epochs == 120 and {phase.batch for phase in one.phases} == {32}
    firsts = {one.nominal_gpus * 32: one.phases[0].lr_endpoints[0] for one in found.values()}
    assert firsts == {256: 0.1, 2560: 0.5, 5120: 1.0}


def test_the_lars_recipes_warm_up_decay_by_a_square_and_leave_norms_and_biases_alone() -> None:
    found = of("resnet50_lars")
    assert {one.phases[0].batch * one.nominal_gpus for one in found.values()} == {32_768, 65_536}
    for name, one in found.items():
        assert (one.optim.name, one.optim.norm_decay, one.optim.bias_decay) == ("lars", False, False)
        assert [phase.shape for phase in one.phases] == ["linear", "polynomial"]
        assert one.phases[0].lr_endpoints[1] == one.phases[1].lr_endpoints[0] and one.phases[1].lr_endpoints[1] == 0
        assert one.model.name == ("alexnet_bn" if "alexnet" in name else "resnet50")


def test_our_own_keeps_8192_images_a_step_on_eight_machines_and_takes_lars_beyond() -> None:
    few, many = of("resnet50_2026").values()
    batches = {n: {p.batch * 8 * n for p in few.for_machines(n).phases} for n in few.tables}
    assert batches == {1: {2048, 1024}, 2: {4096, 2048}, 4: {8192, 4096}, 8: {8192, 4096}}
    assert few.target == 93.0 and few.optim.label_smoothing == 0.1
    assert (many.optim.name, many.phases[0].batch * many.nominal_gpus) == ("lars", 32_768)
    for one in (*(few.for_machines(n) for n in few.tables), many):
        for before, after in zip(one.phases, one.phases[1:], strict=False):  # one line, halved with the batch
            factor = after.batch / before.batch
            assert before.lr_endpoints[1] * factor == pytest.approx(after.lr_endpoints[0], abs=1e-4)


def test_finetuning_trains_the_classifier_before_the_rest() -> None:
    (one,) = of("finetune").values()
    assert [phase.frozen for phase in one.phases] == [True, False] and one.model.weights
    assert one.phases[0].lr_endpoints[0] > one.phases[1].lr_endpoints[0]


def test_sweeps_change_one_thing_each() -> None:
    found = of("sweeps")
    assert [sum(name.startswith(sweep) for name in found) for sweep in ("rate", "warmup", "trust", "batch")] == [
        5, 4, 4, 4,
    ]  # fmt: skip
    for one in found.values():
        assert (one.data, one.model, one.epochs) == (cifar10.data, cifar10.model, 10)
    trusts = [one for name, one in found.items() if name.startswith("trust")]
    assert len({one.optim.trust for one in trusts}) == 4 and len({one.phases for one in trusts}) == 1
