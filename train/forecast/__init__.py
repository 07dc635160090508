"""How long a schedule will take on machines that nobody has yet: arithmetic, no torch.

A step is its compute, what cannot be hidden of the all-reduce, the optimizer, and the wait for a loader that is slower
than all these; an epoch has its validation and a fixed cost that more machines do not divide; a run has a start.

    compute     T = images per GPU * (pixels / 224)^2 * the model's work / the card's ResNet-50 images per second
    all-reduce  A = 2 (P - 1) / P * bytes / (network * efficiency) + 2 (P - 1) * latency of a hop
    seen of it  A without overlap; else max(0, A - 0.8 * 2/3 T) + 0.1 A
    loader      L = global batch / machines / images per second that a machine's processors make; max(0, L - all above)
    validation  the forward pass of each view, or the loader where that is slower
    fixed       of each epoch, and of the first with a new size, batch or copy
    start       boot, set-up, fetch, the trainers' own

`published` holds it against runs of others (docs/forecast.md). No run of ours on GPUs stands behind `OURS` yet.
"""

from .calibration import calibrate, compare_with_run
from .constants import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, TRAINER_CONSTANTS, Constants
from .hardware import DEVICES, EFA_NETWORK, MODEL_COSTS, TCP_NETWORK, DeviceSpec, NetworkSpec
from .model import STEP_TERMS, TERMS, Forecast, MachineSpec, forecast, scaling_efficiency

__all__ = [
    "DEFAULT_CONSTANTS",
    "DEVICES",
    "EFA_NETWORK",
    "IMAGENET18_CONSTANTS",
    "MODEL_COSTS",
    "STEP_TERMS",
    "TCP_NETWORK",
    "TERMS",
    "TRAINER_CONSTANTS",
    "Constants",
    "DeviceSpec",
    "Forecast",
    "MachineSpec",
    "NetworkSpec",
    "calibrate",
    "compare_with_run",
    "forecast",
    "scaling_efficiency",
]  # fmt: skip
