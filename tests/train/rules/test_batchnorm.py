"""Batch norm sees n images, one worker's, whatever k is (Goyal et al. 2017, section 2.3); its statistics, averaged over
the workers, before each validation.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import ALONE, SIZE, Array, Pixels, carry_out, drawn, linear, order, recipe, row, trainer
from torch import nn

from train.distributed.process_group import ProcessGroup

N = 8


def normed() -> nn.Sequential:
    """A norm over three channels, and a classifier behind it."""
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), *linear()).double()


def moments(ids: Any) -> tuple[Array, Array]:
    """Mean and unbiased variance of each channel over these images, by hand."""
    x = np.stack([drawn(int(one), SIZE, SIZE) for one in ids]) / 255 - 0.5
    return x.mean((0, 1, 2)), x.var((0, 1, 2), ddof=1)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_norm_sees_the_n_images_of_one_worker_whatever_k_is_and_however_it_is_carried_out(
    k: int, world: int, tmp_path: Path, in_group: Any
) -> None:
    """Over k workers on as many processes or fewer: each forward pass has n images, those of one k-th of the step."""
    pixels = Pixels(2 * N * k)
    what = recipe(row((0, 1), N, 0.01), gpus=k)

    def work(group: ProcessGroup) -> list[tuple[int, list[float]]]:
        net, seen = normed(), []
        net[0].register_forward_hook(
            lambda _, given, __: seen.append((len(given[0]), given[0].mean((0, 2, 3)).tolist()))
        )
        one = trainer(tmp_path, what, pixels, net, group)
        steps = list(carry_out(one, pixels))
        return seen[: len(seen) if group.rank < k else 0] + [(0, [0.0])] * (len(steps) != 2)

    shuffle = order(0, 0, 2 * N * k)
    chunks = [shuffle[begin : begin + N] for begin in range(0, 2 * N * k, N)]
    expected = sorted((N, moments(chunk)[0].tolist()) for chunk in chunks)
    found = sorted(one for rank in in_group(world, work) for one in rank)
    assert [count for count, _ in found] == [N] * 2 * k
    np.testing.assert_allclose([mean for _, mean in found], [mean for _, mean in expected], rtol=1e-10)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_gradient_through_norms_is_the_same_on_any_number_of_processes(
    world: int, tmp_path: Path, in_group: Any
) -> None:
    """k = 6 workers of n = 8; the parameters after four steps of a residual net, to rounding."""
    pixels = Pixels(4 * 6 * N - 7)
    what = recipe(row((0, 1), N, 0.02), gpus=6)

    def work(group: ProcessGroup) -> list[Array]:
        one = trainer(tmp_path, what, pixels, group=group)
        for _ in carry_out(one, pixels):
            pass
        return [one.detach().numpy() for one in one.model.parameters()]

    alone = work(ALONE)
    for found in in_group(world, work):
        for mine, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_before_a_validation_all_processes_have_the_mean_of_all_statistics(
    world: int, tmp_path: Path, in_group: Any
) -> None:
    """Running mean and variance move by a tenth towards each chunk's; then 1/k of their sum, the same everywhere."""
    pixels = Pixels(N * world)
    what = recipe(row((0, 1), N, 0.01), gpus=world)

    def work(group: ProcessGroup) -> list[Array]:
        one, found = trainer(tmp_path, what, pixels, net := normed(), group), []
        silence = SimpleNamespace(report_interval=lambda *_: None, report_epoch=lambda *_: None)
        one.progress, one.save = silence, lambda wait=False: None  # type: ignore[assignment, method-assign]

        def validate(*_: Any) -> dict[str, Any]:
            found.extend([net[0].running_mean.numpy().copy(), net[0].running_var.numpy().copy()])
            return {}

        one.validate = validate  # type: ignore[method-assign]
        one.run_epoch(one.schedule.epochs[0], map(pixels.make, one.sampler.train_requests(one.schedule.epochs[0])))
        return found

    shuffle = order(0, 0, N * world)
    each = [moments(shuffle[begin : begin + N]) for begin in range(0, N * world, N)]
    mean = np.mean([0.1 * one for one, _ in each], 0)
    variance = np.mean([0.9 + 0.1 * one for _, one in each], 0)
    for found in in_group(world, work):
        np.testing.assert_allclose(found, [mean, variance], rtol=1e-12)
    assert world == 1 or np.abs(0.1 * each[0][0] - mean).max() > 1e-6


def test_the_running_statistics_move_by_a_tenth() -> None:
    """Momentum 0.9 in the paper's words (Goyal et al. 2017, section 5.1), 0.1 in torch's."""
    from train.models import registry
    from train.recipe.components import Model

    net = registry.build_model(Model(name="resnet10_tiny"), 3, 0)
    norms = [one for one in net.modules() if isinstance(one, nn.BatchNorm2d)]
    assert {(one.momentum, one.eps, one.track_running_stats) for one in norms} == {(0.1, 1e-5, True)} and norms
    with torch.no_grad():
        x = torch.randn(4, norms[0].num_features, 3, 3)
        norms[0](x)
    np.testing.assert_allclose(norms[0].running_mean.numpy(), 0.1 * x.mean((0, 2, 3)).numpy(), rtol=1e-5, atol=1e-7)
