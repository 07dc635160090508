"""Candidates for a launch: the recipe on several machine types and counts, each with its forecast and price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cluster.backends.machine_types import MachineType, find_machine_type
from cluster.errors import BadInput
from train.forecast import Constants, Forecast, forecast, scaling_efficiency
from train.recipe.schema import Recipe
from train.tools.records import encode

from .plan import Plan


@dataclass(frozen=True)
class Candidate:
    """A machine type and a number of machines, with the plan of a launch on them and its forecast."""

    machine_type: MachineType
    plan: Plan
    forecast: Forecast | None  # None: no constants are known for this model on this GPU
    # Images per second and machine, relative to those of the smallest candidate of the same type.
    scaling_efficiency: float | None = None

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.plan.spec.machines

    @property
    def epochs_to_target(self) -> int | None:
        """After how many epochs the recipe's source reached its target.

        None if the source does not say, or if fewer epochs are planned.
        """
        target_epoch = self.plan.spec.recipe.source_target_epoch
        return target_epoch if target_epoch and target_epoch <= len(self.plan.recipe_schedule.epochs) else None

    @property
    def minutes(self) -> float | None:
        """Minutes of the whole run, from renting to the end."""
        return self.forecast.total_minutes if self.forecast else None

    @property
    def minutes_to_target(self) -> float | None:
        """Minutes from renting to the target; of the whole run if `epochs_to_target` is unknown."""
        return self.forecast.seconds_until(self.epochs_to_target) / 60 if self.forecast else None

    def dollars(self, minutes: float | None) -> float | None:
        """Return the on-demand cost of all machines for `minutes`; None if the price or the time is unknown."""
        price = self.machine_type.on_demand_price
        return None if price is None or minutes is None else self.machines * price * minutes / 60

    def to_json(self) -> dict[str, object]:
        """Return the candidate as plain data. The spot price is null: it is unknown until the machines are rented."""
        forecast_data = None
        if self.forecast:
            forecast_data = {
                **encode(self.forecast.to_record()),
                "dollars": {"on_demand": self.dollars(self.minutes), "spot": None},
                "target": {
                    "epochs": self.epochs_to_target,
                    "minutes": self.minutes_to_target,
                    "dollars": self.dollars(self.minutes_to_target),
                },
                "efficiency": self.scaling_efficiency,
            }
        return {
            "type": self.machine_type.name,
            "gone": self.machine_type.retired_reason,
            "forecast": forecast_data,
        }


def get_machine_type(name: str) -> MachineType:
    """Return a machine type by name. Raises `BadInput` when the built-in table does not have it."""
    machine_type = find_machine_type(name)
    if machine_type is None:
        raise BadInput(f"--type {name}: unknown machine type; to list all: imgnet-cluster offers")
    return machine_type


def first_rentable_type(type_names: Sequence[str]) -> MachineType | None:
    """Return the first of these types that is in the built-in table and not retired; None when there is none."""
    machine_types = (find_machine_type(name) for name in type_names)
    return next(
        (machine_type for machine_type in machine_types if machine_type and not machine_type.retired_reason), None
    )


def truncate_recipe(recipe: Recipe, machines: int, epochs: int | None) -> Recipe:
    """Return the recipe for `machines` with its first `epochs` only. Raises `BadInput` when it has fewer."""
    if epochs is None:
        return recipe
    sized_recipe = recipe.for_machines(machines)
    if epochs > sized_recipe.epochs:
        raise BadInput(f"--epochs {epochs}: {recipe.name} has {sized_recipe.epochs} epochs on {machines} machines")
    phases = [phase.first_epochs(epochs - phase.epochs[0]) for phase in sized_recipe.phases if phase.epochs[0] < epochs]
    return replace(sized_recipe, tables={}, phases=phases)


def make_candidates(
    make_plan: Callable[[int, int], Plan],
    machine_types: Sequence[MachineType],
    machine_counts: Sequence[int],
    constants: Constants,
) -> list[Candidate]:
    """Return a candidate for each machine type and count. `make_plan` takes the machines and the processes of each."""
    candidates = []
    for machine_type in machine_types:
        plans = [make_plan(count, machine_type.gpus) for count in machine_counts]
        of_type = [Candidate(machine_type, plan, _forecast_plan(plan, machine_type, constants)) for plan in plans]
        forecasts = [(candidate.machines, candidate.forecast) for candidate in of_type if candidate.forecast]
        efficiencies = iter(scaling_efficiency(forecasts))
        candidates += [
            replace(candidate, scaling_efficiency=next(efficiencies)) if candidate.forecast else candidate
            for candidate in of_type
        ]
    return candidates


def _forecast_plan(plan: Plan, machine_type: MachineType, constants: Constants) -> Forecast | None:
    return forecast(
        plan.recipe_schedule,
        gpus=plan.spec.procs,
        gpu=machine_type.gpu,
        gbit=machine_type.network_gbps,
        machines=plan.spec.machines,
        vcpus=machine_type.vcpus,
        constants=constants,
        val_images=plan.val_images,
    )


def group_by_type(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the candidates by the name of their machine type. Those of one type must be adjacent."""
    groups = groupby(candidates, key=lambda candidate: candidate.machine_type.name)
    return {name: list(group) for name, group in groups}
