"""Top-1 and top-5 accuracy from scores, and the result of one validation."""

from dataclasses import dataclass

import torch

from .confusion import MAX_CLASSES

TOP_GUESSES = 5


@dataclass(frozen=True)
class Accuracy:
    """The result of a validation over `images` images: mean loss, and top-1 and top-5 in percent."""

    loss: float
    top1: float
    top5: float
    images: int


def has_top5(classes: int) -> bool:
    """Return whether a top-5 accuracy says anything: with at most five classes, all five guesses are right."""
    return classes > TOP_GUESSES


def top_guesses(scores: torch.Tensor) -> torch.Tensor:
    """Return the classes of the five highest of scores [n, classes], the highest first: int64 [n, 5 or classes]."""
    return scores.topk(min(TOP_GUESSES, scores.shape[1]), dim=1).indices


def count_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of top-1 and of top-5 hits, as int64 scalars, of scores [n, classes] for labels [n]."""
    top1, top5 = is_correct(scores, labels)
    return top1.sum(), top5.sum()


def is_correct(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bool [n]: which of the scores [n, classes] are top-1 and top-5 hits for the labels [n].

    With fewer than five classes, every label is a top-5 hit.
    """
    best = top_guesses(scores) == labels[:, None]
    return best[:, 0], best.any(1)


def zero_confusion(class_count: int, device: torch.device) -> torch.Tensor | None:
    """Return an int64 matrix [classes, classes] of zeros for `count_confusion`, None for too many classes."""
    return torch.zeros(2 * [class_count], dtype=torch.int64, device=device) if class_count <= MAX_CLASSES else None


def count_confusion(confusion: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> None:
    """Add images to a confusion matrix: their labels [n] are rows, the best of their scores [n, classes] columns."""
    confusion.index_put_((labels, top_guesses(scores)[:, 0]), torch.ones_like(labels), accumulate=True)
