"""Top-1 and top-5 accuracy, counted as integers over all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Mean loss, and top-1 and top-5 in percent, of `images` images."""

    loss: float
    top1: float
    top5: float
    images: int
