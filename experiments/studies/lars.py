"""LARS at a batch where the linear scaling rule breaks (You et al. 2017; Jia et al. 2018)."""

from dataclasses import replace
from typing import Any

from experiments.harness.claims import MARGIN_POINTS, Arm, Claim, Experiment, make_side
from experiments.studies.goyal import BASE_BATCH, BASE_RATE, EPOCHS, WARMUP_EPOCHS, make_phase, make_recipe
from train.recipe import Recipe

BATCH_FACTOR = 128
TRUST_COEFFICIENTS = (0.01, 0.02, 0.04)


def polynomial_recipe(rate: float = BASE_RATE, **changes: Any) -> Recipe:
    """Return the recipe with the schedule of LARS: a linear warm-up, then polynomial decay to 0."""
    phases = [
        make_phase(0, WARMUP_EPOCHS, (rate / BATCH_FACTOR, rate)),
        make_phase(WARMUP_EPOCHS, EPOCHS, (rate, 0.0), shape="polynomial"),
    ]
    return replace(make_recipe(**changes), phases=phases)


LARGE_BATCH = BASE_BATCH * BATCH_FACTOR
BASE_ARM = Arm(name=f"{BASE_BATCH}, SGD", recipe=polynomial_recipe())
SGD_ARMS = (
    Arm(name=f"{LARGE_BATCH}, SGD, linear", recipe=polynomial_recipe(), gpus=BATCH_FACTOR),
    Arm(name=f"{LARGE_BATCH}, SGD, linear / 4", recipe=polynomial_recipe(BASE_RATE / 4), gpus=BATCH_FACTOR),
    Arm(name=f"{LARGE_BATCH}, SGD, square root", recipe=polynomial_recipe(scaling="sqrt"), gpus=BATCH_FACTOR),
)
LARS_ARMS = tuple(
    Arm(
        name=f"{LARGE_BATCH}, LARS, trust {trust:g}",
        recipe=polynomial_recipe(name="lars", trust=trust),
        gpus=BATCH_FACTOR,
    )
    for trust in TRUST_COEFFICIENTS
)

EXPERIMENT = Experiment(
    name="lars",
    title="3. LARS where the linear rule breaks",
    description=(
        f"{LARGE_BATCH} images a step, {BATCH_FACTOR} times the base batch, for {EPOCHS} epochs: {WARMUP_EPOCHS} of "
        "warm-up, then polynomial decay to 0. LARS uses the learning rate of the linear rule with three trust "
        "coefficients. SGD uses this rate, a quarter of it, and the rate of the square-root rule. The best of the "
        "three arms with LARS is compared with the best of the three with SGD."
    ),
    arms=(BASE_ARM, *SGD_ARMS, *LARS_ARMS),
    claims=(
        Claim(
            text=f"With SGD the linear rule still holds at {BATCH_FACTOR} times the batch",
            first=make_side(SGD_ARMS[0].name),
            second=make_side(BASE_ARM.name),
            margin=MARGIN_POINTS,
            source="up to 32 times (8192) it does; at 64 times the error is 24.79, at 128 27.55 % (Goyal, figure 3)",
        ),
        Claim(
            text=f"At {LARGE_BATCH} LARS is better than SGD by the linear rule",
            first=make_side(*(arm.name for arm in LARS_ARMS)),
            second=make_side(SGD_ARMS[0].name),
            source="ResNet-50 at 65,536: 71.9 against 60.6 % top-1 (Jia et al. 2018)",
        ),
        Claim(
            text=f"At {LARGE_BATCH} the best LARS is better than the best SGD",
            first=make_side(*(arm.name for arm in LARS_ARMS)),
            second=make_side(*(arm.name for arm in SGD_ARMS)),
        ),
    ),
)
