"""Forecast of a job on this computer."""

import os
from dataclasses import replace

from cluster.connectors.local import visible_gpu_count
from cluster.state.spec import JobSpec
from train.forecast import DEFAULT_CONSTANTS, DEVICES, Constants, Forecast, forecast
from train.recipe.schedule import Schedule, scaled_image_count

CPU_PRESET_CORES = 2  # the preset speed of the device "CPU" was measured with one process on two cores
NETWORK_GBPS = 40.0  # assumed between the processes of one computer


def forecast_local(spec: JobSpec, schedule: Schedule, constants: Constants | None = None) -> Forecast | None:
    """Return the forecast of a job on this computer.

    `constants` are those that another job measured here. Without them, the CPU preset is scaled to this computer's
    cores; a computer with GPUs then has no forecast (None), because their speed is unknown.
    """
    if constants is None:
        if visible_gpu_count():
            return None
        cores_per_process = (os.cpu_count() or 1) / spec.processes_per_host
        constants = replace(
            DEFAULT_CONSTANTS,
            images_per_second=DEVICES["CPU"].images_per_second * cores_per_process / CPU_PRESET_CORES,
            boot_seconds=0.0,
            setup_seconds=0.0,
            fetch_bytes_per_second=0.0,
            startup_seconds=5.0,
        )
    return forecast(
        schedule,
        gpus=spec.procs,
        gpu="CPU",
        gbit=NETWORK_GBPS,
        machines=spec.machines,
        constants=constants,
        val_images=scaled_image_count(spec.recipe.data.val, spec.train.scale),
    )
