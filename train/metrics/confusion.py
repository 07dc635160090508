"""Which classes a validation took for which: images and right answers by class, and every kind of error with its count.

Imports no torch: the report and the command line read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

MAX_CLASSES = 4096  # the counts of 4096 classes take 134 MB on each GPU; a set with more classes is not counted
MAX_PAIRS = 20_000  # kept kinds of errors, the most frequent
MAX_NAME_CHARACTERS = 1000  # of a class; a folder has at most 255
PICTURED_PAIRS = 6  # the most frequent errors, whose classes the report shows with an image


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """The validation images of a class, and how many of them the network recognized; `top1` is in percent."""

    name: str
    images: int
    right: int

    @property
    def top1(self) -> float:
        """Accuracy in percent, 0 for a class without images."""
        return 100 * self.right / self.images if self.images else 0.0


@dataclass(frozen=True, kw_only=True)
class ConfusedPair:
    """How many images of the class `true` the network took for the class `predicted`; `share` is in percent of them."""

    true: str
    predicted: str
    images: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """The confusion matrix of a validation, without its zeros.

    `images` and `right` count by class, in the order of `classes`. Each of `pairs` is a kind of error: (true class,
    predicted class, images), by their numbers; the most frequent comes first.
    """

    classes: tuple[str, ...]
    images: tuple[int, ...]
    right: tuple[int, ...]
    pairs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        count = len(self.classes)
        is_in_range = all(0 <= true < count and 0 <= predicted < count for true, predicted, _ in self.pairs)
        if not len(self.images) == len(self.right) == count or not is_in_range:
            raise ValueError("the confusion matrix does not have one row and one column for each class")
        if count > MAX_CLASSES or max(map(len, self.classes), default=0) > MAX_NAME_CHARACTERS:
            raise ValueError(f"the confusion matrix has more than {MAX_CLASSES} classes, or very long names")

    @classmethod
    def from_counts(cls, classes: Sequence[str], counts: NDArray[np.int64]) -> Self:
        """Return it from a matrix of counts: a row for each true class, a column for each predicted class."""
        errors = counts.copy()
        np.fill_diagonal(errors, 0)
        true, predicted = np.nonzero(errors)
        order = np.argsort(-errors[true, predicted], kind="stable")[:MAX_PAIRS]
        columns = (true[order].tolist(), predicted[order].tolist(), errors[true, predicted][order].tolist())
        return cls(
            classes=tuple(classes),
            images=tuple(counts.sum(1).tolist()),
            right=tuple(np.diagonal(counts).tolist()),
            pairs=tuple(zip(*columns, strict=True)),
        )

    def worst_classes(self, count: int) -> list[ClassAccuracy]:
        """Return the classes of the lowest accuracy, the worst first. Classes without images do not count."""
        columns = zip(self.classes, self.images, self.right, strict=True)
        rows = [ClassAccuracy(name=name, images=images, right=right) for name, images, right in columns if images]
        return sorted(rows, key=lambda row: row.top1)[:count]

    def most_confused(self, count: int) -> list[ConfusedPair]:
        """Return the most frequent errors, the most frequent first."""
        names, pairs = self.classes, []
        for true, predicted, images in self.pairs[:count]:
            share = 100 * images / (self.images[true] or 1)
            pairs.append(ConfusedPair(true=names[true], predicted=names[predicted], images=images, share=share))
        return pairs

    def confused_labels(self, count: int) -> list[int]:
        """Return the numbers of the classes in the most frequent errors, each once."""
        return list(dict.fromkeys(label for *labels, _ in self.pairs[:count] for label in labels))
