"""Forecasts of a recipe on machine types and counts, with constants that are preset or measured by a job."""

from dataclasses import dataclass, replace
from math import ceil
from statistics import median

from cluster.backends.aws.shipped_tables import MachineType, find_machine_type
from cluster.backends.planner import Plan
from cluster.connectors.local import visible_gpus
from cluster.errors import BadInput
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from cluster.state.status import JobResult
from train.forecast import DEFAULT_CONSTANTS, Constants, Forecast, MeasuredRun, StartSeconds, calibrate, forecast
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.records import encode

CPU_CARD = "CPU"  # stands for the GPU model of machines without GPUs


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
    """Return the first machine type of a recipe that can still be rented, else a type of unknown speed and price."""
    for machine_type in filter(None, map(find_machine_type, recipe.types)):
        if not machine_type.retired_reason:
            return machine_type
    return MachineType("any machine", recipe.gpus, gpu="", network_gbps=0.0, vcpus=None, on_demand_price=None)


def this_computer() -> MachineType:
    """Return this computer as a machine type: its GPUs, whose model is not asked, else its processors."""
    gpus = len(visible_gpus())
    return MachineType("this computer", max(1, gpus), "" if gpus else CPU_CARD, 0.0, None, on_demand_price=0.0)


def make_candidate(plan: Plan, machine_type: MachineType, constants: Constants) -> Candidate:
    """Return the forecast and the price of a plan on one machine type."""
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


def measured_constants(job_name: str, result: JobResult | None) -> Constants:
    """Return the constants that a job measured. Raises `BadInput` when it is not done or measured too little."""
    if not result or not result.constants:
        raise BadInput(
            f"--from {job_name}: the job is not done or made no step, so it has no measurements for a forecast; name "
            "one that is done: imgnet-cluster ls"
        )
    return result.constants


def constants_so_far(run: Run, schedule: Schedule) -> Constants | None:
    """Return the constants that an unfinished job measured, None before; boot, set-up and start are the presets."""
    measured_run = MeasuredRun(
        processes=run.spec.procs * run.spec.machines,
        machines=run.spec.machines,
        epochs=run.folder.epochs(),
        schedule=schedule.table(),
        schedule_gpus=run.spec.schedule_gpus,
    )
    start = StartSeconds(setup=DEFAULT_CONSTANTS.setup_seconds, trainers=DEFAULT_CONSTANTS.startup_seconds)
    try:
        if measured_run.epochs:
            return with_preset_boot(calibrate(measured_run, run.spec.name, start))
        steps = [row.scalars for row in run.folder.steps()]  # of the first epoch
        seconds = median(scalars["times/step_ms"] or 0.0 for scalars in steps) / 1000
        size, batch = (round(steps[-1][name] or 0) for name in ("sizes/image", "sizes/batch"))
        batches_per_step = ceil(measured_run.schedule_gpus / measured_run.processes)
        timings = ((size, batch, seconds / batches_per_step),)
        return replace(DEFAULT_CONSTANTS, source=run.spec.name, batch_timings=timings, optimizer_seconds=0.0)
    except (KeyError, ValueError, ZeroDivisionError):  # `median` of nothing raises a `ValueError`
        return None


def with_preset_boot(constants: Constants) -> Constants:
    """Return constants for machines that have to boot and to fetch the images."""
    return replace(
        constants,
        boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
        fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
    )


def job_machine_type(spec: JobSpec, result: JobResult | None, rented_type: str = "") -> MachineType:
    """Return the machine type that a job ran on: the rented one, or as the job reports CPUs, or unknown GPUs ("")."""
    machine_type = find_machine_type(rented_type) if rented_type else None
    return machine_type or MachineType(
        name=f"machine of {spec.name}",
        gpus=spec.procs,
        gpu=CPU_CARD if result and result.device == "cpu" else "",
        network_gbps=0.0,  # not used: the time of the network is in the measured steps
        vcpus=None,
        on_demand_price=None if spec.cloud else 0.0,
    )


def constants_for_type(constants: Constants, job_type: MachineType, machine_type: MachineType) -> tuple[Constants, str]:
    """Adapt the constants of a job that ran on `job_type` to `machine_type`.

    Step times hold for one GPU model; another has the presets. Returns also what was replaced or assumed.
    """
    if job_type == machine_type:
        return constants, ""
    if job_type.gpu != machine_type.gpu and (job_type.gpu or machine_type.gpu == CPU_CARD):
        note = f"{constants.source} ran on {job_type.gpu or 'GPUs'}: the speed of {machine_type.gpu} is the preset's"
        return DEFAULT_CONSTANTS, note
    note = f"{machine_type.name} is assumed to be as fast as the machines of {constants.source}"
    if job_type.on_demand_price == 0:  # the job's machine was the user's own; a rented one has to boot and be set up
        constants = replace(with_preset_boot(constants), setup_seconds=DEFAULT_CONSTANTS.setup_seconds)
    return constants, note
