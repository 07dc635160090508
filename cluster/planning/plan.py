"""The plan of a launch: everything that is decided before anything starts."""

from dataclasses import dataclass

from cluster.backends.rentals import RentalPlan
from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule, scaled_image_count


@dataclass(frozen=True)
class Plan:
    """What a launch would do."""

    spec: JobSpec  # complete except for the job's name
    schedule: Schedule
    notes: tuple[str, ...]  # lines for the user
    rental_plan: RentalPlan | None = None  # None: nothing is rented

    @property
    def val_images(self) -> int:
        """The number of validation images."""
        return scaled_image_count(self.spec.recipe.data.val, self.spec.train.scale)
