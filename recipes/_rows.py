"""Rows that several papers share: a rate that is held, and cut to a tenth at some epochs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from train.recipe import Phase


def step_decay_phases(
    first_lr: float, first_epoch: int, drop_epochs: Sequence[int], last_epoch: int, **common_fields: Any
) -> list[Phase]:
    """Return phases from epoch `start` to `end` at a rate that is a tenth of the one before from each of the epochs
    `at` on; `same` is what all of them have.
    """
    edges = [first_epoch, *drop_epochs, last_epoch]
    pairs = enumerate(pairwise(edges))
    return [Phase(epochs=pair, lr=first_lr / 10**number, **common_fields) for number, pair in pairs]
