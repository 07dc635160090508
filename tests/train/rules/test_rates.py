"""The rate of every step: with the batch, in the warm-up, by each shape, when the batch grows or the images do."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.trainer_in_process import rates, recipe, row

from recipes.resnet50_18min import recipe as resnet50
from train.recipe import IMAGENET, Phase, Recipe
from train.recipe.schedule import Schedule

N = IMAGENET.train


# --- scaling --------------------------------------------------------------------------------------------------------


def goyal(scaling: str = "linear") -> Recipe:
    """Goyal et al. 2017: 0.1 for 8 GPUs of 32 images."""
    return recipe(row((0, 1), 32, 0.1), gpus=8, scaling=scaling)


@pytest.mark.parametrize(("batch", "rate"), [
    (128, 0.05), (256, 0.1), (512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6), (8192, 3.2), (16384, 6.4),
    (32768, 12.8), (65536, 25.6),
])  # fmt: skip
def test_linear_scaling_a_batch_of_k_n_has_k_times_the_rate(batch: int, rate: float) -> None:
    """rate = 0.1 kn / 256 (Goyal et al. 2017, section 2.1 and figure 3)."""
    plan = Schedule(goyal(), N, batch // 32)
    assert plan.scheduled_phases[0].global_batch == batch
    np.testing.assert_allclose(rates(plan), rate, rtol=1e-14)


@pytest.mark.parametrize("k", [1, 2, 4, 32])
def test_square_root_scaling_a_batch_of_k_n_has_the_root_of_k_times_the_rate(k: int) -> None:
    """rate = 0.1 sqrt(k) (Krizhevsky 2014; Goyal et al. 2017, table 2a: 8k, 0.1 sqrt(32))."""
    plan = Schedule(goyal("sqrt"), N, 8 * k)
    assert plan.scheduled_phases[0].global_batch == 256 * k
    np.testing.assert_allclose(rates(plan), 0.1 * k**0.5, rtol=1e-14)
    assert ("square-root rule" in plan.scaling_note) == (k > 1)


@pytest.mark.parametrize("k", [1, 32])
def test_without_scaling_the_rate_stays(k: int) -> None:
    """Goyal et al. 2017, table 2a: 8k at 0.1, which learns little."""
    np.testing.assert_allclose(rates(Schedule(goyal("none"), N, 8 * k)), 0.1, rtol=1e-14)


# --- warm-up --------------------------------------------------------------------------------------------------------


def test_gradual_warmup_adds_a_constant_at_every_step_from_the_base_rate_to_the_scaled_one() -> None:
    """Goyal et al. 2017, section 2.2: from 0.1 to k 0.1 over 5 epochs, every iteration; then steps of 1/10."""
    drops = [row(ends, 32, rate) for ends, rate in (((5, 30), 3.2), ((30, 60), 0.32), ((60, 80), 0.032))]
    plan = Schedule(recipe(row((0, 5), 32, 3.2, shape="gradual_warmup"), *drops, gpus=256), N, 256)
    steps = 157  # an epoch: ceil(1,281,167 / 8192)
    expected = [0.1 + (3.2 - 0.1) * t / (5 * steps - 1) for t in range(5 * steps)]
    expected += [3.2] * 25 * steps + [0.32] * 30 * steps + [0.032] * 20 * steps
    np.testing.assert_allclose(rates(plan), expected, rtol=1e-13)
    assert np.allclose(np.diff(rates(plan)[: 5 * steps]), 3.1 / 784, rtol=1e-9)


def test_constant_warmup_holds_the_base_rate() -> None:
    """Goyal et al. 2017, section 2.2: 0.1 for 5 epochs, then 3.2 at once."""
    rows = (row((0, 5), 32, 3.2, shape="constant_warmup"), row((5, 6), 32, 3.2))
    found = rates(Schedule(recipe(*rows, gpus=256), N, 256))
    np.testing.assert_allclose(found, [0.1] * 785 + [3.2] * 157, rtol=1e-14)


@pytest.mark.parametrize("shape", ["gradual_warmup", "constant_warmup"])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_up_to_256_images_there_is_no_warmup(shape: str, gpus: int) -> None:
    """Goyal et al. 2017, section 5.1: only for kn > 256."""
    what = recipe(row((0, 2), 32, 0.0125 * gpus, shape=shape), gpus=gpus)
    np.testing.assert_allclose(rates(Schedule(what, 1000, gpus)), 0.0125 * gpus, rtol=1e-14)


# --- shapes ---------------------------------------------------------------------------------------------------------

A, B, STEPS = 1.7, 0.03, 3 * 37  # first and last rate; steps of 3 epochs


def one_cycle(t: Any) -> Any:
    """Up from a 25th over 3 tenths of the steps and down to a 250,000th, each half a cosine."""
    up = (A + A / 25) / 2 - (A - A / 25) / 2 * np.cos(np.pi * t / 0.3)
    down = (A + A / 25e4) / 2 + (A - A / 25e4) / 2 * np.cos(np.pi * (t - 0.3) / 0.7)
    return np.where(t < 0.3, up, down)


SHAPES = {  # t from 0 at the first step to 1 at the last
    "linear": lambda t: A + (B - A) * t,  # Smith 2017; per iteration in imagenet18, 2018
    "cosine": lambda t: B + (A - B) * np.cos(np.pi * t / 2) ** 2,  # Loshchilov and Hutter 2016, equation 5
    "polynomial": lambda t: B + (A - B) * (1 - t) ** 2,  # You et al. 2017: LARS with poly(2)
    "one_cycle": one_cycle,  # Smith and Topin 2017
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_the_rate_of_its_formula_at_every_step(shape: str) -> None:
    what = recipe(row((0, 3), 4, A if shape == "one_cycle" else (A, B), shape=shape), gpus=2)
    t = np.arange(STEPS) / (STEPS - 1)
    np.testing.assert_allclose(rates(Schedule(what, 8 * 37, 2)), SHAPES[shape](t), rtol=1e-12, atol=1e-15)


def test_steps_divide_the_rate_by_ten_where_they_are_said_to() -> None:
    """rate = 0.1 / 10^(boundaries passed), at epochs 30, 60 and 80 of 90 (Goyal et al. 2017, section 5.1)."""
    ends = (0, 30, 60, 80, 90)
    what = recipe(*(row((a, b), 32, 0.1 / 10**n) for n, (a, b) in enumerate(pairwise(ends))), gpus=8)
    plan = Schedule(what, N, 8)
    per_epoch = 5005  # ceil(1,281,167 / 256)
    passed = np.array([sum(epoch >= end for end in ends[1:4]) for epoch in range(90)])
    np.testing.assert_allclose(rates(plan), np.repeat(0.1 * 0.1**passed, per_epoch), rtol=1e-14)


# --- growth ---------------------------------------------------------------------------------------------------------


def test_a_batch_that_doubles_at_a_constant_rate_halves_the_steps_and_the_rate_per_image() -> None:
    """The 16 machines of 2018 at epoch 6: 64 to 128 a GPU at 3.76, in place of a drop of the rate (seeds.md 1.1)."""
    before, after = resnet50.phases[:2]
    plan = Schedule(resnet50, N, 128)
    first, second = plan.scheduled_phases[:2]
    assert (first.global_batch, second.global_batch) == (8192, 16384)
    assert (first.steps_per_epoch, second.steps_per_epoch) == (157, 79)
    found = rates(plan)
    np.testing.assert_allclose(found[6 * 157 - 1 : 6 * 157 + 10 * 79], 3.76, rtol=1e-14)
    per_256 = [row["lr_per_256"] for row in plan.table()[:2]]
    assert per_256[0][1] == pytest.approx(3.76 / 32) and per_256[1] == pytest.approx([3.76 / 64] * 2)
    assert (before.batch * 2, before.size) == (after.batch, after.size)


RESTARTS = {  # machines: at the growth from 128 to 224 pixels, rate x 256 / batch before it and after it
    1: (0.015625, 0.0625),
    2: (0.046875, 0.09375),
    4: (0.03125, 0.0625),
    8: (0.03, 0.06),
    16: (0.05875, 0.05875),
}


@pytest.mark.parametrize("machines", RESTARTS)
def test_larger_images_restart_the_rate(machines: int) -> None:
    """Back to .06 per 256 images and more, in the tables of 2018 (seeds.md 1.1); each side counts by its own batch."""
    plan = Schedule(resnet50.for_machines(machines), N, 8 * machines)
    sides = [epoch for epoch in plan.epochs if epoch.scheduled_phase.phase.size in (128, 224)]
    place = next(n for n, epoch in enumerate(sides) if epoch.scheduled_phase.phase.size == 224)
    before, after = sides[place - 1], sides[place]
    last, first = before.lr_at(before.steps - 1), after.lr_at(0)
    assert (
        last * 256 / before.scheduled_phase.global_batch,
        first * 256 / after.scheduled_phase.global_batch,
    ) == pytest.approx(RESTARTS[machines], rel=1e-12)
    assert after.first_step == before.first_step + -(-N // before.scheduled_phase.global_batch)


def test_a_restart_begins_its_shape_anew() -> None:
    """Each row counts its own steps: the second begins at its first rate, whatever the first one made of it."""
    rows = [Phase(epochs=(0, 2), size=32, batch=8, lr=(1.0, 0.1)), Phase(epochs=(2, 4), size=64, batch=4, lr=(0.4, 0))]
    expected = [*np.linspace(1.0, 0.1, 2 * 5), *np.linspace(0.4, 0.0, 2 * 10)]
    np.testing.assert_allclose(rates(Schedule(recipe(*rows), 40, 1)), expected, rtol=1e-12, atol=1e-15)
