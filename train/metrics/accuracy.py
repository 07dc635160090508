"""Top-1 and top-5 accuracy, counted as integers over all ranks."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accuracy:
    """Mean loss, and top-1 and top-5 in percent, of `images` images."""

    loss: float
    top1: float
    top5: float
    images: int


def count_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of [n, classes] scores have their label first, and among the first five, as int64 scalars."""
    first, five = is_correct(scores, labels)
    return first.sum(), five.sum()


def is_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of [n, classes] scores have their label first, and among the first five, as bool [n]."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    return best[:, 0], best.any(1)
