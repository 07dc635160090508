"""Phases that several recipes share: a constant learning rate that drops to a tenth at some epochs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from train.recipe import Phase


def step_decay_phases(
    first_lr: float,
    first_epoch: int,
    drop_epochs: Sequence[int],
    last_epoch: int,
    **common_fields: Any,  # Any: the fields of a phase
) -> list[Phase]:
    """Return the phases from `first_epoch` to `last_epoch`, end excluded.

    The rate starts at `first_lr` and is divided by 10 at each of `drop_epochs`. `common_fields` are fields of `Phase`
    that all phases have.
    """
    epoch_ranges = pairwise([first_epoch, *drop_epochs, last_epoch])
    return [Phase(epochs=epochs, lr=first_lr / 10**drops, **common_fields) for drops, epochs in enumerate(epoch_ranges)]
