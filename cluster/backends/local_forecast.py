"""Forecast of a job on this computer."""

from cluster.state.spec import JobSpec
from train.forecast import Constants, Forecast, forecast
from train.recipe.schedule import Schedule, scaled_image_count

NETWORK_GBPS = 40.0  # assumed between the processes of one computer


def forecast_local(spec: JobSpec, schedule: Schedule, constants: Constants) -> Forecast | None:
    """Return the forecast of a job on this computer by the constants that another job measured here.

    There are no presets: computers differ too much for a comparison of such a forecast with the run to say anything.
    """
    return forecast(
        schedule,
        gpus=spec.procs,
        gpu="CPU",
        gbit=NETWORK_GBPS,
        machines=spec.machines,
        constants=constants,
        val_images=scaled_image_count(spec.recipe.data.val, spec.train.scale),
    )
