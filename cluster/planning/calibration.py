"""Measured constants for a forecast: from a finished job, and for another GPU."""

from dataclasses import replace

from cluster.backends import machine_types
from cluster.backends.machine_types import MachineType
from cluster.errors import BadInput
from cluster.state.result import JobResult
from cluster.state.spec import JobSpec
from train.forecast import DEFAULT_CONSTANTS, Constants, calibrate

CPU_CARD = "CPU"  # the card of machines without any


def measured_constants(job_name: str, result: JobResult | None) -> Constants:
    """Return the constants that a job measured. Raises `BadInput` when there are none."""
    if not result or result.get("state") != "done":
        raise BadInput(f"--from {job_name}: is not done; it has measured nothing that a forecast could be made from")
    try:
        kept = result.get("constants")
        return Constants.from_json(kept) if kept else calibrate(result, job_name)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"--from {job_name}: its result.json does not say enough ({error})") from error


def job_machine_type(spec: JobSpec, result: JobResult, rented_type: str = "") -> MachineType:
    """Return the kind of machine that a job ran on: the type that was `rented`; of machines that are not, only what the
    job says itself: that it was on CPUs, or on GPUs of no known name, "".
    """
    found = machine_types.find_machine_type(rented_type) if rented_type else None
    gpu = CPU_CARD if result.get("device") == "cpu" else ""
    return found or MachineType(f"as {spec.name}'s", spec.procs, gpu, 1e9, None, None if spec.cloud else 0.0)


def constants_for_type(constants: Constants, job_type: MachineType, machine_type: MachineType) -> tuple[Constants, str]:
    """Return a job's constants as they hold on a kind of machine, and a line where a part of them does not: speeds
    are those of its card, and seconds of the loader those of its processors. `job` is `card_of` it.
    """
    if job_type == machine_type:
        return constants, ""
    if job_type.on_demand_price == 0:  # a rented machine has to boot, whatever is said of its speed
        constants = replace(
            constants,
            boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
            setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
            fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
        )
    name = constants.source
    if job_type.gpu == machine_type.gpu:
        return (
            constants,
            f"the processors of {name} are taken for those of {machine_type.name}" if job_type.gpu == CPU_CARD else "",
        )
    if CPU_CARD in (job_type.gpu, machine_type.gpu):
        what = "processors" if job_type.gpu == CPU_CARD else "GPUs"
        return (
            DEFAULT_CONSTANTS,
            f"{name} ran on {what}, which says nothing of {machine_type.gpu}: all of {machine_type.name} is presets",
        )
    if not job_type.gpu:
        return constants, f"{name} ran on a GPU that is not known by name: {machine_type.gpu} is taken for its like"
    preset = replace(DEFAULT_CONSTANTS, source=f"{name}, presets for {machine_type.gpu}", epoch_seconds=constants.epoch_seconds, switch_seconds=constants.switch_seconds,
                     startup_seconds=constants.startup_seconds, setup_seconds=constants.setup_seconds)  # fmt: skip
    return preset, f"{name} ran on {job_type.gpu}: the speed of {machine_type.gpu} is the preset's"
