"""Rules of momentum when the learning rate changes (Goyal et al. 2017, remark 2), in float64.

outside     u <- m u + g,  w <- w - lr u                  equation 9: torch's form, and ours
absorbed    v <- m v + lr g,  w <- w - v                  equation 10: Caffe's form
corrected   v <- m (lr / previous lr) v + lr g            the absorbed form with momentum correction
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import (
    Array,
    RandomImages,
    cross_entropy_gradient,
    epoch_permutation,
    learning_rates,
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    parameter_values,
    run_steps,
)
from torch import nn

from train.optim import factory
from train.recipe import Optim
from train.recipe.schedule import Schedule

MOMENTUM = 0.9
LEARNING_RATES = np.array(
    [0.01, 0.01, 1.0, 1.0, 0.3, 2.0, 0.001, 0.5]
)  # a jump by 100, as at the end of a constant warm-up


def quadratic_gradient(weight: Array) -> Array:
    """Return the gradient of a quadratic with different curvatures, so that different steps give different paths."""
    return np.array([0.1, 0.02, 0.5, 0.003]) * (weight - np.array([1.0, -2.0, 0.3, 0.0]))


def outside_form_path(weight: Array) -> list[Array]:
    path, velocity = [], np.zeros(4)
    for lr in LEARNING_RATES:
        velocity = MOMENTUM * velocity + quadratic_gradient(weight)
        weight = weight - lr * velocity
        path.append(weight)
    return path


def absorbed_form_path(weight: Array, corrected: bool) -> list[Array]:
    path, velocity, previous_lr = [], np.zeros(4), LEARNING_RATES[0]
    for lr in LEARNING_RATES:
        velocity = MOMENTUM * (lr / previous_lr if corrected else 1.0) * velocity + lr * quadratic_gradient(weight)
        weight, previous_lr = weight - velocity, lr
        path.append(weight)
    return path


START_WEIGHTS = np.array([5.0, 4.0, -3.0, 2.0])


def test_sgd_with_lr_jumps_equals_the_corrected_form() -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.from_numpy(START_WEIGHTS.copy()))
    optimizer = factory.build_optimizer(module, Optim(momentum=MOMENTUM, weight_decay=0.0))
    path = []
    for lr in LEARNING_RATES:
        factory.set_lr(optimizer, float(lr))
        module.w.grad = torch.from_numpy(quadratic_gradient(module.w.detach().numpy()))
        optimizer.step()
        path.append(module.w.detach().numpy().copy())
    np.testing.assert_allclose(path, absorbed_form_path(START_WEIGHTS, True), rtol=1e-12)
    np.testing.assert_allclose(path, outside_form_path(START_WEIGHTS), rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_trainer_follows_equation_9_through_lr_jumps(nesterov: bool, tmp_path: Path) -> None:
    """The trainer against numpy, over phases whose learning rates jump up by 20 and down by 30."""
    dataset, decay = RandomImages(60), 0.01
    phases = [
        make_phase((0, 1), 12, (0.001, 0.01)),
        make_phase((1, 2), 12, 0.02),
        make_phase((2, 3), 20, (0.2, 0.1)),
        make_phase((3, 4), 12, 0.003),
    ]
    recipe = make_recipe(*phases, momentum=MOMENTUM, nesterov=nesterov, weight_decay=decay)
    net = linear_classifier()
    weights, trainer = parameter_values(net), make_trainer(tmp_path, recipe, dataset, net)
    velocities = [np.zeros_like(slope) for slope in weights]
    all_rates = learning_rates(Schedule(recipe, 60, 1))
    assert all_rates.max() / all_rates.min() > 100
    for number, (epoch, step) in enumerate(run_steps(trainer, dataset)):
        batch = epoch.scheduled_phase.phase.batch
        ids = epoch_permutation(0, epoch.number, 60)[step * batch : (step + 1) * batch]
        slopes = cross_entropy_gradient(weights, dataset.inputs(ids), dataset.labels[ids])
        slopes = [slope + decay * weight for slope, weight in zip(slopes, weights, strict=True)]
        velocities = [MOMENTUM * velocity + slope for velocity, slope in zip(velocities, slopes, strict=True)]
        updates = (
            [slope + MOMENTUM * velocity for slope, velocity in zip(slopes, velocities, strict=True)]
            if nesterov
            else velocities
        )
        weights = [weight - all_rates[number] * update for weight, update in zip(weights, updates, strict=True)]
        for actual, expected in zip(parameter_values(net), weights, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)
    assert number == len(all_rates) - 1


def lars_step(w: Array, g: Array, trust: float, decay: float) -> Array:
    """Return trust |w| / (|g| + decay |w|) (g + decay w) (You et al. 2017, algorithm 1, without lr and momentum)."""
    weight_norm, gradient_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    return np.asarray(trust * weight_norm / (gradient_norm + decay * weight_norm) * (g + decay * w))


def lars_paths(trust: float, decay: float, form: str) -> list[Array]:
    w, velocity, previous_lr, path = START_WEIGHTS.reshape(2, 2), np.zeros((2, 2)), LEARNING_RATES[0], []
    for lr in LEARNING_RATES:
        step = lars_step(w, quadratic_gradient(w.reshape(4)).reshape(2, 2), trust, decay)
        if form == "outside":
            velocity = MOMENTUM * velocity + step
            w = w - lr * velocity
        else:  # as You et al. write it: the learning rate is in the velocity
            velocity = MOMENTUM * (lr / previous_lr if form == "corrected" else 1.0) * velocity + lr * step
            w = w - velocity
        path.append(w)
        previous_lr = lr
    return path


def test_lars_with_lr_jumps_equals_the_corrected_form() -> None:
    """You et al. 2017 write the absorbed form; where the learning rate jumps, it needs the correction as SGD does."""
    trust, decay = 0.02, 5e-4
    corrected, uncorrected = (lars_paths(trust, decay, form) for form in ("corrected", "absorbed"))
    np.testing.assert_allclose(corrected, lars_paths(trust, decay, "outside"), rtol=1e-12)
    assert np.abs(corrected[-1] - uncorrected[-1]).max() > 1e-3
    layer: Any = nn.Linear(2, 2, bias=False).double()
    layer.weight = nn.Parameter(torch.from_numpy(START_WEIGHTS.reshape(2, 2).copy()))
    optimizer = factory.build_optimizer(layer, Optim(name="lars", momentum=MOMENTUM, trust=trust, weight_decay=decay))
    path = []
    for lr in LEARNING_RATES:
        factory.set_lr(optimizer, float(lr))
        layer.weight.grad = torch.from_numpy(quadratic_gradient(layer.weight.detach().numpy().reshape(4)).reshape(2, 2))
        optimizer.step()
        path.append(layer.weight.detach().numpy().copy())
    np.testing.assert_allclose(path, corrected, rtol=1e-11)
