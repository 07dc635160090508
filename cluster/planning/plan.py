"""The plan of a launch: everything that is decided before anything starts."""

from dataclasses import dataclass

from cluster.backends.rentals import RentalPlan
from cluster.errors import BadInput
from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule, scaled_image_count


@dataclass(frozen=True)
class Plan:
    """The plan of one launch."""

    spec: JobSpec  # complete except for the job's name
    schedule: Schedule | None  # None: a command has none
    notes: tuple[str, ...]  # lines for the user
    rental_plan: RentalPlan | None = None  # None: nothing is rented
    obstacles: tuple[str, ...] = ()  # why the job would certainly fail on its machines
    missing_copies: tuple[int, ...] = ()  # sizes of resized copies that the recipe names and that do not exist

    def require_no_obstacle(self) -> None:
        """Raise `BadInput` when the job would certainly fail: nothing must be rented for it."""
        if self.obstacles:
            raise BadInput("; ".join(self.obstacles))

    @property
    def recipe_schedule(self) -> Schedule:
        """The schedule of a recipe. Raises `BadInput` for a command."""
        return self.schedule or self.spec.recipe_schedule

    @property
    def val_images(self) -> int:
        """The number of validation images."""
        return scaled_image_count(self.spec.recipe.data.val, self.spec.train.scale)
