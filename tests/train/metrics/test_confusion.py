"""The confusion matrix of a validation: accuracy by class, the most frequent errors, and damaged files."""

import numpy as np
import pytest

from train.metrics.confusion import MAX_PAIRS, Confusion
from train.tools.records import DamagedRecord, decode, encode

COUNTS = np.array([[8, 2, 0, 0], [1, 5, 0, 4], [0, 0, 0, 0], [0, 0, 1, 9]])


def test_from_counts_keeps_every_error() -> None:
    confusion = Confusion.from_counts(("cat", "dog", "fox", "wolf"), COUNTS)
    assert (confusion.images, confusion.right) == ((10, 10, 0, 10), (8, 5, 0, 9))
    assert confusion.pairs == ((1, 3, 4), (0, 1, 2), (1, 0, 1), (3, 2, 1))
    matrix = np.diag(confusion.right)
    for true, predicted, images in confusion.pairs:
        matrix[true, predicted] = images
    assert (matrix == COUNTS).all() and decode(Confusion, encode(confusion)) == confusion


def test_worst_classes_and_most_confused() -> None:
    confusion = Confusion.from_counts(("cat", "dog", "fox", "wolf"), COUNTS)
    assert [(row.name, row.top1) for row in confusion.worst_classes(5)] == [
        ("dog", 50.0),
        ("cat", 80.0),
        ("wolf", 90.0),
    ]
    (worst,) = confusion.most_confused(1)
    assert (worst.true, worst.predicted, worst.images, worst.share) == ("dog", "wolf", 4, 40.0)
    assert confusion.confused_labels(2) == [1, 3, 0]
    perfect = Confusion.from_counts(("a", "b"), np.diag([3, 4]))
    assert perfect.most_confused(3) == [] and [row.top1 for row in perfect.by_class()] == [100.0, 100.0]


@pytest.mark.parametrize("changes", [
    {"images": [1]},
    {"right": []},
    {"pairs": [[0, 9, 1]]},
    {"pairs": [[-1, 0, 1]]},
    {"pairs": [[0, 1]]},
    {"classes": ["a" * 1001, "b"]},
])  # fmt: skip
def test_damaged_confusion_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DamagedRecord):
        decode(Confusion, {**encode(Confusion.from_counts(("a", "b"), np.diag([3, 4]))), **changes})


def test_from_counts_is_bounded() -> None:
    side = 200
    confusion = Confusion.from_counts([str(number) for number in range(side)], np.ones((side, side), dtype=np.int64))
    assert len(confusion.pairs) == MAX_PAIRS < side * (side - 1)
