"""The learning rate of every step of every recipe against the paper's formula."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))
LearningRates = NDArray[np.float64]
IMAGENET = 1_281_167


# --- the formulas, in float64 ------------------------------------------------------------------------------------


def step_count(epochs: int, batch: int, images: int = IMAGENET) -> int:
    return epochs * math.ceil(images / batch)


def linear_pieces(*rows: tuple[int, int, float, float], images: int = IMAGENET) -> LearningRates:
    """Return straight lines over (epochs, global batch, first rate, last rate)."""
    return np.concatenate(
        [np.linspace(first, last, step_count(epochs, batch, images)) for epochs, batch, first, last in rows]
    )


def imagenet18(
    batches: Sequence[tuple[int, int]], rates: Sequence[tuple[int, int, float, float]], machines: int
) -> LearningRates:
    """Return the rates of imagenet18's lists: (first epoch, batch per GPU) and (epoch, end, first rate, last rate)."""

    def global_batch(epoch: int) -> int:
        return 8 * machines * next(batch for first, batch in reversed(batches) if first <= epoch)

    pieces = []
    for start, end, first_rate, last_rate in rates:
        steps = sum(step_count(1, global_batch(epoch)) for epoch in range(start, end))
        pieces.append(np.linspace(first_rate, last_rate, steps))
    return np.concatenate(pieces)


def three_hours(epochs: int = 45, rate: float = 0.4) -> LearningRates:
    """Return the rates of imagenet-fast, main.py: drops at rounded shares of all epochs, four epochs of warm-up."""
    drops = [int(epochs * share + 0.5) for share in (0.47, 0.78, 0.95)]
    by_epoch = [
        rate / (4 - epoch) if epoch < 4 else rate / 10 ** sum(epoch >= drop for drop in drops)
        for epoch in range(epochs)
    ]
    return np.repeat(by_epoch, step_count(1, 1024))


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


def mxnet(batch: int, rate: float, drops: Sequence[int]) -> LearningRates:
    """Return a rate that is multiplied by 0.1 at some epochs of 120."""
    epoch = np.arange(step_count(120, batch)) // step_count(1, batch)
    return rate * 0.1 ** np.searchsorted(drops, epoch, side="right").astype(float)


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


def ours_2026(batch: int, peak: float, *knots: float) -> LearningRates:
    """Return a line with knots at epochs 5, 12, 18, 21 and 23, a warm-up from 256 images, half the batch at the end."""
    a, b, c, d, e = knots
    rows = ((5, batch, peak * 256 / batch, peak), (7, batch, peak, a), (6, batch, a, b), (3, batch, b, c))
    return linear_pieces(*rows, (2, batch // 2, d, e))


def cifar(*rows: tuple[int, int, float, float]) -> LearningRates:
    return linear_pieces(*rows, images=50_000)


def sweep_lrs(peak: float = 0.2, warmup: int = 2, batch: int = 128) -> LearningRates:
    up = [(warmup, batch, peak / 10, peak)] if warmup else []
    return cifar(*up, (10 - warmup, batch, peak, 0.0))


GOYAL = {"": goyal(8192, "gradual"), "_constant": goyal(8192, "constant"), "_cold": goyal(8192), "_256": goyal(256)}
FORMULAS: dict[str, dict[str, LearningRates]] = {
    "quickstart": {"quickstart, 1": linear_pieces(
        (2, 32, 0.005, 0.05), (4, 64, 0.1, 0.05), (3, 64, 0.05, 0.0), images=4000)},
    "cifar10": {"cifar10, 1": cifar((2, 64, 0.02, 0.2), (5, 128, 0.2, 0.08), (3, 128, 0.08, 0.0))},
    "resnet50_18min": {
        "resnet50_18min, 1": imagenet18(
            [(0, 512), (13, 224), (25, 128)],
            [(0, 7, 1.0, 2.0), (7, 13, 2.0, 0.25), (13, 22, 0.4375, 0.04375), (22, 25, 0.04375, 0.004375),
             (25, 28, 0.0025, 0.00025)], 1),
        "resnet50_18min, 2": imagenet18(
            [(0, 256), (6, 512), (13, 224), (28, 128)],
            [(0, 6, 1.5, 3.0), (6, 11, 3.0, 3.0), (11, 13, 3.0, 1.5), (13, 16, 1.3125, 1.3125),
             (16, 23, 1.3125, 0.13125), (23, 28, 0.13125, 0.013125), (28, 30, 0.0075, 0.00075)], 2),
        "resnet50_18min, 4": imagenet18(
            [(0, 256), (6, 512), (13, 224), (28, 128)],
            [(0, 6, 2.0, 4.0), (6, 11, 4.0, 4.0), (11, 13, 4.0, 2.0), (13, 16, 1.75, 1.75), (16, 24, 1.75, 0.175),
             (24, 28, 0.175, 0.0175), (28, 30, 0.01, 0.001)], 4),
        "resnet50_18min, 8": imagenet18(
            [(0, 128), (6, 256), (14, 128), (17, 224), (29, 128)],
            [(0, 6, 1.92, 3.84), (6, 11, 3.84, 3.84), (11, 14, 3.84, 1.92), (14, 17, 1.92, 1.92),
             (17, 23, 1.92, 0.336), (23, 29, 0.336, 0.0336), (29, 36, 0.0192, 0.00192)], 8),
        "resnet50_18min, 16": imagenet18(
            [(0, 64), (6, 128), (16, 64), (19, 192), (37, 128)],
            [(0, 6, 1.88, 3.76), (6, 16, 3.76, 3.76), (16, 19, 1.88, 1.88), (19, 31, 0.564, 0.564),
             (31, 37, 0.0564, 0.0564), (37, 38, 0.0376, 0.0376), (38, 50, 0.00376, 0.00376)], 16),
    },
    "resnet50_3hours": {"resnet50_3hours, 1": three_hours()},
    "resnet50_1hour": {
        "resnet50_1hour, 32": GOYAL[""], "resnet50_1hour_constant, 32": GOYAL["_constant"],
        "resnet50_1hour_cold, 32": GOYAL["_cold"], "resnet50_1hour_plain, 32": GOYAL[""],
        "resnet50_1hour_256, 1": GOYAL["_256"], "resnet101_1hour, 32": GOYAL[""],
        "resnet101_1hour_256, 1": GOYAL["_256"],
    },
    "resnet152_mxnet": {
        "resnet152_mxnet_256, 1": mxnet(256, 0.1, (30, 60, 90)),
        "resnet152_mxnet_2560, 10": mxnet(2560, 0.5, (30, 60, 90)),
        "resnet152_mxnet_5120, 20": mxnet(5120, 1.0, (40, 70, 100)),
    },
    "resnet50_lars": {
        "resnet50_lars_32k, 128": poly(0, 34, 32_768, 12, 90), "resnet50_lars_64k, 256": poly(0, 41, 65_536, 16, 90),
        "alexnet_lars_32k, 128": poly(1, 32, 32_768, 10, 100), "alexnet_lars_64k, 128": poly(1, 45.25, 65_536, 10, 95),
    },
    "resnet50_2026": {
        "resnet50_2026, 1": ours_2026(2048, 1.2, 0.7334, 0.3334, 0.1334, 0.0667, 0.00005),
        "resnet50_2026, 2": ours_2026(4096, 2.4, 1.4667, 0.6668, 0.2668, 0.1334, 0.0001),
        "resnet50_2026, 4": ours_2026(8192, 4.0, 2.4446, 1.1114, 0.4447, 0.2224, 0.00017),
        "resnet50_2026, 8": ours_2026(8192, 4.0, 2.4446, 1.1114, 0.4447, 0.2224, 0.00017),
        "resnet50_2026_lars, 16": linear_pieces(
            (13, 32_768, 0.0, 23.2143), (1, 32_768, 23.2143, 25.0), (10, 32_768, 25.0, 7.2857),
            (3, 32_768, 7.2857, 1.9714), (1, 16_384, 0.9857, 0.1)),
    },
    "finetune": {"finetune, 1": np.concatenate([
        one_cycle(0.05, step_count(2, 64, 5000)), one_cycle(0.01, step_count(6, 64, 5000))])},
    "sweeps": {
        **{f"rate_{peak}, 1": sweep_lrs(peak) for peak in (0.05, 0.1, 0.2, 0.4, 0.8)},
        **{f"warmup_{warmup}, 1": sweep_lrs(0.8, warmup) for warmup in (0, 1, 2, 4)},
        **{f"trust_{trust}, 1": sweep_lrs(10.0, 2, 1024) for trust in (0.0005, 0.001, 0.002, 0.004)},
        **{f"batch_{batch}, 1": sweep_lrs(0.2 * batch / 128, 2, batch) for batch in (64, 128, 256, 512)},
    },
}  # fmt: skip


# --- the recipes -------------------------------------------------------------------------------------------------


@cache
def schedules_of(file: str) -> dict[str, Schedule]:
    """Return the schedules of a file's recipes, at each number of machines that has a table, on the nominal GPUs."""
    schedules = {}
    for recipe in read_recipes(str(ROOT / "recipes" / f"{file}.py")):
        for machines in recipe.tables or (recipe.machines,):
            chosen = recipe.for_machines(machines)
            schedules[f"{recipe.name}, {machines}"] = Schedule(chosen, chosen.data.train, chosen.nominal_gpus)
    return schedules


def all_lrs(schedule: Schedule) -> LearningRates:
    """Return the learning rate of every step."""
    return np.array([epoch.lr_at(step) for epoch in schedule.epochs for step in range(epoch.steps)])


def test_every_recipe_has_a_formula() -> None:
    assert {file: schedules_of(file).keys() for file in FILES} == {file: FORMULAS[file].keys() for file in FORMULAS}


TABLES = [(file, name) for file, formulas in FORMULAS.items() for name in formulas]


@pytest.mark.parametrize(("file", "name"), TABLES, ids=[name for _, name in TABLES])
def test_lr_of_every_step_matches_the_papers_formula(file: str, name: str) -> None:
    actual, formula = all_lrs(schedules_of(file)[name]), FORMULAS[file][name]
    assert actual.shape == formula.shape
    np.testing.assert_allclose(actual, formula, rtol=1e-12, atol=1e-15)
