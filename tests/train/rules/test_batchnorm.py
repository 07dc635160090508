"""Rules of batch norm.

A norm sees the n images of one worker, whatever the number k of workers is (Goyal et al. 2017, section 2.3). Its
running statistics are averaged over all ranks before each validation.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.known import known
from support.trainer_in_process import (
    SINGLE_PROCESS,
    SIZE,
    Array,
    RandomImages,
    epoch_permutation,
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    random_image,
    run_steps,
)
from torch import nn

from train.data.loading.loader import Batch
from train.distributed.process_group import ProcessGroup
from train.metrics.accuracy import Accuracy
from train.recipe.schedule import Epoch

N = 8


def net_with_norm() -> nn.Sequential:
    """Return a batch norm over three channels with a linear classifier behind it."""
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), *linear_classifier()).double()


def moments(ids: Any) -> tuple[Array, Array]:
    """Return mean and unbiased variance of each channel over some images, computed with numpy."""
    pixels = np.stack([random_image(int(image_id), SIZE, SIZE) for image_id in ids]) / 255 - 0.5
    return pixels.mean((0, 1, 2)), pixels.var((0, 1, 2), ddof=1)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batchnorm_forward_pass_sees_one_workers_images(k: int, world: int, tmp_path: Path, in_group: Any) -> None:
    """Each forward pass has n images, one k-th of the step's, on any number of processes."""
    dataset = RandomImages(2 * N * k)
    recipe = make_recipe(make_phase((0, 1), N, 0.01), gpus=k)

    def work(group: ProcessGroup) -> list[tuple[int, list[float]]]:
        net, seen = net_with_norm(), []
        net[0].register_forward_hook(
            lambda _, inputs, __: seen.append((len(inputs[0]), inputs[0].mean((0, 2, 3)).tolist()))
        )
        trainer = make_trainer(tmp_path, recipe, dataset, net, group)
        steps = list(run_steps(trainer, dataset))
        return seen[: len(seen) if group.rank < k else 0] + [(0, [0.0])] * (len(steps) != 2)

    shuffle = epoch_permutation(0, 0, 2 * N * k)
    chunks = [shuffle[begin : begin + N] for begin in range(0, 2 * N * k, N)]
    expected_means = sorted((N, moments(chunk)[0].tolist()) for chunk in chunks)
    seen_means = sorted(trainer for rank in in_group(world, work) for trainer in rank)
    assert [count for count, _ in seen_means] == [N] * 2 * k
    np.testing.assert_allclose([mean for _, mean in seen_means], [mean for _, mean in expected_means], rtol=1e-10)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_gradient_through_norms_same_on_any_number_of_processes(world: int, tmp_path: Path, in_group: Any) -> None:
    """k = 6 workers of n = 8 images; parameters of a residual network after four steps, equal up to rounding."""
    dataset = RandomImages(4 * 6 * N - 7)
    recipe = make_recipe(make_phase((0, 1), N, 0.02), gpus=6)

    def work(group: ProcessGroup) -> list[Array]:
        trainer = make_trainer(tmp_path, recipe, dataset, group=group)
        for _ in run_steps(trainer, dataset):
            pass
        return [trainer.detach().numpy() for trainer in trainer.model.parameters()]

    single_process = work(SINGLE_PROCESS)
    for parameters in in_group(world, work):
        for actual, expected in zip(parameters, single_process, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_run_epoch_averages_statistics_over_ranks_before_validation(world: int, tmp_path: Path, in_group: Any) -> None:
    """Running mean and variance move by a tenth towards the chunk's; then all ranks get the mean over the ranks."""
    dataset = RandomImages(N * world)
    recipe = make_recipe(make_phase((0, 1), N, 0.01), gpus=world)

    def work(group: ProcessGroup) -> list[Array]:
        trainer = make_trainer(tmp_path, recipe, dataset, net := net_with_norm(), group)
        statistics: list[Array] = []
        silent_progress = SimpleNamespace(report_interval=lambda *_: None, report_epoch=lambda *_: None)
        trainer.progress, trainer.save = silent_progress, lambda wait=False: None  # type: ignore[assignment, method-assign]

        def validate(epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
            statistics.extend(net.get_buffer(f"0.running_{name}").numpy().copy() for name in ("mean", "var"))
            return {}

        trainer.validate = validate  # type: ignore[method-assign]
        trainer.run_epoch(
            trainer.schedule.epochs[0],
            map(dataset.decode_batch, trainer.sampler.train_requests(trainer.schedule.epochs[0])),
        )
        return statistics

    shuffle = epoch_permutation(0, 0, N * world)
    chunk_moments = [moments(shuffle[begin : begin + N]) for begin in range(0, N * world, N)]
    mean = np.mean([0.1 * trainer for trainer, _ in chunk_moments], 0)
    variance = np.mean([0.9 + 0.1 * trainer for _, trainer in chunk_moments], 0)
    for statistics in in_group(world, work):
        np.testing.assert_allclose(statistics, [mean, variance], rtol=1e-12)
    assert world == 1 or np.abs(0.1 * chunk_moments[0][0] - mean).max() > 1e-6


def test_batchnorm_running_statistics_move_by_a_tenth() -> None:
    """Momentum 0.9 in the paper's words (Goyal et al. 2017, section 5.1), 0.1 in torch's."""
    from train.models import registry
    from train.recipe.components import Model

    net = registry.build_model(Model(name="resnet10_tiny"), 3, 0)
    norms = [norm for norm in net.modules() if isinstance(norm, nn.BatchNorm2d)]
    assert {(norm.momentum, norm.eps, norm.track_running_stats) for norm in norms} == {(0.1, 1e-5, True)} and norms
    with torch.no_grad():
        x = torch.randn(4, norms[0].num_features, 3, 3)
        norms[0](x)
    np.testing.assert_allclose(
        known(norms[0].running_mean).numpy(), 0.1 * x.mean((0, 2, 3)).numpy(), rtol=1e-5, atol=1e-7
    )
