"""Rules of the learning rate (lr) of every step: scaling, warm-up, shapes, growth of the batch and of the images."""

from typing import Any

import numpy as np
import pytest
from support.trainer_in_process import RandomImages, learning_rates, make_phase, make_recipe, make_sampler

from train.recipe import IMAGENET
from train.recipe.schedule import Schedule

IMAGENET_IMAGES = IMAGENET.train


@pytest.mark.parametrize("k", [0.5, 1, 32, 256])
@pytest.mark.parametrize(("scaling", "factor"), [("linear", lambda k: k), ("sqrt", np.sqrt), ("none", lambda k: 1)])
def test_scaling_rule_multiplies_lr(scaling: str, factor: Any, k: float) -> None:
    """The recipe of Goyal et al. 2017, 0.1 for 8 GPUs of 32 images, on k times the GPUs.

    Linear: section 2.1 and figure 3. The square root: Krizhevsky 2014, and table 2a. None: table 2a, learns little.
    """
    schedule = Schedule(make_recipe(make_phase((0, 1), 32, 0.1), gpus=8, scaling=scaling), 10**5, int(8 * k))
    assert schedule.scheduled_phases[0].global_batch == 256 * k
    np.testing.assert_allclose(learning_rates(schedule), 0.1 * factor(k), rtol=1e-14)


STEPS_OF_EPOCH = 157  # ceil(1,281,167 / 8192)


@pytest.mark.parametrize(("shape", "warmup"), [
    ("gradual_warmup", np.linspace(0.1, 3.2, 5 * STEPS_OF_EPOCH)),  # from 0.1 to k 0.1, every iteration
    ("constant_warmup", np.full(5 * STEPS_OF_EPOCH, 0.1)),
])  # fmt: skip
def test_warmup_leads_from_base_to_scaled_lr(shape: str, warmup: Any) -> None:
    """Goyal et al. 2017, section 2.2: 5 epochs of warm-up, then k 0.1, then steps of 1/10."""
    drops = [make_phase(ends, 32, rate) for ends, rate in (((5, 30), 3.2), ((30, 60), 0.32), ((60, 80), 0.032))]
    schedule = Schedule(make_recipe(make_phase((0, 5), 32, 3.2, shape=shape), *drops, gpus=256), IMAGENET_IMAGES, 256)
    expected = [*warmup, *np.repeat([3.2, 0.32, 0.032], np.array([25, 30, 20]) * STEPS_OF_EPOCH)]
    np.testing.assert_allclose(learning_rates(schedule), expected, rtol=1e-13)


@pytest.mark.parametrize("shape", ["gradual_warmup", "constant_warmup"])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_warmup_has_no_effect_on_256_images_or_fewer(shape: str, gpus: int) -> None:
    """Goyal et al. 2017, section 5.1: there is a warm-up only for kn > 256."""
    recipe = make_recipe(make_phase((0, 2), 32, 0.0125 * gpus, shape=shape), gpus=gpus)
    np.testing.assert_allclose(learning_rates(Schedule(recipe, 1000, gpus)), 0.0125 * gpus, rtol=1e-14)


FIRST_LR, LAST_LR, STEPS = 1.7, 0.03, 3 * 37  # 3 epochs of 37 steps


def one_cycle(t: Any) -> Any:
    """Up from a 25th over 3 tenths of the steps, then down to a 250,000th, each by half a cosine."""
    up = (FIRST_LR + FIRST_LR / 25) / 2 - (FIRST_LR - FIRST_LR / 25) / 2 * np.cos(np.pi * t / 0.3)
    down = (FIRST_LR + FIRST_LR / 25e4) / 2 + (FIRST_LR - FIRST_LR / 25e4) / 2 * np.cos(np.pi * (t - 0.3) / 0.7)
    return np.where(t < 0.3, up, down)


LR_FORMULAS = {  # t from 0 at the first step to 1 at the last
    "linear": lambda t: FIRST_LR + (LAST_LR - FIRST_LR) * t,  # Smith 2017; per iteration in imagenet18, 2018
    # Loshchilov and Hutter 2016, equation 5
    "cosine": lambda t: LAST_LR + (FIRST_LR - LAST_LR) * np.cos(np.pi * t / 2) ** 2,
    "polynomial": lambda t: LAST_LR + (FIRST_LR - LAST_LR) * (1 - t) ** 2,  # You et al. 2017: LARS with poly(2)
    "one_cycle": one_cycle,  # Smith and Topin 2017
}


@pytest.mark.parametrize("gpus", [2, 256])  # global batches below and above 256 images
@pytest.mark.parametrize("shape", LR_FORMULAS)
def test_lr_shape_matches_formula_at_every_step(shape: str, gpus: int) -> None:
    """The phase counts its own steps: it begins at its own first rate, wherever the phase before ended."""
    rate = FIRST_LR if shape == "one_cycle" else (FIRST_LR, LAST_LR)
    recipe = make_recipe(make_phase((0, 2), 4, 0.5), make_phase((2, 5), 4, rate, shape=shape), gpus=gpus)
    _, lr_by_step = np.split(learning_rates(Schedule(recipe, 4 * gpus * 37, gpus)), [2 * 37])
    t = np.arange(STEPS) / (STEPS - 1)
    np.testing.assert_allclose(lr_by_step, LR_FORMULAS[shape](t), rtol=1e-12, atol=1e-15)


FFCV_RAMPS = {  # first and last epoch of the ramp from 160 to 192 in ffcv-imagenet: sizes by `get_resolution`
    (11, 13): [160, 192, 192],  # rn50, 16 epochs; half-way, 176 is 5.5 x 32, which numpy rounds to 6 x 32
    (65, 76): [160] * 6 + [192] * 6,  # rn50, 88 epochs
}


@pytest.mark.parametrize("ramp", FFCV_RAMPS)
def test_size_grows_as_in_ffcv(ramp: tuple[int, int]) -> None:
    """The published recipes of FFCV: a straight line, rounded to the nearest multiple of 32."""
    start, end = ramp
    phase = make_phase((start, end + 1), 8, 0.1, size=(160, 192))
    assert [phase.size_in_epoch(epoch) for epoch in range(start, end + 1)] == FFCV_RAMPS[ramp]


def test_size_grows_in_equal_stages_and_leaves_the_rates_alone() -> None:
    """The image size in stage i of M is S_i = S_0 + (S_e - S_0) i / (M - 1): Tan and Le 2021, algorithm 1.

    Every image that the network is given has its epoch's size, and the rates are those of a phase of one size.
    """
    grown, fixed = (
        Schedule(make_recipe(make_phase((0, 4), 4, (0.4, 0.0), size=size, shape="cosine")), 12, 1)
        for size in ((128, 224), 224)
    )
    sampler = make_sampler(grown, RandomImages(train=12, val=4))
    shapes = {request.epoch: set[Any]() for request in sampler.all_requests(0, 0)}
    for request in sampler.all_requests(0, 0):
        shapes[request.epoch].add((request.split, request.shape))
    expected = [128 + (224 - 128) * i // 3 for i in range(4)]
    assert [shapes[i] for i in range(4)] == [{("train", (size, size)), ("val", (size, size))} for size in expected]
    np.testing.assert_array_equal(learning_rates(grown), learning_rates(fixed))
    rows = grown.table()
    assert [(row.start, row.end, row.size, row.steps) for row in rows] == [
        (i, i + 1, size, 3) for i, size in enumerate(expected)
    ]
    assert (rows[0].lr[0], rows[-1].lr[1]) == fixed.table()[0].lr
    lr_by_step = learning_rates(fixed)
    assert [row.lr for row in rows] == [(lr_by_step[3 * i], lr_by_step[3 * i + 2]) for i in range(4)]
