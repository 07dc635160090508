"""What a recipe would take and cost on several types and numbers of machines; which to take; what a run says of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cluster.backends import machine_types
from cluster.backends.machine_types import Shipped
from cluster.errors import BadInput
from train.forecast import Constants, Forecast, efficiency, forecast
from train.recipe.schema import Recipe

from .plan import Plan


@dataclass(frozen=True)
class Row:
    """A number of machines of one type: what a launch would plan there, and its forecast, None: nobody knows.

    `share` is what a machine trains in a second beside one of the first row of its type.
    """

    kind: Shipped
    plan: Plan
    forecast: Forecast | None
    share: float | None = None

    @property
    def machines(self) -> int:
        """How many."""
        return self.plan.spec.machines

    @property
    def epochs(self) -> int | None:
        """After how many epochs the recipe's source had met its target, None: it does not say, or fewer are planned."""
        reached = self.plan.spec.recipe.reached
        return reached if reached and reached <= len(self.plan.schedule.epochs) else None

    @property
    def minutes(self) -> float | None:
        """Of the whole run, from renting to the end."""
        return self.forecast.minutes if self.forecast else None

    @property
    def to_target(self) -> float | None:
        """Minutes until the target; of the whole run where that is not known."""
        return self.forecast.until(self.epochs) / 60 if self.forecast else None

    def dollars(self, minutes: float | None) -> float | None:
        """What so many minutes cost on demand, None: the price is not known."""
        price = self.kind.on_demand
        return None if price is None or minutes is None else self.machines * price * minutes / 60

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data. The price of spot machines is nobody's to know beforehand."""
        told = self.forecast and {
            **self.forecast.to_json(),
            "dollars": {"on_demand": self.dollars(self.minutes), "spot": None},
            "target": {
                "epochs": self.epochs, "minutes": self.to_target, "dollars": self.dollars(self.to_target),
            },
            "efficiency": self.share,
        }  # fmt: skip
        return {"type": self.kind.name, "gone": self.kind.gone, "forecast": told}


def known(name: str) -> Shipped:
    """Return a type of machine. Raises `BadInput` when nothing is known of it."""
    found = machine_types.shipped(name)
    if found is None:
        raise BadInput(f"--type {name}: is not in the shipped table; what there is: imgnet-cluster offers")
    return found


def first_known(types: Sequence[str]) -> Shipped | None:
    """Return the first type of a recipe that can be rented, as far as is known here."""
    found = (machine_types.shipped(name) for name in types)
    return next((one for one in found if one and not one.gone), None)


def cut(recipe: Recipe, machines: int, epochs: int | None) -> Recipe:
    """Return the first epochs of the recipe's table for so many machines. Raises `BadInput` when it has fewer."""
    if epochs is None:
        return recipe
    whole = recipe.at(machines)
    if epochs > whole.epochs:
        raise BadInput(f"--epochs {epochs}: {recipe.name} has {whole.epochs} on {machines} machines")
    some = [one for one in whole.phases if one.epochs[0] < epochs]
    phases = [replace(one, epochs=(one.epochs[0], min(one.epochs[1], epochs))) for one in some]
    return replace(whole, tables={}, phases=phases)


def rows(
    make: Callable[[int, int], Plan], kinds: Sequence[Shipped], counts: Sequence[int], constants: Constants
) -> list[Row]:
    """Return a row for each type and number of machines; `make` plans for (machines, processes of each)."""
    found = []
    for kind in kinds:
        mine = [Row(kind, plan, _forecast(plan, kind, constants)) for plan in (make(one, kind.gpus) for one in counts)]
        told = [(one.machines, one.forecast) for one in mine if one.forecast]
        shares = iter(efficiency(told))
        found += [replace(one, share=next(shares)) if one.forecast else one for one in mine]
    return found


def _forecast(plan: Plan, kind: Shipped, constants: Constants) -> Forecast | None:
    spec = plan.spec
    return forecast(
        plan.schedule, gpus=spec.procs, gpu=kind.gpu, gbit=kind.gbit, machines=spec.machines, vcpus=kind.vcpus,
        constants=constants, val=plan.val,
    )  # fmt: skip


# --- which to take --------------------------------------------------------------------------------------------------


def by_type(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each type."""
    return {name: list(some) for name, some in groupby(found, key=lambda one: one.kind.name)}


# --- constants, and what a run says of them -------------------------------------------------------------------------
