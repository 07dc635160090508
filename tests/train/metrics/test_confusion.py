"""The confusion matrix of a validation: accuracy by class, the most frequent errors, and damaged files."""

import numpy as np
import pytest

from train.metrics.confusion import MAX_PAIRS, ConfusedPair, Confusion
from train.tools.records import DamagedRecord, decode, encode

COUNTS = np.array([[8, 2, 0, 0], [1, 5, 0, 4], [0, 0, 0, 0], [0, 0, 1, 9]])


def test_from_counts_keeps_every_error_and_names_the_worst() -> None:
    confusion = Confusion.from_counts(("cat", "dog", "fox", "wolf"), COUNTS)
    pairs = ((1, 3, 4), (0, 1, 2), (1, 0, 1), (3, 2, 1))
    expected = Confusion(classes=("cat", "dog", "fox", "wolf"), images=(10, 10, 0, 10), right=(8, 5, 0, 9), pairs=pairs)
    assert confusion == expected == decode(Confusion, encode(confusion))
    worst_classes = [(row.name, row.top1) for row in confusion.worst_classes(5)]
    assert worst_classes == [("dog", 50.0), ("cat", 80.0), ("wolf", 90.0)]
    assert confusion.most_confused(1) == [ConfusedPair(true="dog", predicted="wolf", images=4, share=40.0)]
    assert confusion.confused_labels(2) == [1, 3, 0]


@pytest.mark.parametrize("changes", [
    {"images": [1]}, {"right": []}, {"pairs": [[0, 9, 1]]}, {"pairs": [[-1, 0, 1]]}, {"pairs": [[0, 1]]},
    {"classes": ["a" * 1001, "b"]},
])  # fmt: skip
def test_damaged_confusion_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DamagedRecord):
        decode(Confusion, {**encode(Confusion.from_counts(("a", "b"), np.diag([3, 4]))), **changes})


def test_from_counts_is_bounded() -> None:
    side = 200
    confusion = Confusion.from_counts([str(number) for number in range(side)], np.ones((side, side), dtype=np.int64))
    assert len(confusion.pairs) == MAX_PAIRS < side * (side - 1)
