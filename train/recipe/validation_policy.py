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

NEAR = 3.0  # points of top-5


def validates(schedule: Schedule, place: int, history: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the epoch at this place is validated; None when that depends on epochs that `history` does not have yet.

    `history` are the rows of the epochs that are done: "top5" is None where one was not validated, and "train_top5".
    """
    epochs = schedule.epochs
    if place == len(epochs) - 1:
        return True
    match epochs[place].row.phase.validate:
        case "each":
            return True
        case "never":
            return False
        case "last":
            return epochs[place + 1].row is not epochs[place].row
    if is_near(schedule.recipe.target, history[:place]):
        return True
    return False if len(history) >= place else None


def is_near(target: float | None, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any epoch's top-5 in percent, validated or in training, was within `NEAR` points of the target."""
    known = [row[name] for row in history for name in ("top5", "train_top5") if row[name] is not None]
    return target is not None and max(known, default=0.0) >= target - NEAR
