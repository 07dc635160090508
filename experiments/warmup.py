"""Warm-up against none at 32 times the base batch (Goyal et al. 2017, table 1).

python experiments/warmup.py --data DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.arms import MARGIN, Arm, Claim, Experiment, side
from experiments.command import main
from experiments.goyal import BASE, LARGE, RATE, TIMES, recipe

NONE = Arm(name=f"{LARGE.name}, none", recipe=recipe(ramp=RATE), gpus=TIMES)
CONSTANT = Arm(name=f"{LARGE.name}, constant", recipe=recipe(ramp=RATE / TIMES), gpus=TIMES)
GRADUAL = Arm(name=f"{LARGE.name}, gradual", recipe=LARGE.recipe, gpus=TIMES)
FIRST = Arm(name=f"{BASE.name}, gradual", recipe=BASE.recipe)

EXPERIMENT = Experiment(
    name="warmup",
    title="1. Warm-up against none, at 32 times the base batch",
    about=(
        f"{LARGE.name} images a step at {TIMES} times the rate (goyal.py). Only the first two of 11 epochs differ: the "
        f"full rate, the base batch's rate, or a ramp from this to that. The base batch of {BASE.name} is beside them."
    ),
    arms=(FIRST, NONE, CONSTANT, GRADUAL),
    claims=(
        Claim(
            text="Gradual warm-up is better than none",
            first=side(GRADUAL.name),
            second=side(NONE.name),
            source="top-1 error 23.74 ± 0.09 against 24.84 ± 0.37 % at 8192 (table 1)",
        ),
        Claim(
            text="Gradual warm-up is better than constant",
            first=side(GRADUAL.name),
            second=side(CONSTANT.name),
            source="23.74 ± 0.09 against 25.88 ± 0.56 %",
        ),
        Claim(
            text="With gradual warm-up the large batch is as good as the base batch",
            first=side(GRADUAL.name),
            second=side(FIRST.name),
            margin=MARGIN,
            source="23.74 ± 0.09 against 23.60 ± 0.12 %",
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main([EXPERIMENT]))
