"""Rules of momentum when the learning rate changes (Goyal et al. 2017, remark 2), in float64.

outside     u <- m u + g,  w <- w - lr u                  equation 9: torch's form, and ours
absorbed    v <- m v + lr g,  w <- w - v                  equation 10: Caffe's form
corrected   v <- m (lr / previous lr) v + lr g            the absorbed form with momentum correction
"""

from collections.abc import Callable
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
# With a jump by 100, as at the end of a constant warm-up.
LEARNING_RATES = np.array([0.01, 0.01, 1.0, 1.0, 0.3, 2.0, 0.001, 0.5])
DECAY, TRUST = 5e-4, 0.02  # of LARS
START_WEIGHTS = np.array([[5.0, 4.0], [-3.0, 2.0]])


def quadratic_gradient(weight: Array) -> Array:
    """Return the gradient of a quadratic with different curvatures, so that different steps give different paths."""
    return np.array([[0.1, 0.02], [0.5, 0.003]]) * (weight - np.array([[1.0, -2.0], [0.3, 0.0]]))


def lars_step(w: Array) -> Array:
    """Return trust |w| / (|g| + decay |w|) (g + decay w) (You et al. 2017, algorithm 1, without lr and momentum)."""
    g = quadratic_gradient(w)
    weight_norm, gradient_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    return np.asarray(TRUST * weight_norm / (gradient_norm + DECAY * weight_norm) * (g + DECAY * w))


@pytest.mark.parametrize(("optim", "step"), [
    (Optim(momentum=MOMENTUM, weight_decay=0.0), quadratic_gradient),
    (Optim(name="lars", momentum=MOMENTUM, trust=TRUST, weight_decay=DECAY), lars_step),
], ids=["sgd", "lars"])  # fmt: skip
def test_lr_jumps_equal_the_corrected_form(optim: Optim, step: Callable[[Array], Array]) -> None:
    """You et al. 2017 write LARS in the absorbed form too, which needs the correction as SGD does."""
    layer: Any = nn.Linear(2, 2, bias=False).double()
    layer.weight = nn.Parameter(torch.from_numpy(START_WEIGHTS.copy()))
    optimizer = factory.build_optimizer(layer, optim)
    weight, velocity, previous_lr = START_WEIGHTS, np.zeros((2, 2)), LEARNING_RATES[0]
    for lr in LEARNING_RATES:
        velocity = MOMENTUM * (lr / previous_lr) * velocity + lr * step(weight)
        weight, previous_lr = weight - velocity, lr
        factory.set_lr(optimizer, float(lr))
        layer.weight.grad = torch.from_numpy(quadratic_gradient(layer.weight.detach().numpy()))
        optimizer.step()
        np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=1e-11)


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
