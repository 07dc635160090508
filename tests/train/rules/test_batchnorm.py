"""Rules of batch norm.

A norm sees the n images of one worker, whatever the number k of workers is (Goyal et al. 2017, section 2.3). Its
running statistics make one update a step, by the mean over the chunks of all workers.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import (
    SIZE,
    Array,
    RandomImages,
    epoch_permutation,
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    random_image,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.data.loading.loader import Batch
from train.distributed.batchnorm import RunningStatistics
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


@pytest.mark.parametrize("world", [1, 2, 5])
def test_norm_sees_one_workers_images_and_its_statistics_move_once_a_step(
    world: int, tmp_path: Path, in_group: Any
) -> None:
    """Three steps of 4 chunks and one of two chunks that are not full, on any number of processes.

    Each forward pass has the n images of one chunk. The statistics move by the mean over the chunks of a step.
    """
    images = 3 * 4 * N + N + N // 2
    dataset = RandomImages(images)
    recipe = make_recipe(make_phase((0, 1), N, 0.01), gpus=4)

    def work(group: ProcessGroup) -> tuple[list[list[float]], list[Array], int]:
        net, seen, validated = net_with_norm(), list[list[float]](), list[Array]()
        net[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].mean((0, 2, 3)).tolist()))
        trainer = make_trainer(tmp_path, recipe, dataset, net, group)
        silent_progress = SimpleNamespace(report_interval=lambda *_: None, report_epoch=lambda *_: None)
        trainer.progress, trainer.save = silent_progress, lambda wait=False, is_best=False: None  # type: ignore[assignment, method-assign]

        def validate(epoch: Epoch, batches: Iterator[Batch]) -> dict[str, Accuracy]:
            validated.extend(net.get_buffer(f"0.running_{name}").numpy().copy() for name in ("mean", "var"))
            return {}

        trainer.validate = validate  # type: ignore[method-assign]
        epoch = trainer.schedule.epochs[0]
        trainer.run_epoch(epoch, map(dataset.decode_batch, trainer.sampler.train_requests(epoch)))
        return seen, validated, int(net.get_buffer("0.num_batches_tracked"))

    shuffle = epoch_permutation(0, 0, images)
    mean, variance, chunk_means = np.zeros(3), np.ones(3), []
    for step in range(4):
        ids = shuffle[step * 4 * N : (step + 1) * 4 * N]
        chunk_moments = [moments(chunk) for chunk in np.array_split(ids, -(-len(ids) // N))]
        chunk_means += [chunk_mean.tolist() for chunk_mean, _ in chunk_moments]
        mean = 0.9 * mean + 0.1 * np.mean([chunk_mean for chunk_mean, _ in chunk_moments], 0)
        variance = 0.9 * variance + 0.1 * np.mean([chunk_variance for _, chunk_variance in chunk_moments], 0)
    seen_means = set[tuple[float, ...]]()  # a rank without a chunk repeats one of another rank
    for seen, (actual_mean, actual_variance), steps in in_group(world, work):
        seen_means |= {tuple(np.round(chunk_mean, 12)) for chunk_mean in seen}
        np.testing.assert_allclose(actual_mean, mean, rtol=1e-12)
        np.testing.assert_allclose(actual_variance, variance, rtol=1e-12)
        assert steps == 4
    np.testing.assert_allclose(sorted(seen_means), sorted(chunk_means), rtol=0, atol=1e-11)


@pytest.mark.parametrize("world", [1, 3])
def test_norms_keep_their_own_momentum_and_eval_mode(world: int, in_group: Any) -> None:
    """Momentum None is the mean over all steps; a norm in eval mode and one without statistics stay as they are."""
    chunks = torch.randn(2, 6, 5, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)  # two steps of 6

    def work(group: ProcessGroup) -> Any:
        slow, cumulative, frozen = nn.BatchNorm1d(3, momentum=0.01), nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3)
        net = nn.Sequential(slow, nn.BatchNorm1d(3, track_running_stats=False), cumulative, frozen).double()
        frozen.eval()
        statistics = RunningStatistics(group, net)
        for step in range(2):
            for chunk in range(group.rank, 6, group.world_size):
                net(chunks[step, chunk])
                statistics.add_chunk(counts=True)
            statistics.start_sum()
            statistics.end_step(6)
        statistics.write_to_norms()
        return [
            [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]  # type: ignore[union-attr, arg-type]
            for norm in (slow, cumulative, frozen)
        ]

    step_means = chunks.mean(2).mean(1).numpy()
    expected_mean = 0.99 * 0.01 * step_means[0] + 0.01 * step_means[1]
    for slow, cumulative, frozen in in_group(world, work):
        np.testing.assert_allclose(slow[0], expected_mean, rtol=1e-10)
        assert slow[2] == cumulative[2] == 2 and frozen == [[0.0] * 3, [1.0] * 3, 0]
        np.testing.assert_allclose(cumulative[0], 0.0, atol=1e-12)  # its inputs are normalized
        np.testing.assert_allclose(cumulative[1], 5 / 4, rtol=1e-3)  # unbiased, and the initial 1 does not count


def test_no_norm_counts_its_steps_on_the_gpu() -> None:
    """Each count would be a kernel of its own. The tensors of the GPU are fake ones."""
    gpu = torch.device("cuda", 0)
    with FakeTensorMode():
        net = nn.Sequential(nn.BatchNorm1d(3, device=gpu), nn.InstanceNorm1d(3, device=gpu))
        RunningStatistics(ProcessGroup(0, 0, 1, 1, gpu), net)
        devices = {name: tensor.device.type for name, tensor in net.state_dict().items()}
    assert devices.pop("0.num_batches_tracked") == "cpu", "and still part of the network"
    assert set(devices.values()) == {"cuda"}


def test_statistics_of_norms_that_are_not_torchs_are_averaged_before_validation(in_group: Any) -> None:
    class OtherNorm(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.register_buffer("running_scale", torch.tensor([rank, 1.0]))

    def work(group: ProcessGroup) -> Any:
        net = nn.Sequential(nn.BatchNorm1d(2), OtherNorm(group.rank))
        RunningStatistics(group, net).average_foreign_statistics()
        return net[1].running_scale.tolist()  # type: ignore[operator]

    assert in_group(3, work) == [[1.0, 1.0]] * 3
