"""Goyal et al. 2017 in small: 8,000 images, 11 epochs, a base batch of 8 where they had 256, and 32 times that.

A step is `gpus` chunks of 8 images, which is what batch norm sees at any batch (their section 2.3). Everything else is
one recipe: a ramp over two epochs from a 32nd of the rate, which 32 GPUs make the rate of the base batch, and from
there in a line to 0. Their drops by ten would spend a third of so few steps on rates that move nothing.

Chosen by hand on seed 100, one run each, so the scale is one where the linear rule has a chance: with 16 and 512 images
a step, 18 epochs and drops by ten it had not (60.9 against 56.5 % at 0.0125, 62.5 against 48.9 % at 0.025).
"""

from dataclasses import replace
from typing import Any

from experiments.harness.claims import Arm, Claim, make_side
from train.recipe import Data, Model, Optim, Phase, Recipe

BASE_BATCH, LARGE_BATCH_FACTOR = 8, 32
BASE_RATE = 0.00625  # at the base batch: 0.2 per 256 images
WARMUP_EPOCHS, EPOCHS = 2, 11
CIFAR = Data(name="cifar10", root="data/cifar10", train=8_000, val=10_000)
MODEL = Model(name="resnet10_tiny", zero_gamma=False)
OPTIM = Optim(momentum=0.9, nesterov=True, weight_decay=5e-4)


def make_phase(start: int, end: int, lr: float | tuple[float, float], **phase_fields: Any) -> Phase:
    """Return a row of the schedule; only the run's end is validated."""
    return Phase(
        epochs=(start, end), size=32, batch=BASE_BATCH, lr=lr, min_scale=0.75, validate="never", **phase_fields
    )


def make_recipe(
    rate: float = BASE_RATE, warmup_rate: float | tuple[float, float] | None = None, **changes: Any
) -> Recipe:
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
            make_phase(0, WARMUP_EPOCHS, (rate / LARGE_BATCH_FACTOR, rate) if warmup_rate is None else warmup_rate),
            make_phase(WARMUP_EPOCHS, EPOCHS, (rate, 0.0)),
        ],
    )


BASE_ARM = Arm(name=f"{BASE_BATCH}", recipe=make_recipe())
LARGE_ARM = Arm(name=f"{BASE_BATCH * LARGE_BATCH_FACTOR}", recipe=make_recipe(), gpus=LARGE_BATCH_FACTOR)


def on_and_off_arms(field: str, values: tuple[bool, bool], names: tuple[str, str]) -> tuple[Arm, ...]:
    """Return the arms of a choice at the base batch and at the large one, each with the first value and the second."""
    return tuple(
        Arm(name=f"{one.name}, {name}", recipe=make_recipe(**{field: value}), gpus=one.gpus)
        for one in (BASE_ARM, LARGE_ARM)
        for value, name in zip(values, names, strict=True)
    )


def better_claims(choice_names: tuple[str, str], sources: tuple[str, str]) -> tuple[Claim, ...]:
    """Return the claims that the first of two names is better, at the base batch and at the large one."""
    return tuple(
        Claim(
            text=f"At {one.name} images a step {choice_names[0]} is better than {choice_names[1]}",
            first=make_side(f"{one.name}, {choice_names[0]}"),
            second=make_side(f"{one.name}, {choice_names[1]}"),
            source=source,
        )
        for one, source in zip((BASE_ARM, LARGE_ARM), sources, strict=True)
    )
