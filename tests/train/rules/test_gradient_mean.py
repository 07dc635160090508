"""Rules of the gradient of a step, and of momentum when the learning rate changes.

The gradient is the mean over all kn images, however they are split (Goyal et al. 2017, remark 3); scaling the learning
rate does not scale the loss (remark 1). Momentum is that of equation 9, u <- m u + g, w <- w - lr u, which needs no
correction when the rate changes (remark 2). The trainer is compared with numpy in float64, in one to three processes.
"""

from dataclasses import replace
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
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    parameter_values,
    run_steps,
)

from train.distributed.process_group import ProcessGroup
from train.recipe import Recipe
from train.recipe.schedule import Schedule

MOMENTUM, DECAY, LR = 0.9, 0.02, 0.05


def numpy_parameters(dataset: RandomImages, recipe: Recipe) -> list[Array]:
    """Return the parameters after a run of SGD in numpy: one process, whole batches, no chunks.

    u <- m u + mean gradient over the step's images + decay w, w <- w - lr u; with Nesterov w - lr (g + m u).
    """
    schedule, m = Schedule(recipe, dataset.train, recipe.nominal_gpus), recipe.optim.momentum
    w = parameter_values(linear_classifier())
    u = [np.zeros_like(slope) for slope in w]
    for epoch in schedule.epochs:
        batch, shuffle = epoch.scheduled_phase.global_batch, epoch_permutation(0, epoch.number, dataset.train)
        for step in range(epoch.steps):
            ids = shuffle[step * batch : (step + 1) * batch]
            g = cross_entropy_gradient(w, dataset.inputs(ids), dataset.labels[ids])
            if clip := recipe.optim.clip:
                norm = np.sqrt(sum(np.sum(slope**2) for slope in g)) + 1e-6  # as torch has it
                g = [slope * min(1, clip / norm) for slope in g]
            g = [slope + recipe.optim.weight_decay * weight for slope, weight in zip(g, w, strict=True)]
            u = [m * velocity + slope for velocity, slope in zip(u, g, strict=True)]
            updates = [slope + m * v for slope, v in zip(g, u, strict=True)] if recipe.optim.nesterov else u
            w = [weight - epoch.lr_at(step) * update for weight, update in zip(w, updates, strict=True)]
    return w


def assert_close(actual: list[Array], expected: list[Array]) -> None:
    for values, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(values, reference, rtol=1e-10, atol=1e-13)


CASES = [  # GPUs, images of each, images of the set
    (3, 8, 50),  # a rest of 2 images: one chunk, so two of three processes have none
    (3, 8, 49),  # a rest of 1 image, taken twice with half the weight
    (3, 8, 59),  # a rest of 11 images: chunks of 5 and 6
    (2, 5, 27),  # a rest of 7 images in chunks of 3 and 4
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("gpus", "n", "images"), CASES)
def test_step_gradient_is_mean_over_all_images_of_the_global_batch(
    gpus: int, n: int, images: int, world: int, tmp_path: Path, in_group: Any
) -> None:
    """g = 1/(kn) sum over k workers and n images (remark 3), not the mean of the workers' means."""
    dataset = RandomImages(images)
    recipe = make_recipe(make_phase((0, 1), n, LR), gpus=gpus, momentum=MOMENTUM, weight_decay=DECAY)
    expected = numpy_parameters(dataset, recipe)

    def work(group: ProcessGroup) -> list[Array]:
        trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier(), group)
        list(run_steps(trainer, dataset))
        return parameter_values(net)

    for parameters in in_group(world, work):
        assert_close(parameters, expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_trainer_follows_equation_9_through_lr_jumps(nesterov: bool, tmp_path: Path) -> None:
    """Remark 2, over phases of other batches whose learning rates jump up by 20 and down by 30."""
    dataset = RandomImages(60)
    phases = [
        make_phase((0, 1), 12, (0.001, 0.01)),
        make_phase((1, 2), 12, 0.02),
        make_phase((2, 3), 20, (0.2, 0.1)),
        make_phase((3, 4), 12, 0.003),
    ]
    recipe = make_recipe(*phases, momentum=MOMENTUM, nesterov=nesterov, weight_decay=DECAY)
    trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier())
    assert len(list(run_steps(trainer, dataset))) == 5 + 5 + 3 + 5
    assert_close(parameter_values(net), numpy_parameters(dataset, recipe))


def test_linear_scaling_applies_to_lr_and_decay_but_not_to_the_loss(tmp_path: Path) -> None:
    """The step is w - k lr (g + decay w), which is not w - lr (k g + decay w) (remark 1)."""
    k = 8
    dataset = RandomImages(8 * k)
    recipe = make_recipe(make_phase((0, 1), 8, LR), gpus=1, momentum=MOMENTUM, weight_decay=DECAY)
    w = parameter_values(linear_classifier())
    g = cross_entropy_gradient(w, dataset.inputs(range(8 * k)), dataset.labels)
    trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier(), gpus=k)
    assert len(list(run_steps(trainer, dataset))) == 1
    for actual, weight, slope in zip(parameter_values(net), w, g, strict=True):
        np.testing.assert_allclose(actual, weight - k * LR * (slope + DECAY * weight), rtol=1e-11, atol=1e-14)
        assert np.abs(actual - (weight - LR * (k * slope + DECAY * weight))).max() > 1e-5


@pytest.mark.parametrize("world", [1, 2])
def test_clipped_gradient_is_that_of_the_whole_batch_without_loss_scale_and_decay(
    world: int, tmp_path: Path, in_group: Any
) -> None:
    """The norm is that of the mean over the global batch and of all weights together (Pascanu et al. 2013)."""
    dataset = RandomImages(50)
    recipe = make_recipe(make_phase((0, 1), 8, LR), gpus=2, momentum=MOMENTUM, weight_decay=DECAY, clip=0.05)
    unclipped = numpy_parameters(dataset, replace(recipe, optim=replace(recipe.optim, clip=None)))
    expected = numpy_parameters(dataset, recipe)
    assert any(np.abs(clipped - free).max() > 1e-4 for clipped, free in zip(expected, unclipped, strict=True))

    def work(group: ProcessGroup) -> list[Array]:
        trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier(), group)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        list(run_steps(trainer, dataset))
        return parameter_values(net)

    for parameters in in_group(world, work):
        assert_close(parameters, expected)


def test_loss_scale_does_not_change_the_update(tmp_path: Path) -> None:
    """The scale is divided out before the decay is added (remark 1; imagenet18 of 2018 scaled by 1024)."""
    dataset = RandomImages(24)
    recipe = make_recipe(make_phase((0, 1), 8, LR), momentum=MOMENTUM, weight_decay=DECAY)
    trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier())
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    list(run_steps(trainer, dataset))
    assert trainer.scaler.get_scale() == 1024
    assert_close(parameter_values(net), numpy_parameters(dataset, recipe))
