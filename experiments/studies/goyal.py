"""Goyal et al. 2017 on a small scale: 8,000 images, 11 epochs, batches of 8 (where they have 256) and of 32 times 8.

A step consists of `gpus` chunks of 8 images, and batch norm sees a chunk at any batch size (their section 2.3). All
arms share one recipe: a warm-up of two epochs from a 32nd of the learning rate, then a linear decay to 0. With 32
GPUs, a 32nd of the scaled rate is the rate of the base batch. Goyal's drops by a factor of ten would spend a third of
so few steps at rates that are too small to change anything.

Batches, epochs and rates were chosen by hand on seed 100, one run each, at a scale where the linear rule can hold. With
16 and 512 images a step, 18 epochs and drops by ten it did not hold (60.9 against 56.5 % at rate 0.0125, 62.5 against
48.9 % at 0.025).
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
    """Return a phase of the schedule. Validation takes place only at the end of the run."""
    return Phase(
        epochs=(start, end), size=32, batch=BASE_BATCH, lr=lr, min_scale=0.75, validate="never", **phase_fields
    )


def make_recipe(
    rate: float = BASE_RATE, warmup_rate: float | tuple[float, float] | None = None, **changes: Any
) -> Recipe:
    """Return the recipe with a learning rate, a rate of the warm-up, and changed fields of `Model` and `Optim`."""
    model_changes = {name: value for name, value in changes.items() if name == "zero_gamma"}
    optim_changes = {name: value for name, value in changes.items() if name not in model_changes}
    if warmup_rate is None:
        warmup_rate = (rate / LARGE_BATCH_FACTOR, rate)
    return Recipe(
        name="goyal",
        data=CIFAR,
        model=replace(MODEL, **model_changes),
        optim=replace(OPTIM, **optim_changes),
        machines=1,
        gpus=1,
        phases=[make_phase(0, WARMUP_EPOCHS, warmup_rate), make_phase(WARMUP_EPOCHS, EPOCHS, (rate, 0.0))],
    )


BASE_ARM = Arm(name=f"{BASE_BATCH}", recipe=make_recipe())
LARGE_ARM = Arm(name=f"{BASE_BATCH * LARGE_BATCH_FACTOR}", recipe=make_recipe(), gpus=LARGE_BATCH_FACTOR)


def on_and_off_arms(field: str, values: tuple[bool, bool], names: tuple[str, str]) -> tuple[Arm, ...]:
    """Return four arms: the base batch and the large batch, each with both values of a field."""
    return tuple(
        Arm(name=f"{arm.name}, {name}", recipe=make_recipe(**{field: value}), gpus=arm.gpus)
        for arm in (BASE_ARM, LARGE_ARM)
        for value, name in zip(values, names, strict=True)
    )


def better_claims(choice_names: tuple[str, str], sources: tuple[str, str]) -> tuple[Claim, ...]:
    """Return the claims that the first choice is better, at the base batch and at the large batch."""
    return tuple(
        Claim(
            text=f"At {arm.name} images a step {choice_names[0]} is better than {choice_names[1]}",
            first=make_side(f"{arm.name}, {choice_names[0]}"),
            second=make_side(f"{arm.name}, {choice_names[1]}"),
            source=source,
        )
        for arm, source in zip((BASE_ARM, LARGE_ARM), sources, strict=True)
    )
