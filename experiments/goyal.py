"""Goyal et al. 2017 in small: 8,000 images, 11 epochs, a base batch of 8 where they had 256, and 32 times that.

A step is `gpus` chunks of 8 images, which is what batch norm sees at any batch (their section 2.3). Everything else is
one recipe: a ramp over two epochs from a 32nd of the rate, which 32 GPUs make the rate of the base batch, and from
there in a line to 0. Their drops by ten would spend a third of so few steps on rates that move nothing.

Chosen by hand on seed 100, one run each, so the scale is one where the linear rule has a chance: with 16 and 512 images
a step, 18 epochs and drops by ten it had not (60.9 against 56.5 % at 0.0125, 62.5 against 48.9 % at 0.025).
"""

from dataclasses import replace
from typing import Any

from train.recipe import Data, Model, Optim, Phase, Recipe

from .arms import Arm, Claim, side

BATCH, TIMES = 8, 32
RATE = 0.00625  # at the base batch: 0.2 per 256 images
RAMP, EPOCHS = 2, 11
CIFAR = Data(name="cifar10", root="data/cifar10", train=8_000, val=10_000)
MODEL = Model(name="resnet10_tiny", zero_gamma=False)
OPTIM = Optim(momentum=0.9, nesterov=True, weight_decay=5e-4)


def row(start: int, end: int, lr: float | tuple[float, float], **more: Any) -> Phase:
    """Return a row of the schedule; only the run's end is validated."""
    return Phase(epochs=(start, end), size=32, batch=BATCH, lr=lr, min_scale=0.75, validate="never", **more)


def recipe(rate: float = RATE, ramp: float | tuple[float, float] | None = None, **changes: Any) -> Recipe:
    """Return the recipe at a rate, with another first row's rate, and with changes to `Model` and `Optim` by name."""
    model = {name: value for name, value in changes.items() if name in ("zero_gamma",)}
    optim = {name: value for name, value in changes.items() if name not in model}
    return Recipe(
        name="goyal",
        data=CIFAR,
        model=replace(MODEL, **model),
        optim=replace(OPTIM, **optim),
        machines=1,
        gpus=1,
        phases=[
            row(0, RAMP, (rate / TIMES, rate) if ramp is None else ramp),
            row(RAMP, EPOCHS, (rate, 0.0)),
        ],
    )


BASE = Arm(name=f"{BATCH}", recipe=recipe())
LARGE = Arm(name=f"{BATCH * TIMES}", recipe=recipe(), gpus=TIMES)


def on_and_off(field: str, values: tuple[bool, bool], names: tuple[str, str]) -> tuple[Arm, ...]:
    """Return the arms of a choice at the base batch and at the large one, each with the first value and the second."""
    return tuple(
        Arm(name=f"{one.name}, {name}", recipe=recipe(**{field: value}), gpus=one.gpus)
        for one in (BASE, LARGE)
        for value, name in zip(values, names, strict=True)
    )


def better(names: tuple[str, str], sources: tuple[str, str]) -> tuple[Claim, ...]:
    """Return the claims that the first of two names is better, at the base batch and at the large one."""
    return tuple(
        Claim(
            text=f"At {one.name} images a step {names[0]} is better than {names[1]}",
            first=side(f"{one.name}, {names[0]}"),
            second=side(f"{one.name}, {names[1]}"),
            source=source,
        )
        for one, source in zip((BASE, LARGE), sources, strict=True)
    )
