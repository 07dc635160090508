"""Sweeps over CIFAR-10 on two processor cores: peak rate, length of the warm-up, trust coefficient of LARS, batch.

    imgnet-cluster launch --local --data data/cifar10 --parallel 2 recipes/sweeps.py          # all of them, in a queue
    imgnet-cluster launch --local --data data/cifar10 --only rate_0.4 recipes/sweeps.py       # one of them
    imgnet-cluster ls -o json                                                                 # side by side

A sweep is a for-loop and `dataclasses.replace`. Copy this file and vary what you want to know.

    claimed, measured: nothing
    ours: no run yet; recipes/cifar10.py, from which they start, reaches 83 % in six minutes
"""

from collections.abc import Iterator
from dataclasses import replace

from train.recipe import Phase, Recipe

from .cifar10 import recipe as base


def make_phases(peak_lr: float = 0.2, warmup_epochs: int = 2, batch: int = 128) -> list[Phase]:
    """Return the phases of ten epochs: a straight line up to the peak rate, then a straight line down to 0."""
    template = replace(base.phases[0], batch=batch)
    decay = replace(template, epochs=(warmup_epochs, 10), lr=(peak_lr, 0.0))
    if not warmup_epochs:
        return [decay]
    return [replace(template, epochs=(0, warmup_epochs), lr=(peak_lr / 10, peak_lr)), decay]


def recipes() -> Iterator[Recipe]:
    """Yield one recipe for each value of each sweep. All other settings are those of recipes/cifar10.py."""
    for peak in (0.05, 0.1, 0.2, 0.4, 0.8):
        yield replace(base, name=f"rate_{peak}", phases=make_phases(peak_lr=peak))
    for warmup in (0, 1, 2, 4):
        yield replace(base, name=f"warmup_{warmup}", phases=make_phases(peak_lr=0.8, warmup_epochs=warmup))
    for trust in (0.0005, 0.001, 0.002, 0.004):
        lars = replace(base.optim, name="lars", trust=trust)
        yield replace(base, name=f"trust_{trust}", optim=lars, phases=make_phases(peak_lr=10.0, batch=1024))
    for batch in (64, 128, 256, 512):  # the linear rule: the peak is in proportion to the batch
        yield replace(base, name=f"batch_{batch}", phases=make_phases(peak_lr=0.2 * batch / 128, batch=batch))
