"""Which epochs are validated: a pure rule over the schedule and the epochs that are done, the same on all processes.

    each    after every epoch
    last    after the last one of the phase
    near    once the target is near: when the top-5 of an earlier epoch, of a validation or in training, has come
            within 3 points of it. Training sees harder crops, so this is rather late than early; once near, the rest of
            such phases is validated, whatever later epochs say.
    never   not at all

The run's last epoch is always validated: a run without a result is none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .schedule import Schedule

NEAR_TARGET_POINTS = 3.0  # points of top-5


def should_validate(schedule: Schedule, epoch_index: int, history: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the epoch at this place is validated; None when that depends on epochs that `history` does not have yet.

    `history` are the rows of the epochs that are done: "top5" is None where one was not validated, and "train_top5".
    """
    epochs = schedule.epochs
    if epoch_index == len(epochs) - 1:
        return True
    match epochs[epoch_index].scheduled_phase.phase.validate:
        case "each":
            return True
        case "never":
            return False
        case "last":
            return epochs[epoch_index + 1].scheduled_phase is not epochs[epoch_index].scheduled_phase
    if is_near_target(schedule.recipe.target, history[:epoch_index]):
        return True
    return False if len(history) >= epoch_index else None


def is_near_target(target: float | None, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any epoch's top-5 in percent, validated or in training, was within `NEAR` points of the target."""
    known = [row[name] for row in history for name in ("top5", "train_top5") if row[name] is not None]
    return target is not None and max(known, default=0.0) >= target - NEAR_TARGET_POINTS
