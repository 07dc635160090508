"""Measured constants for a forecast: read from a job, and adapted to another machine type."""

from dataclasses import replace

from cluster.backends.machine_types import MachineType, find_machine_type
from cluster.errors import BadInput
from cluster.state.job_result import JobResult
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from cluster.state.states import JobState
from cluster.state.status import EpochReader
from train.forecast import DEFAULT_CONSTANTS, Constants, MeasuredRun, calibrate
from train.recipe.schedule import Schedule
from train.tools.records import decode, encode

CPU_CARD = "CPU"  # stands for the GPU model of machines without GPUs
UNLIMITED_NETWORK_GBPS = 1e9


def measured_constants(job_name: str, result: JobResult | None) -> Constants:
    """Return the constants that a job measured. Raises `BadInput` when it is not done or its result lacks values."""
    if not result or result.state != JobState.DONE:
        raise BadInput(f"--from {job_name}: the job is not done, so it has no measurements for a forecast")
    try:
        if result.constants:
            return result.constants
        return calibrate(decode(MeasuredRun, encode(result)), job_name, result.start_seconds(include_one_time=False))
    except ValueError as error:
        raise BadInput(f"--from {job_name}: its result.json lacks measurements for a forecast ({error})") from error


def constants_so_far(run: Run, schedule: Schedule) -> Constants | None:
    """Return the forecast constants measured in the completed epochs of an unfinished job, None if there are none.

    Those of boot, set-up and start are the presets: a resume may find other images on its machines than the launch.
    """
    measured_run = MeasuredRun(
        recipe=run.spec.recipe.name,
        job=run.spec.name,
        procs=run.spec.procs,
        machines=run.spec.machines,
        epochs=tuple(EpochReader(run.folder).epochs()),
        schedule=tuple(schedule.table()),
        schedule_gpus=run.spec.schedule_gpus,
        seconds={},
    )
    try:
        constants = calibrate(measured_run)
    except (ValueError, ZeroDivisionError):
        return None
    return replace(
        constants,
        startup_seconds=DEFAULT_CONSTANTS.startup_seconds,
        boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
        setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
        fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
    )


def job_machine_type(spec: JobSpec, result: JobResult | None, rented_type: str = "") -> MachineType:
    """Return the machine type that a job ran on.

    For rented machines this is `rented_type`. Other machines are described by what the job reports: CPUs, or GPUs of
    unknown model ("").
    """
    machine_type = find_machine_type(rented_type) if rented_type else None
    if machine_type:
        return machine_type
    return MachineType(
        name=f"as {spec.name}'s",
        gpus=spec.procs,
        gpu=CPU_CARD if result and result.device == "cpu" else "",
        network_gbps=UNLIMITED_NETWORK_GBPS,
        vcpus=None,
        on_demand_price=None if spec.cloud else 0.0,
    )


def constants_for_type(constants: Constants, job_type: MachineType, machine_type: MachineType) -> tuple[Constants, str]:
    """Adapt the constants of a job that ran on `job_type` to `machine_type`.

    Step times hold for the job's GPU model only, loader speeds for its CPUs only. Returns the constants, and a note
    on what was replaced or assumed ("" if nothing).
    """
    if job_type == machine_type:
        return constants, ""
    if job_type.on_demand_price == 0:  # the job's machine was the user's own; a rented one has to boot and be set up
        constants = replace(
            constants,
            boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
            setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
            fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
        )
    job_name = constants.source
    if job_type.gpu == machine_type.gpu:
        note = f"the CPUs of {machine_type.name} are assumed to be as fast as those of {job_name}"
        return constants, note if job_type.gpu == CPU_CARD else ""
    if CPU_CARD in (job_type.gpu, machine_type.gpu):
        device = "CPUs" if job_type.gpu == CPU_CARD else "GPUs"
        return DEFAULT_CONSTANTS, (
            f"{job_name} ran on {device}, which does not tell the speed of {machine_type.gpu}: "
            f"all constants of {machine_type.name} are presets"
        )
    if not job_type.gpu:
        note = f"{job_name} ran on an unknown GPU model: {machine_type.gpu} is assumed to be as fast"
        return constants, note
    presets_with_measured_overhead = replace(
        DEFAULT_CONSTANTS,
        source=f"{job_name}, presets for {machine_type.gpu}",
        epoch_seconds=constants.epoch_seconds,
        switch_seconds=constants.switch_seconds,
        startup_seconds=constants.startup_seconds,
        setup_seconds=constants.setup_seconds,
    )
    return presets_with_measured_overhead, (
        f"{job_name} ran on {job_type.gpu}: the speed of {machine_type.gpu} is the preset's"
    )
