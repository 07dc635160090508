"""Decide which epochs are validated. A pure function of the schedule and the epochs done, equal on all processes.

The values of `Phase.validate`:

    each    after every epoch
    last    after the last epoch of the phase
    near    once the target is near: the top-5 accuracy of an earlier epoch, in validation or in training, came within 3
            points of it. Training sees harder crops, so this comes rather late than early. From then on every epoch of
            such a phase is validated, whatever the accuracy of later epochs.
    never   not at all

The last epoch of the run is always validated: a run without a result would be worth nothing.
"""

from collections.abc import Sequence

from .history import EpochResult
from .schedule import Schedule

NEAR_TARGET_POINTS = 3.0  # percentage points of top-5 accuracy


def should_validate(schedule: Schedule, epoch_index: int, history: Sequence[EpochResult]) -> bool | None:
    """Return whether an epoch is validated, None when that depends on epochs that are not in `history` yet."""
    epochs = schedule.epochs
    if epoch_index == len(epochs) - 1:
        return True
    match epochs[epoch_index].scheduled_phase.phase.validate:
        case "each":
            return True
        case "never":
            return False
        case "last":
            return epochs[epoch_index + 1].scheduled_phase.phase is not epochs[epoch_index].scheduled_phase.phase
    target = schedule.recipe.target
    assert target is not None, "a recipe with this policy has a target"
    if any(max(epoch.top5 or 0.0, epoch.train_top5) >= target - NEAR_TARGET_POINTS for epoch in history[:epoch_index]):
        return True
    return False if len(history) >= epoch_index else None
