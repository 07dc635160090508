"""The recipes that come with the project: their tables to the digit, their steps, no torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.cifar10 import recipe as cifar10
from recipes.quickstart import recipe as quickstart
from recipes.resnet50_18min import recipe as resnet50
from train.recipe import IMAGENET, SAMPLE, Optim, Recipe
from train.recipe_file import load
from train.schedule import Schedule

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


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_by_its_path_under_the_name_of_its_file(name: str) -> None:
    (found,) = load(str(ROOT / "recipes" / f"{name}.py"))
    assert found.name == name


def test_loading_them_all_imports_nothing_heavy() -> None:
    code = f"import sys; import {', '.join(f'recipes.{name}' for name in NAMES)};"
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'cluster'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize("machines", TABLES)
def test_the_18_minute_tables_are_those_of_2018(machines: int) -> None:
    found = resnet50.at(machines)
    assert found.machines == machines and found.nominal_gpus == 8 * machines
    rows = [(p.epochs, p.size, p.batch, p.rates, p.min_scale, p.copy, p.rect_val) for p in found.phases]
    assert rows == TABLES[machines]
    assert {phase.shape for phase in found.phases} == {"linear"}


@pytest.mark.parametrize("machines", STEPS)
def test_the_18_minute_schedules_have_the_steps_of_2018(machines: int) -> None:
    schedule = Schedule(resnet50.at(machines), 1_281_167, 8 * machines)
    assert schedule.steps == STEPS[machines] and schedule.note == ""


@pytest.mark.parametrize("machines", STEPS)
def test_the_18_minute_tables_go_through_every_epoch_once(machines: int) -> None:
    schedule = Schedule(resnet50.at(machines), 1_281_167, 8 * machines)
    assert [epoch.number for epoch in schedule.epochs] == list(range(TABLES[machines][-1][0][1]))
    assert schedule.images_at(len(schedule.epochs), 0) == 1_281_167 * len(schedule.epochs)


def test_the_18_minute_recipe_trains_resnet50_without_decay_on_norms_only() -> None:
    assert resnet50.data == IMAGENET and resnet50.machines == 16
    assert (resnet50.model.name, resnet50.model.zero_gamma, resnet50.model.fc_std) == ("resnet50", True, 0.01)
    assert resnet50.optim == Optim(momentum=0.9, weight_decay=1e-4, norm_decay=False, bias_decay=True)
    assert resnet50.copies == (160,) and resnet50.at(8).copies == (160, 352)


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
