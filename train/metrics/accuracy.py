"""Top-1 and top-5 accuracy from scores, and the result of one validation."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accuracy:
    """The result of a validation over `images` images: mean loss, and top-1 and top-5 in percent."""

    loss: float
    top1: float
    top5: float
    images: int


def count_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many labels [n] are the highest, and among the five highest, of scores [n, classes]: int64 scalars."""
    top1, top5 = is_correct(scores, labels)
    return top1.sum(), top5.sum()


def is_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each label [n] whether it is the highest, and among the five highest, of its scores [n, classes].

    Both results are bool [n]. With fewer than five classes every label is among the five highest.
    """
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
    return best[:, 0], best.any(1)
