"""What a backend decides when a launch is planned: how many machines, which data folder, what it costs."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cluster.errors import BadInput
from cluster.machines import requirements, user_project
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec, UserProject, Workload
from train.forecast import MODEL_COSTS, Constants
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe

from .backend_options import BackendOptions
from .rentals import RentalPlan

NUMBER_BYTES = 4  # of a parameter in a checkpoint
OPTIMIZER_NUMBERS = {"sgd": 1, "lars": 1, "lamb": 2, "adamw": 2}  # that an optimizer keeps for each parameter
RENTED_DATA_FOLDER = "~/.imgnet/data"  # on the instance's fast disk if it has one (its boot script)


class SourceAccess(StrEnum):
    """Whether this computer reads the source of a data set that the machines fetch."""

    REQUIRED = "required"  # a source that cannot be read is an error
    OPTIONAL = "optional"  # the machines may have access that this computer does not have
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A job that the user resumes: its run, the steps that it has done, and the dollars that it has cost.

    `constants` are those that the job has measured, None before its first epoch. They hold for machines of
    `rented_type`, "" when the job rented several types or none.
    """

    run: Run
    steps_done: int
    spent_dollars: float
    constants: Constants | None = None
    rented_type: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineRequest:
    """What the user asks for: a recipe or a command, options, numbers of machines (None: the default) and spares."""

    workload: Workload
    options: BackendOptions
    machines: int | None = None
    spares: int = 0
    is_offline: bool = False  # ask nobody: facts come from tables that ship with the program
    resumed: ResumedRun | None = None  # None: the launch of a new job


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one launch: everything that is decided before anything starts."""

    spec: JobSpec  # complete except for the job's name
    schedule: Schedule | None  # None: a command has none
    notes: tuple[str, ...] = ()  # lines for the user
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


class MachinePlanner:
    """Plans the machines of one launch. This base class plans for machines of which nothing is known."""

    default_max_hours: float | None = None
    default_fetch_folder: str | None = RENTED_DATA_FOLDER  # None: the user has to name it
    is_this_computer = False  # paths of the data are paths of this computer
    default_access = SourceAccess.NONE  # to the source of a data set that the machines fetch

    def __init__(self, request: MachineRequest) -> None:
        self.request = request

    @property
    def machine_count(self) -> int | None:
        """The number of machines, None for the recipe's number."""
        return self.request.machines

    def default_procs(self, machines: int) -> int:
        """Return the number of training processes of each machine when the user names none."""
        return self.request.workload.gpus

    def data_root(self, path: Path, is_synthetic: bool) -> Path:
        """Return the folder of the images on the machines. Raises `BadInput` for a path that they cannot have."""
        return path.expanduser().absolute()

    def source_access(self, is_in_object_store: bool) -> SourceAccess:
        """Return whether this computer reads the source of a data set that the machines fetch."""
        return self.default_access

    def requirement_notes(self, recipe: Recipe, project: UserProject | None) -> list[str]:
        """Return notes on the libraries and modules that the recipe needs."""
        return requirements.missing_requirements(recipe, project)

    def command_notes(self, project: UserProject) -> list[str]:
        """Return notes on what of the user's project is copied for a command."""
        return list(filter(None, [user_project.describe_left_out(project)]))

    def complete(self, spec: JobSpec, schedule: Schedule | None) -> Plan:
        """Complete the plan: the specification, and what the backend adds to it, such as a price.

        Raises `ClusterError`.
        """
        return Plan(spec=spec, schedule=schedule)


class ElsewherePlanner(MachinePlanner):
    """Plans machines other than this computer, to which the user's project is sent."""

    def command_notes(self, project: UserProject) -> list[str]:
        """Return notes on the files of the project that are sent, and on those that are not."""
        return [user_project.describe_project(project), *super().command_notes(project)]

    def requirement_notes(self, recipe: Recipe, project: UserProject | None) -> list[str]:
        """Return notes on what of the user's project travels, and on what the recipe needs beside it."""
        notes = [user_project.describe_project(project)] if project else []
        return notes + requirements.requirements_not_sent(recipe, project)


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Return the bytes of a checkpoint: parameters and the optimizer's numbers. None: of other libraries."""
    model_cost = MODEL_COSTS.get(recipe.model.name)
    optimizer_numbers = OPTIMIZER_NUMBERS.get(recipe.optim.name)
    if model_cost is None or optimizer_numbers is None:
        return None
    return model_cost[1] * (1 + optimizer_numbers) * NUMBER_BYTES
