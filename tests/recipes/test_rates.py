"""The learning rate of every step against the paper's formula, of the recipes whose rates are no straight lines.

The ends of the straight lines are compared in tests/docs/test_paper_schedules.py.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from train.recipe.files import read_recipes, select_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
LearningRates = NDArray[np.float64]
IMAGENET = 1_281_167


# --- the formulas, in float64 ------------------------------------------------------------------------------------


def step_count(epochs: int, batch: int, images: int = IMAGENET) -> int:
    return epochs * math.ceil(images / batch)


def goyal(batch: int, warmup: str = "") -> LearningRates:
    """Return eta = 0.1 k n / 256, a tenth at 30, 60 and 80. Gradual warm-up adds a constant to eta / k in each step."""
    steps_per_epoch = step_count(1, batch)
    eta = 0.1 * batch / 256
    t = np.arange(90 * steps_per_epoch)
    rate = eta * 0.1 ** np.searchsorted([30, 60, 80], t // steps_per_epoch, side="right")
    warmup_steps = 5 * steps_per_epoch
    if warmup == "gradual":
        rate[:warmup_steps] = 0.1 + (eta - 0.1) / (warmup_steps - 1) * t[:warmup_steps]
    elif warmup == "constant":
        rate[:warmup_steps] = 0.1
    return np.asarray(rate)


def poly(first: float, peak: float, batch: int, warmup: int, epochs: int) -> LearningRates:
    """Return the rates of You et al. 2017: a linear warm-up, then peak (1 - t / T)^2."""
    up, down = step_count(warmup, batch), step_count(epochs - warmup, batch)
    rise = first + (peak - first) * np.arange(up) / (up - 1)
    return np.concatenate([rise, peak * (1 - np.arange(down) / (down - 1)) ** 2])


def one_cycle(peak: float, count: int) -> LearningRates:
    """Return Smith and Topin 2017 as in torch: peak / 25, the peak after 0.3, peak / 250,000, with half cosines."""
    t = np.arange(count) / (count - 1)
    up = peak / 25 + (peak - peak / 25) * (1 - np.cos(np.pi * t / 0.3)) / 2
    down = peak / 250_000 + (peak - peak / 250_000) * (1 + np.cos(np.pi * (t - 0.3) / 0.7)) / 2
    return np.where(t < 0.3, up, down)


GOYAL = {"": goyal(8192, "gradual"), "_constant": goyal(8192, "constant"), "_cold": goyal(8192), "_256": goyal(256)}
FORMULAS = {  # by file, recipe and machines
    ("resnet50_1hour", "resnet50_1hour", 32): GOYAL[""],
    ("resnet50_1hour", "resnet50_1hour_constant", 32): GOYAL["_constant"],
    ("resnet50_1hour", "resnet50_1hour_cold", 32): GOYAL["_cold"],
    ("resnet50_1hour", "resnet50_1hour_plain", 32): GOYAL[""],
    ("resnet50_1hour", "resnet50_1hour_256", 1): GOYAL["_256"],
    ("resnet50_1hour", "resnet101_1hour", 32): GOYAL[""],
    ("resnet50_1hour", "resnet101_1hour_256", 1): GOYAL["_256"],
    ("resnet50_lars", "resnet50_lars_32k", 128): poly(0, 34, 32_768, 12, 90),
    ("resnet50_lars", "resnet50_lars_64k", 256): poly(0, 41, 65_536, 16, 90),
    ("resnet50_lars", "alexnet_lars_32k", 128): poly(1, 32, 32_768, 10, 100),
    ("resnet50_lars", "alexnet_lars_64k", 128): poly(1, 45.25, 65_536, 10, 95),
    ("finetune", "finetune", 1): np.concatenate(
        [one_cycle(0.05, step_count(2, 64, 5000)), one_cycle(0.01, step_count(6, 64, 5000))]
    ),
}


@pytest.mark.parametrize("key", FORMULAS, ids=lambda key: key[1])
def test_lr_of_every_step_matches_the_papers_formula(key: tuple[str, str, int]) -> None:
    file, name, machines = key
    (recipe,) = select_recipes(read_recipes(str(ROOT / "recipes" / f"{file}.py")), [name])
    recipe = recipe.for_machines(machines)
    schedule = Schedule(recipe, recipe.data.train, recipe.nominal_gpus)
    actual = np.array([epoch.lr_at(step) for epoch in schedule.epochs for step in range(epoch.steps)])
    assert actual.shape == FORMULAS[key].shape
    np.testing.assert_allclose(actual, FORMULAS[key], rtol=1e-12, atol=1e-15)


def test_rates_of_all_other_recipes_are_straight_lines() -> None:
    for path in (ROOT / "recipes").glob("[!_]*.py"):
        if path.stem not in {file for file, _, _ in FORMULAS}:
            recipes = [
                recipe.for_machines(count) for recipe in read_recipes(str(path)) for count in recipe.tables or (1,)
            ]
            assert {phase.shape for recipe in recipes for phase in recipe.phases} <= {"linear", "gradual_warmup"}, path
