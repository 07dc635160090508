"""Mixed images: mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019), as torchvision computes them."""

from collections.abc import Callable

import numpy as np
import torch

from train.recipe.components import Optim

from .losses import LossFunction


class Mixer:
    """Mixes each image of a chunk with the one before it, and their losses in the same shares.

    All images of a chunk have one method and one share, which depend on the chunk's key only: (seed, step, chunk). So
    a resumed run, and one on another number of processes, mixes the same.
    """

    def __init__(self, optim: Optim) -> None:
        methods: list[tuple[float, Callable[[torch.Tensor, float, np.random.Generator], float]]]
        methods = [(optim.mixup, mix_up), (optim.cutmix, cut_and_mix)]
        self.methods = [(alpha, mix) for alpha, mix in methods if alpha]  # with both, each chunk takes one of them
        self.share = 1.0  # of each image itself; the rest is the other image's

    def mix(self, images: torch.Tensor, key: tuple[int, int, int]) -> None:
        """Mix the images [n, 3, height, width] of the chunk with this key in place, if the recipe says so."""
        if self.methods:
            generator = np.random.default_rng(key)
            alpha, mix = self.methods[generator.integers(len(self.methods))]
            self.share = mix(images, generator.beta(alpha, alpha), generator)

    def losses(self, loss: LossFunction, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses [n] of the chunk that was mixed last."""
        own = loss(scores, labels)
        return own if self.share == 1 else self.share * own + (1 - self.share) * loss(scores, others(labels))


def others(values: torch.Tensor) -> torch.Tensor:
    """Return for each image the value of the one before it; for the first that of the last."""
    return torch.cat([values[-1:], values[:-1]])  # torch.roll would lose the order of channels in memory on a GPU


def mix_up(images: torch.Tensor, share: float, generator: np.random.Generator) -> float:
    """Add images in place, `share` of each to the rest of the other. Returns the share."""
    images.copy_(others(images).mul_(1 - share).add_(images * share))
    return share


def cut_and_mix(images: torch.Tensor, share: float, generator: np.random.Generator) -> float:
    """Put a rectangle of 1 - `share` of the other image, cut at edges, into each, in place. Returns the share left."""
    height, width = images.shape[2:]
    x, y = int(generator.integers(width)), int(generator.integers(height))
    half_side = 0.5 * (1 - share) ** 0.5
    half_width, half_height = int(half_side * width), int(half_side * height)
    columns = slice(max(x - half_width, 0), min(x + half_width, width))
    rows = slice(max(y - half_height, 0), min(y + half_height, height))
    images[:, :, rows, columns] = others(images)[:, :, rows, columns]
    return 1 - (columns.stop - columns.start) * (rows.stop - rows.start) / (width * height)
