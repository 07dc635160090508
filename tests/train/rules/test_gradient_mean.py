"""What one step averages over: all kn images (Goyal et al. 2017, remark 3), however they are split; and what it does
not scale (remark 1). The trainer itself against numpy, in float64, in one, two and three real processes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import Array, Pixels, carry_out, gradient, linear, order, recipe, row, trainer, values

from train.distributed.process_group import ProcessGroup

M, DECAY, RATE = 0.9, 0.02, 0.05


def by_hand(pixels: Pixels, batch: int, epochs: int = 1, rate: float = RATE) -> list[Array]:
    """w <- w - rate (m u + mean over the step's images + decay w): one process, one batch, no chunk anywhere."""
    w = values(linear())
    u = [np.zeros_like(part) for part in w]
    for epoch in range(epochs):
        shuffle = order(0, epoch, pixels.train)
        for begin in range(0, pixels.train, batch):
            ids = shuffle[begin : begin + batch]
            g = gradient(*w, pixels.numbers(ids), pixels.labels[ids])
            u = [M * before + part + DECAY * own for before, part, own in zip(u, g, w, strict=True)]
            w = [own - rate * move for own, move in zip(w, u, strict=True)]
    return w


def run(pixels: Pixels, gpus: int, n: int, folder: Path, world: int, in_group: Any, epochs: int = 1) -> list[Any]:
    """The parameters of each process after a run on `gpus` GPUs of n images, carried out by `world` processes."""
    what = recipe(row((0, epochs), n, RATE), gpus=gpus, momentum=M, weight_decay=DECAY)

    def work(group: ProcessGroup) -> list[Array]:
        one = trainer(folder, what, pixels, net := linear(), group)
        for _ in carry_out(one, pixels):
            pass
        return values(net)

    return list(in_group(world, work))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("gpus", "n", "images", "rest"),
    [
        (3, 8, 48, "none"),
        (3, 8, 50, "2 images: one chunk, so that two of three processes have none"),
        (3, 8, 49, "1 image, which is taken twice with half a share"),
        (3, 8, 59, "11 images: chunks of 5 and 6"),
        (2, 5, 27, "7 images in chunks of 3 and 4"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_the_gradient_is_the_mean_over_all_kn_images_of_the_step(
    gpus: int, n: int, images: int, rest: str, world: int, tmp_path: Path, in_group: Any
) -> None:
    """g = 1/(kn) sum over k workers and n images (remark 3): not the mean of the workers' own means."""
    pixels = Pixels(images)
    expected = by_hand(pixels, gpus * n)
    for found in run(pixels, gpus, n, tmp_path, world, in_group):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-14)


def test_a_mean_of_uneven_workers_means_would_be_another_gradient() -> None:
    """Else the test above would say little."""
    pixels, (weight, bias) = Pixels(11), values(linear())
    parts = [gradient(weight, bias, pixels.numbers(ids), pixels.labels[ids])[0] for ids in (range(5), range(5, 11))]
    whole = gradient(weight, bias, pixels.numbers(range(11)), pixels.labels)[0]
    np.testing.assert_allclose((5 * parts[0] + 6 * parts[1]) / 11, whole, rtol=1e-12)
    assert np.abs((parts[0] + parts[1]) / 2 - whole).max() > 1e-3


@pytest.mark.parametrize(("gpus", "n"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_accumulated_small_batches_are_one_large_batch(gpus: int, n: int, tmp_path: Path) -> None:
    """One process, k backward passes of n images: the step of kn (batch norm aside; Goyal et al. 2017, figure 3)."""
    pixels = Pixels(50)
    what = recipe(row((0, 2), n, RATE), gpus=gpus, momentum=M, weight_decay=DECAY)
    one = trainer(tmp_path, what, pixels, net := linear())
    for _ in carry_out(one, pixels):
        pass
    for mine, theirs in zip(values(net), by_hand(pixels, 16, 2), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("k", [2, 8])
def test_k_workers_scale_the_rate_and_with_it_the_decay_but_not_the_loss(k: int, tmp_path: Path) -> None:
    """w - k rate (g + decay w), which is not w - rate (k g + decay w): remark 1."""
    pixels = Pixels(8 * k)
    what = recipe(row((0, 1), 8, RATE), gpus=1, momentum=M, weight_decay=DECAY)
    w = values(linear())
    g = gradient(*w, pixels.numbers(range(8 * k)), pixels.labels)
    one = trainer(tmp_path, what, pixels, net := linear(), gpus=k)
    assert len(list(carry_out(one, pixels))) == 1
    for mine, own, part in zip(values(net), w, g, strict=True):
        np.testing.assert_allclose(mine, own - k * RATE * (part + DECAY * own), rtol=1e-11, atol=1e-14)
        assert np.abs(mine - (own - RATE * (k * part + DECAY * own))).max() > 1e-5


def test_a_loss_that_is_scaled_for_half_precision_moves_the_weights_as_if_it_were_not(tmp_path: Path) -> None:
    """The scale is taken out before the decay is added (remark 1; imagenet18, 2018, scaled by 1024)."""
    pixels = Pixels(24)
    what = recipe(row((0, 1), 8, RATE), momentum=M, weight_decay=DECAY)
    one = trainer(tmp_path, what, pixels, net := linear())
    one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in carry_out(one, pixels):
        pass
    assert one.scaler.get_scale() == 1024
    for mine, theirs in zip(values(net), by_hand(pixels, 8), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-14)
