"""Linear against square-root and fixed rate (Goyal et al. 2017, table 2a).

python experiments/studies/scaling.py --data DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.harness.claims import MARGIN_POINTS, Arm, Claim, Experiment, make_side
from experiments.harness.cli import main
from experiments.studies.goyal import BASE_ARM, BASE_RATE, LARGE_ARM, LARGE_BATCH_FACTOR, make_recipe


def rate_arms(gpus: int, name_prefix: str) -> tuple[Arm, ...]:
    """Return half the rate, the rate and twice the rate on so many GPUs, by the linear rule."""
    named = {"half the rate": BASE_RATE / 2, "the rate": BASE_RATE, "twice the rate": 2 * BASE_RATE}
    return tuple(
        Arm(name=f"{name_prefix}{words}", recipe=make_recipe(rate), gpus=gpus) for words, rate in named.items()
    )


BASE_ARMS = rate_arms(1, f"{BASE_ARM.name}, ")
LINEAR_ARMS = rate_arms(LARGE_BATCH_FACTOR, f"{LARGE_ARM.name}, linear, ")
SQUARE_ROOT_ARM = Arm(
    name=f"{LARGE_ARM.name}, square root", recipe=make_recipe(scaling="sqrt"), gpus=LARGE_BATCH_FACTOR
)
FIXED_RATE_ARM = Arm(name=f"{LARGE_ARM.name}, fixed", recipe=make_recipe(scaling="none"), gpus=LARGE_BATCH_FACTOR)

EXPERIMENT = Experiment(
    name="scaling",
    title="2. Linear against square-root and fixed rate",
    description=(
        f"One recipe (goyal.py) at a base batch of {BASE_ARM.name} and at {LARGE_BATCH_FACTOR} times as many images a step, where "
        f"`Optim.scaling` makes of its rate {LARGE_BATCH_FACTOR} times as much, the square root of {LARGE_BATCH_FACTOR} times, or the same. Half "
        "and twice the rate stand beside it: no rule is to win by a rate that was wrong to begin with."
    ),
    arms=(
        BASE_ARMS[1],
        BASE_ARMS[0],
        BASE_ARMS[2],
        LINEAR_ARMS[1],
        LINEAR_ARMS[0],
        LINEAR_ARMS[2],
        SQUARE_ROOT_ARM,
        FIXED_RATE_ARM,
    ),
    claims=(
        Claim(
            text=f"By the linear rule {LARGE_BATCH_FACTOR} times the batch is as good as the base batch",
            first=make_side(LINEAR_ARMS[1].name),
            second=make_side(BASE_ARMS[1].name),
            margin=MARGIN_POINTS,
            source="top-1 error 23.74 ± 0.09 at 8192 against 23.60 ± 0.12 % at 256 (table 2a)",
        ),
        Claim(
            text="The linear rule is better than the square root",
            first=make_side(LINEAR_ARMS[1].name),
            second=make_side(SQUARE_ROOT_ARM.name),
            source="23.74 ± 0.09 against 26.22 ± 0.03 %",
        ),
        Claim(
            text="The linear rule is better than the fixed rate",
            first=make_side(LINEAR_ARMS[1].name),
            second=make_side(FIXED_RATE_ARM.name),
            source="23.74 ± 0.09 against 41.67 ± 0.10 %",
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main([EXPERIMENT]))
