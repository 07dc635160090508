"""Candidates for a launch: the recipe on several machine types and counts, with forecasts and prices."""

from dataclasses import dataclass

from cluster.backends.aws.shipped_tables import MachineType, find_machine_type
from cluster.backends.planner import Plan
from cluster.connectors.local import visible_gpus
from cluster.errors import BadInput
from train.forecast import Constants, Forecast, forecast
from train.recipe.schema import Recipe
from train.tools.records import encode

from .calibration import CPU_CARD


@dataclass(frozen=True)
class Candidate:
    """A machine type and a number of machines, with the plan of a launch on them and its forecast."""

    machine_type: MachineType
    plan: Plan
    forecast: Forecast | None  # None: no constants are known for this model on this GPU

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.plan.spec.machines

    @property
    def dollars(self) -> float | None:
        """The on-demand cost of all machines for the whole run; None if the price or the time is unknown."""
        price = self.machine_type.on_demand_price
        return None if price is None or self.forecast is None else self.machines * price * self.forecast.minutes / 60

    def to_json(self) -> dict[str, object]:
        """Return the candidate as plain data: its schedule, forecast and price."""
        schedule = self.plan.recipe_schedule
        return {
            "recipe": schedule.recipe.name,
            "machines": self.machines,
            "gpus": schedule.gpus,
            "images": schedule.images,
            "phases": encode(schedule.table()),
            "steps": schedule.steps,
            "notes": list(self.plan.notes),
            "type": self.machine_type.name,
            "gone": self.machine_type.retired_reason,
            "forecast": encode(self.forecast),
            "dollars": self.dollars,
        }


def get_machine_type(name: str) -> MachineType:
    """Return a machine type by name. Raises `BadInput` when the built-in table does not have it."""
    machine_type = find_machine_type(name)
    if machine_type is None:
        raise BadInput(f"--type {name}: unknown machine type; to list all: imgnet-cluster offers")
    return machine_type


def default_machine_type(recipe: Recipe) -> MachineType:
    """Return the first type of a recipe that can be rented, else machines of which nothing is known."""
    for machine_type in filter(None, map(find_machine_type, recipe.types)):
        if not machine_type.retired_reason:
            return machine_type
    return MachineType("any machine", recipe.gpus, gpu="", network_gbps=0.0, vcpus=None, on_demand_price=None)


def this_computer() -> MachineType:
    """Return this computer as a machine type: its GPUs, whose model is not asked, else its processors."""
    gpus = len(visible_gpus())
    return MachineType("this computer", max(1, gpus), "" if gpus else CPU_CARD, 0.0, None, on_demand_price=0.0)


def make_candidate(plan: Plan, machine_type: MachineType, constants: Constants) -> Candidate:
    """Return a plan on machines of a type as a candidate, with its forecast."""
    run_forecast = forecast(
        plan.recipe_schedule,
        gpus=plan.spec.procs,
        gpu=machine_type.gpu,
        gbit=machine_type.network_gbps,
        machines=plan.spec.machines,
        vcpus=machine_type.vcpus,
        constants=constants,
        val_images=plan.val_images,
    )
    return Candidate(machine_type, plan, run_forecast)
