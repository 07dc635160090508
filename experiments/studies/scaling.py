"""Scaling rules of the learning rate: linear against square root and constant (Goyal et al. 2017, table 2a)."""

from experiments.harness.claims import MARGIN_POINTS, Arm, Claim, Experiment, make_side
from experiments.studies.goyal import BASE_ARM, BASE_RATE, LARGE_ARM, LARGE_BATCH_FACTOR, make_recipe


def rate_arms(gpus: int, name_prefix: str) -> tuple[Arm, ...]:
    """Return three arms with half the rate, the rate and twice the rate, scaled to the GPUs by the linear rule."""
    rate_by_name = {"half the rate": BASE_RATE / 2, "the rate": BASE_RATE, "twice the rate": 2 * BASE_RATE}
    return tuple(
        Arm(name=f"{name_prefix}{name}", recipe=make_recipe(rate), gpus=gpus) for name, rate in rate_by_name.items()
    )


HALF_BASE_ARM, FULL_BASE_ARM, DOUBLE_BASE_ARM = rate_arms(1, f"{BASE_ARM.name}, ")
HALF_LINEAR_ARM, FULL_LINEAR_ARM, DOUBLE_LINEAR_ARM = rate_arms(LARGE_BATCH_FACTOR, f"{LARGE_ARM.name}, linear, ")
SQUARE_ROOT_ARM = Arm(
    name=f"{LARGE_ARM.name}, square root", recipe=make_recipe(scaling="sqrt"), gpus=LARGE_BATCH_FACTOR
)
FIXED_RATE_ARM = Arm(name=f"{LARGE_ARM.name}, fixed", recipe=make_recipe(scaling="none"), gpus=LARGE_BATCH_FACTOR)

EXPERIMENT = Experiment(
    name="scaling",
    title="2. Linear against square-root and fixed rate",
    description=(
        f"One recipe (goyal.py) with a base batch of {BASE_ARM.name} images and with {LARGE_BATCH_FACTOR} times as "
        f"many. At the large batch, `Optim.scaling` multiplies the learning rate by {LARGE_BATCH_FACTOR} (linear), by "
        f"the square root of {LARGE_BATCH_FACTOR}, or by 1 (fixed). Half and twice the rate are shown too, so that no "
        "rule wins because the base rate was wrong."
    ),
    arms=(
        FULL_BASE_ARM,
        HALF_BASE_ARM,
        DOUBLE_BASE_ARM,
        FULL_LINEAR_ARM,
        HALF_LINEAR_ARM,
        DOUBLE_LINEAR_ARM,
        SQUARE_ROOT_ARM,
        FIXED_RATE_ARM,
    ),
    claims=(
        Claim(
            text=f"By the linear rule {LARGE_BATCH_FACTOR} times the batch is as good as the base batch",
            first=make_side(FULL_LINEAR_ARM.name),
            second=make_side(FULL_BASE_ARM.name),
            margin=MARGIN_POINTS,
            source="top-1 error 23.74 ± 0.09 at 8192 against 23.60 ± 0.12 % at 256 (table 2a)",
        ),
        Claim(
            text="The linear rule is better than the square root",
            first=make_side(FULL_LINEAR_ARM.name),
            second=make_side(SQUARE_ROOT_ARM.name),
            source="23.74 ± 0.09 against 26.22 ± 0.03 %",
        ),
        Claim(
            text="The linear rule is better than the fixed rate",
            first=make_side(FULL_LINEAR_ARM.name),
            second=make_side(FIXED_RATE_ARM.name),
            source="23.74 ± 0.09 against 41.67 ± 0.10 %",
        ),
    ),
)
