"""What a recipe would take and cost on several types and numbers of machines; which to take; what a run says of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cluster.backends import machine_types
from cluster.backends.machine_types import MachineType
from cluster.errors import BadInput
from train.forecast import Constants, Forecast, forecast, scaling_efficiency
from train.recipe.schema import Recipe

from .plan import Plan


@dataclass(frozen=True)
class Candidate:
    """A number of machines of one type: what a launch would plan there, and its forecast, None: nobody knows.

    `share` is what a machine trains in a second beside one of the first row of its type.
    """

    machine_type: MachineType
    plan: Plan
    forecast: Forecast | None
    scaling_efficiency: float | None = None

    @property
    def machines(self) -> int:
        """How many."""
        return self.plan.spec.machines

    @property
    def epochs_to_target(self) -> int | None:
        """After how many epochs the recipe's source had met its target, None: it does not say, or fewer are planned."""
        reached = self.plan.spec.recipe.source_target_epoch
        return reached if reached and reached <= len(self.plan.schedule.epochs) else None

    @property
    def minutes(self) -> float | None:
        """Of the whole run, from renting to the end."""
        return self.forecast.total_minutes if self.forecast else None

    @property
    def minutes_to_target(self) -> float | None:
        """Minutes until the target; of the whole run where that is not known."""
        return self.forecast.seconds_until(self.epochs_to_target) / 60 if self.forecast else None

    def dollars(self, minutes: float | None) -> float | None:
        """What so many minutes cost on demand, None: the price is not known."""
        price = self.machine_type.on_demand_price
        return None if price is None or minutes is None else self.machines * price * minutes / 60

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data. The price of spot machines is nobody's to know beforehand."""
        told = self.forecast and {
            **self.forecast.to_json(),
            "dollars": {"on_demand": self.dollars(self.minutes), "spot": None},
            "target": {
                "epochs": self.epochs_to_target, "minutes": self.minutes_to_target, "dollars": self.dollars(self.minutes_to_target),
            },
            "efficiency": self.scaling_efficiency,
        }  # fmt: skip
        return {"type": self.machine_type.name, "gone": self.machine_type.retired_reason, "forecast": told}


def get_machine_type(name: str) -> MachineType:
    """Return a type of machine. Raises `BadInput` when nothing is known of it."""
    found = machine_types.find_machine_type(name)
    if found is None:
        raise BadInput(f"--type {name}: is not in the shipped table; what there is: imgnet-cluster offers")
    return found


def first_rentable_type(type_names: Sequence[str]) -> MachineType | None:
    """Return the first type of a recipe that can be rented, as far as is known here."""
    found = (machine_types.find_machine_type(name) for name in type_names)
    return next((one for one in found if one and not one.retired_reason), None)


def truncate_recipe(recipe: Recipe, machines: int, epochs: int | None) -> Recipe:
    """Return the first epochs of the recipe's table for so many machines. Raises `BadInput` when it has fewer."""
    if epochs is None:
        return recipe
    whole = recipe.for_machines(machines)
    if epochs > whole.epochs:
        raise BadInput(f"--epochs {epochs}: {recipe.name} has {whole.epochs} on {machines} machines")
    some = [one for one in whole.phases if one.epochs[0] < epochs]
    phases = [replace(one, epochs=(one.epochs[0], min(one.epochs[1], epochs))) for one in some]
    return replace(whole, tables={}, phases=phases)


def make_candidates(
    make_plan: Callable[[int, int], Plan],
    machine_types: Sequence[MachineType],
    machine_counts: Sequence[int],
    constants: Constants,
) -> list[Candidate]:
    """Return a row for each type and number of machines; `make` plans for (machines, processes of each)."""
    found = []
    for kind in machine_types:
        mine = [
            Candidate(kind, plan, _forecast_plan(plan, kind, constants))
            for plan in (make_plan(one, kind.gpus) for one in machine_counts)
        ]
        told = [(one.machines, one.forecast) for one in mine if one.forecast]
        shares = iter(scaling_efficiency(told))
        found += [replace(one, scaling_efficiency=next(shares)) if one.forecast else one for one in mine]
    return found


def _forecast_plan(plan: Plan, machine_type: MachineType, constants: Constants) -> Forecast | None:
    spec = plan.spec
    return forecast(
        plan.schedule, gpus=spec.procs, gpu=machine_type.gpu, gbit=machine_type.network_gbps, machines=spec.machines, vcpus=machine_type.vcpus,
        constants=constants, val_images=plan.val_images,
    )  # fmt: skip


# --- which to take --------------------------------------------------------------------------------------------------


def group_by_type(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the rows of each type."""
    return {name: list(some) for name, some in groupby(candidates, key=lambda one: one.machine_type.name)}


# --- constants, and what a run says of them -------------------------------------------------------------------------
