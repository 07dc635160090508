"""What a launch would do, worked out without starting anything."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.state.spec import Spec
from train.recipe.schedule import Schedule, scaled

if TYPE_CHECKING:
    from cluster.backends.aws.plan import Renting


@dataclass(frozen=True)
class Plan:
    """What a launch would do: the Spec but for its name, the schedule, and the lines that a person should read."""

    spec: Spec
    schedule: Schedule
    notes: tuple[str, ...]
    renting: "Renting | None" = None  # what it would rent

    @property
    def val(self) -> int:
        """How many images are validated."""
        return scaled(self.spec.recipe.data.val, self.spec.scale)
