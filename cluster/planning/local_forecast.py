"""Forecast of a job on this computer."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.connectors.local import gpu_count
from train.forecast import CARDS, OURS, Constants, Forecast, forecast

if TYPE_CHECKING:
    pass
from .plan import Plan


def here(plan: Plan, constants: Constants | None = None) -> Forecast | None:
    """Return the forecast of a job on this computer, None where it has GPUs of which nothing was measured.

    The preset of the card CPU is for one process on two cores.
    """
    if constants is None:
        if gpu_count():
            return None
        images = CARDS["CPU"].images * (os.cpu_count() or 1) / plan.spec.neighbours / 2
        constants = replace(OURS, images=images, boot=0.0, setup=0.0, fetch=0.0, start=5.0)
    return forecast(
        plan.schedule, gpus=plan.spec.procs, gpu="CPU", gbit=40.0, machines=plan.spec.machines, constants=constants,
        val=plan.val,
    )  # fmt: skip
