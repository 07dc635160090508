"""Forecast how long a schedule takes on machines that do not exist yet: arithmetic, no torch.

A step is its compute, the part of the all-reduce that the backward pass cannot hide, the optimizer, and the wait for a
loader that is slower than all these. An epoch adds its validation and a fixed cost that more machines do not divide. A
run adds its start.

    compute     T = images per GPU * (pixels / 224)^2 * the model's work / the card's ResNet-50 images per second
    all-reduce  A = 2 (P - 1) / P * bytes / (network * efficiency) + 2 (P - 1) * latency of a hop
    exposed     A without overlap; else max(0, A - 0.8 * 2/3 T) + 0.1 A
    loader      L = global batch / machines / images per second of a machine's processors; max(0, L - all above)
    validation  the forward pass of each view, or the loader where that is slower
    fixed       of each epoch, and of the first epoch with a new size, batch or copy
    start       boot, set-up, fetching the data, the trainers' own start

On a GPU without CUDA graphs, T is at least the time in which the host starts the kernels. docs/forecast.md compares the
forecast with published runs. Of `DEFAULT_CONSTANTS`, an H100 was measured; the other cards are planning figures.
"""

from .calibration import MeasuredRun, StartSeconds, TermComparison, calibrate, compare_with_run
from .hardware import MODEL_COSTS
from .model import DEFAULT_CONSTANTS, TERMS, Constants, Forecast, forecast, longest_term

__all__ = [
    "DEFAULT_CONSTANTS",
    "MODEL_COSTS",
    "TERMS",
    "Constants",
    "Forecast",
    "MeasuredRun",
    "StartSeconds",
    "TermComparison",
    "calibrate",
    "compare_with_run",
    "forecast",
    "longest_term",
]
