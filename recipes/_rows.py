"""Rows that several papers share: a rate that is held, and cut to a tenth at some epochs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from train.recipe import Phase


def drops(rate: float, start: int, at: Sequence[int], end: int, **same: Any) -> list[Phase]:
    """Return phases from epoch `start` to `end` at a rate that is a tenth of the one before from each of the epochs
    `at` on; `same` is what all of them have.
    """
    edges = [start, *at, end]
    pairs = enumerate(pairwise(edges))
    return [Phase(epochs=pair, lr=rate / 10**number, **same) for number, pair in pairs]
