"""Warm-up of the learning rate against none, at 32 times the base batch (Goyal et al. 2017, table 1)."""

from experiments.harness.claims import MARGIN_POINTS, Arm, Claim, Experiment, make_side
from experiments.studies.goyal import BASE_ARM, BASE_RATE, LARGE_ARM, LARGE_BATCH_FACTOR, make_recipe

NO_WARMUP_ARM = Arm(name=f"{LARGE_ARM.name}, none", recipe=make_recipe(warmup_rate=BASE_RATE), gpus=LARGE_BATCH_FACTOR)
CONSTANT_ARM = Arm(
    name=f"{LARGE_ARM.name}, constant",
    recipe=make_recipe(warmup_rate=BASE_RATE / LARGE_BATCH_FACTOR),
    gpus=LARGE_BATCH_FACTOR,
)
GRADUAL_ARM = Arm(name=f"{LARGE_ARM.name}, gradual", recipe=LARGE_ARM.recipe, gpus=LARGE_BATCH_FACTOR)
BASE_BATCH_ARM = Arm(name=f"{BASE_ARM.name}, gradual", recipe=BASE_ARM.recipe)

EXPERIMENT = Experiment(
    name="warmup",
    title="1. Warm-up against none, at 32 times the base batch",
    description=(
        f"{LARGE_ARM.name} images a step at {LARGE_BATCH_FACTOR} times the learning rate (goyal.py). The arms differ "
        "only in the first two of 11 epochs: the full rate, the rate of the base batch, or a linear ramp from the "
        f"rate of the base batch to the full rate. The base batch of {BASE_ARM.name} images is shown for comparison."
    ),
    arms=(BASE_BATCH_ARM, NO_WARMUP_ARM, CONSTANT_ARM, GRADUAL_ARM),
    claims=(
        Claim(
            text="Gradual warm-up is better than none",
            first=make_side(GRADUAL_ARM.name),
            second=make_side(NO_WARMUP_ARM.name),
            source="top-1 error 23.74 ± 0.09 against 24.84 ± 0.37 % at 8192 (table 1)",
        ),
        Claim(
            text="Gradual warm-up is better than constant",
            first=make_side(GRADUAL_ARM.name),
            second=make_side(CONSTANT_ARM.name),
            source="23.74 ± 0.09 against 25.88 ± 0.56 %",
        ),
        Claim(
            text="With gradual warm-up the large batch is as good as the base batch",
            first=make_side(GRADUAL_ARM.name),
            second=make_side(BASE_BATCH_ARM.name),
            margin=MARGIN_POINTS,
            source="23.74 ± 0.09 against 23.60 ± 0.12 %",
        ),
    ),
)
