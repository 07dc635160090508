"""Momentum when the rate changes (Goyal et al. 2017, remark 2), in float64.

outside     u <- m u + g,  w <- w - rate u                  equation 9: torch's form, and ours
absorbed    v <- m v + rate g,  w <- w - v                  equation 10: Caffe's form
corrected   v <- m (rate_now / rate_before) v + rate g      the absorbed form, put right
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import (
    Array,
    Pixels,
    carry_out,
    gradient,
    linear,
    order,
    rates,
    recipe,
    row,
    trainer,
    values,
)
from torch import nn

from train.optim import factory
from train.recipe import Optim
from train.recipe.schedule import Schedule

M = 0.9
JUMPS = np.array([0.01, 0.01, 1.0, 1.0, 0.3, 2.0, 0.001, 0.5])  # 100 times at once: a constant warm-up's end


def gradients(weight: Array) -> Array:
    """Of a quadratic with valleys of several widths: enough for a path that differs when the steps do."""
    return np.array([0.1, 0.02, 0.5, 0.003]) * (weight - np.array([1.0, -2.0, 0.3, 0.0]))


def outside(weight: Array) -> list[Array]:
    path, u = [], np.zeros(4)
    for rate in JUMPS:
        u = M * u + gradients(weight)
        weight = weight - rate * u
        path.append(weight)
    return path


def absorbed(weight: Array, corrected: bool) -> list[Array]:
    path, v, before = [], np.zeros(4), JUMPS[0]
    for rate in JUMPS:
        v = M * (rate / before if corrected else 1.0) * v + rate * gradients(weight)
        weight, before = weight - v, rate
        path.append(weight)
    return path


START = np.array([5.0, 4.0, -3.0, 2.0])


def test_the_absorbed_form_needs_the_correction_and_with_it_is_the_form_with_the_rate_outside() -> None:
    """The two references against each other, so that what follows says something."""
    np.testing.assert_allclose(absorbed(START, True), outside(START), rtol=1e-12)
    assert np.abs(absorbed(START, False)[-1] - outside(START)[-1]).max() > 0.1


def test_our_sgd_is_the_corrected_form_without_a_correction() -> None:
    weight = nn.Module()
    weight.w = nn.Parameter(torch.from_numpy(START.copy()))
    made = factory.build_optimizer(weight, Optim(momentum=M, weight_decay=0.0))
    path = []
    for rate in JUMPS:
        factory.set_lr(made, float(rate))
        weight.w.grad = torch.from_numpy(gradients(weight.w.detach().numpy()))
        made.step()
        path.append(weight.w.detach().numpy().copy())
    np.testing.assert_allclose(path, absorbed(START, True), rtol=1e-12)
    np.testing.assert_allclose(path, outside(START), rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_run_is_that_of_equation_9_through_warm_up_jump_and_decay(nesterov: bool, tmp_path: Path) -> None:
    """The trainer itself: w and u by hand over phases whose rates jump 20 times up and 30 times down."""
    pixels, decay = Pixels(60), 0.01
    rows = [row((0, 1), 12, (0.001, 0.01)), row((1, 2), 12, 0.02), row((2, 3), 20, (0.2, 0.1)), row((3, 4), 12, 0.003)]
    what = recipe(*rows, momentum=M, nesterov=nesterov, weight_decay=decay)
    net = linear()
    w, one = values(net), trainer(tmp_path, what, pixels, net)
    u = [np.zeros_like(part) for part in w]
    every = rates(Schedule(what, 60, 1))
    assert every.max() / every.min() > 100
    for number, (epoch, step) in enumerate(carry_out(one, pixels)):
        batch = epoch.scheduled_phase.phase.batch
        ids = order(0, epoch.number, 60)[step * batch : (step + 1) * batch]
        g = gradient(*w, pixels.numbers(ids), pixels.labels[ids])
        g = [part + decay * own for part, own in zip(g, w, strict=True)]
        u = [M * before + part for before, part in zip(u, g, strict=True)]
        moves = [part + M * now for part, now in zip(g, u, strict=True)] if nesterov else u
        w = [own - every[number] * move for own, move in zip(w, moves, strict=True)]
        for mine, theirs in zip(values(net), w, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-13)
    assert number == len(every) - 1


def lars_step(w: Array, g: Array, trust: float, decay: float) -> Array:
    """You et al. 2017, algorithm 1: trust |w| / (|g| + decay |w|) (g + decay w), without rate and momentum."""
    size, slope = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    return np.asarray(trust * size / (slope + decay * size) * (g + decay * w))


def lars_paths(trust: float, decay: float, form: str) -> list[Array]:
    w, v, before, path = START.reshape(2, 2), np.zeros((2, 2)), JUMPS[0], []
    for rate in JUMPS:
        move = lars_step(w, gradients(w.reshape(4)).reshape(2, 2), trust, decay)
        if form == "outside":
            v = M * v + move
            w = w - rate * v
        else:  # as You et al. write it: the rate is in v
            v = M * (rate / before if form == "corrected" else 1.0) * v + rate * move
            w = w - v
        path.append(w)
        before = rate
    return path


def test_our_lars_is_the_corrected_form_too() -> None:
    """You et al. 2017 write the absorbed form; where the rate jumps it needs the factor as SGD does."""
    trust, decay = 0.02, 5e-4
    corrected, plain = (lars_paths(trust, decay, form) for form in ("corrected", "absorbed"))
    np.testing.assert_allclose(corrected, lars_paths(trust, decay, "outside"), rtol=1e-12)
    assert np.abs(corrected[-1] - plain[-1]).max() > 1e-3
    layer: Any = nn.Linear(2, 2, bias=False).double()
    layer.weight = nn.Parameter(torch.from_numpy(START.reshape(2, 2).copy()))
    made = factory.build_optimizer(layer, Optim(name="lars", momentum=M, trust=trust, weight_decay=decay))
    path = []
    for rate in JUMPS:
        factory.set_lr(made, float(rate))
        layer.weight.grad = torch.from_numpy(gradients(layer.weight.detach().numpy().reshape(4)).reshape(2, 2))
        made.step()
        path.append(layer.weight.detach().numpy().copy())
    np.testing.assert_allclose(path, corrected, rtol=1e-9)
