"""Candidates for a launch: the recipe on several machine types and counts, with forecasts and prices; the choice."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.backends.aws.shipped_tables import MachineType, find_machine_type
from cluster.backends.planner import Plan
from cluster.connectors.local import visible_gpus
from cluster.errors import BadInput, ClusterError
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
    # Images per second and machine, relative to those of the smallest candidate of the same type.
    scaling_efficiency: float | None = None

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.plan.spec.machines

    @property
    def images_per_second_of_machine(self) -> float | None:
        """Training images per second of one machine, after the start; None without a forecast."""
        if self.forecast is None:
            return None
        schedule = self.plan.recipe_schedule
        images = schedule.images_at(len(schedule.epochs), 0)
        return images / self.machines / (60 * self.forecast.minutes - self.forecast.terms["start"])

    @property
    def epochs_to_target(self) -> int | None:
        """After how many epochs the recipe's source reached its target; None if that is unknown or not planned."""
        target_epoch = self.plan.spec.recipe.source_target_epoch
        return target_epoch if target_epoch and target_epoch <= len(self.plan.recipe_schedule.epochs) else None

    @property
    def minutes(self) -> float | None:
        """Minutes of the whole run, from renting to the end."""
        return self.forecast.minutes if self.forecast else None

    @property
    def minutes_to_target(self) -> float | None:
        """Minutes from renting to the target; of the whole run if `epochs_to_target` is unknown."""
        if self.forecast and self.epochs_to_target:
            steps = self.plan.recipe_schedule.steps_at(self.epochs_to_target, 0)
            return self.forecast.of_steps(0, steps).minutes
        return self.minutes

    def dollars(self, minutes: float | None) -> float | None:
        """Return the on-demand cost of all machines for `minutes`; None if the price or the time is unknown."""
        price = self.machine_type.on_demand_price
        return None if price is None or minutes is None else self.machines * price * minutes / 60

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
            "dollars": self.dollars(self.minutes),
            "efficiency": self.scaling_efficiency,
            "target": {
                "epochs": self.epochs_to_target,
                "minutes": self.minutes_to_target,
                "dollars": self.dollars(self.minutes_to_target),
            },
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


def make_candidates(
    make_plan: Callable[[int, int], Plan],
    machine_type: MachineType,
    machine_counts: Sequence[int],
    constants: Constants,
) -> list[Candidate]:
    """Return a candidate for each number of machines. `make_plan` takes the machines and the processes of each."""
    candidates: list[Candidate] = []
    for count in machine_counts:
        plan = make_plan(count, machine_type.gpus)
        run_forecast = forecast(
            plan.recipe_schedule,
            gpus=plan.spec.procs,
            gpu=machine_type.gpu,
            gbit=machine_type.network_gbps,
            machines=count,
            vcpus=machine_type.vcpus,
            constants=constants,
            val_images=plan.val_images,
        )
        candidate = Candidate(machine_type, plan, run_forecast)
        first_speed = (candidates or [candidate])[0].images_per_second_of_machine
        speed = candidate.images_per_second_of_machine
        candidates.append(replace(candidate, scaling_efficiency=speed / first_speed if speed and first_speed else None))
    return candidates


def choose(candidates: Sequence[Candidate], criterion: str) -> Candidate:
    """Return the "cheapest" or "fastest" candidate on demand, none of a retired type. Raises `ClusterError`."""
    rentable = [
        candidate for candidate in candidates if candidate.forecast and not candidate.machine_type.retired_reason
    ]
    if not rentable:
        raise ClusterError(
            "nothing to choose from: no row has a forecast on machines that can be rented; pass other types: --type, "
            "or a job that has measured this model: --from JOB"
        )

    def minutes_and_dollars(candidate: Candidate) -> tuple[float, float]:
        minutes, dollars = candidate.minutes, candidate.dollars(candidate.minutes)
        return minutes or math.inf, math.inf if dollars is None else dollars

    if criterion == "fastest":
        return min(rentable, key=minutes_and_dollars)
    cheapest = min(rentable, key=lambda candidate: minutes_and_dollars(candidate)[::-1])
    if cheapest.machine_type.on_demand_price is None:
        raise ClusterError(
            "no row has a known price; use --fastest, or a type with a price (to list them: imgnet-cluster offers)"
        )
    return cheapest


def launch_command(candidate: Candidate, recipe: str, options: Mapping[str, object]) -> str:
    """Return the shell command that launches a candidate. `options` are those that `plan` and `launch` share."""
    argv = ["imgnet-cluster", "launch", "--machines", str(candidate.machines), "--type", candidate.machine_type.name]
    for name, option_value in options.items():
        option = f"--{name.replace('_', '-')}"
        for value in option_value if isinstance(option_value, tuple) else [option_value]:
            if value is True:
                argv.append(option)
            elif value is not None and value is not False:
                argv += [option, str(value)]
    return shlex.join([*argv, recipe])
