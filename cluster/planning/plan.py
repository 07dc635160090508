"""What a launch would do, worked out without starting anything."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule, scaled_image_count

if TYPE_CHECKING:
    from cluster.backends.aws.plan import RentalPlan


@dataclass(frozen=True)
class Plan:
    """What a launch would do: the Spec but for its name, the schedule, and the lines that a person should read."""

    spec: JobSpec
    schedule: Schedule
    notes: tuple[str, ...]
    rental_plan: "RentalPlan | None" = None  # what it would rent

    @property
    def val_images(self) -> int:
        """How many images are validated."""
        return scaled_image_count(self.spec.recipe.data.val, self.spec.scale)
