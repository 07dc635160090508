"""Rules of the gradient of a step.

It is the mean over all kn images, however they are split (Goyal et al. 2017, remark 3), and scaling the learning rate
does not scale the loss (remark 1). The trainer is compared with numpy, in float64, in one, two and three processes.
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
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    parameter_values,
    run_steps,
)

from train.distributed.process_group import ProcessGroup

MOMENTUM, DECAY, LR = 0.9, 0.02, 0.05


def numpy_parameters(dataset: RandomImages, batch: int, epochs: int = 1, rate: float = LR) -> list[Array]:
    """Return the parameters after some epochs of SGD in numpy: one process, whole batches, no chunks.

    w <- w - lr u, with u <- m u + mean gradient over the step's images + decay w.
    """
    w = parameter_values(linear_classifier())
    u = [np.zeros_like(slope) for slope in w]
    for epoch in range(epochs):
        shuffle = epoch_permutation(0, epoch, dataset.train)
        for begin in range(0, dataset.train, batch):
            ids = shuffle[begin : begin + batch]
            g = cross_entropy_gradient(w, dataset.inputs(ids), dataset.labels[ids])
            u = [MOMENTUM * velocity + slope + DECAY * weight for velocity, slope, weight in zip(u, g, w, strict=True)]
            w = [weight - rate * velocity for weight, velocity in zip(w, u, strict=True)]
    return w


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
    expected = numpy_parameters(dataset, gpus * n)
    recipe = make_recipe(make_phase((0, 1), n, LR), gpus=gpus, momentum=MOMENTUM, weight_decay=DECAY)

    def work(group: ProcessGroup) -> list[Array]:
        trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier(), group)
        list(run_steps(trainer, dataset))
        return parameter_values(net)

    for parameters in in_group(world, work):
        for actual, reference in zip(parameters, expected, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=1e-11, atol=1e-14)


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


def test_loss_scale_does_not_change_the_update(tmp_path: Path) -> None:
    """The scale is divided out before the decay is added (remark 1; imagenet18 of 2018 scaled by 1024)."""
    dataset = RandomImages(24)
    recipe = make_recipe(make_phase((0, 1), 8, LR), momentum=MOMENTUM, weight_decay=DECAY)
    trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier())
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    list(run_steps(trainer, dataset))
    assert trainer.scaler.get_scale() == 1024
    for actual, reference in zip(parameter_values(net), numpy_parameters(dataset, 8), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-11, atol=1e-14)
