"""Forecast of a job on this computer."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.connectors.local import visible_gpu_count
from train.forecast import DEFAULT_CONSTANTS, DEVICES, Constants, Forecast, forecast

if TYPE_CHECKING:
    pass
from .plan import Plan


def forecast_local(plan: Plan, constants: Constants | None = None) -> Forecast | None:
    """Return the forecast of a job on this computer, None where it has GPUs of which nothing was measured.

    The preset of the card CPU is for one process on two cores.
    """
    if constants is None:
        if visible_gpu_count():
            return None
        images = DEVICES["CPU"].images_per_second * (os.cpu_count() or 1) / plan.spec.processes_per_host / 2
        constants = replace(
            DEFAULT_CONSTANTS,
            images_per_second=images,
            boot_seconds=0.0,
            setup_seconds=0.0,
            fetch_bytes_per_second=0.0,
            startup_seconds=5.0,
        )
    return forecast(
        plan.schedule, gpus=plan.spec.procs, gpu="CPU", gbit=40.0, machines=plan.spec.machines, constants=constants,
        val_images=plan.val_images,
    )  # fmt: skip
