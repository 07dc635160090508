"""Linear against square-root and fixed rate (Goyal et al. 2017, table 2a).

python experiments/scaling.py --data DIR
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.arms import MARGIN, Arm, Claim, Experiment, side
from experiments.command import main
from experiments.goyal import BASE, LARGE, RATE, TIMES, recipe


def arms(gpus: int, name: str) -> tuple[Arm, ...]:
    """Return half the rate, the rate and twice the rate on so many GPUs, by the linear rule."""
    named = {"half the rate": RATE / 2, "the rate": RATE, "twice the rate": 2 * RATE}
    return tuple(Arm(name=f"{name}{words}", recipe=recipe(rate), gpus=gpus) for words, rate in named.items())


SMALL = arms(1, f"{BASE.name}, ")
LINEAR = arms(TIMES, f"{LARGE.name}, linear, ")
ROOT = Arm(name=f"{LARGE.name}, square root", recipe=recipe(scaling="sqrt"), gpus=TIMES)
FIXED = Arm(name=f"{LARGE.name}, fixed", recipe=recipe(scaling="none"), gpus=TIMES)

EXPERIMENT = Experiment(
    name="scaling",
    title="2. Linear against square-root and fixed rate",
    about=(
        f"One recipe (goyal.py) at a base batch of {BASE.name} and at {TIMES} times as many images a step, where "
        f"`Optim.scaling` makes of its rate {TIMES} times as much, the square root of {TIMES} times, or the same. Half "
        "and twice the rate stand beside it: no rule is to win by a rate that was wrong to begin with."
    ),
    arms=(SMALL[1], SMALL[0], SMALL[2], LINEAR[1], LINEAR[0], LINEAR[2], ROOT, FIXED),
    claims=(
        Claim(
            text=f"By the linear rule {TIMES} times the batch is as good as the base batch",
            first=side(LINEAR[1].name),
            second=side(SMALL[1].name),
            margin=MARGIN,
            source="top-1 error 23.74 ± 0.09 at 8192 against 23.60 ± 0.12 % at 256 (table 2a)",
        ),
        Claim(
            text="The linear rule is better than the square root",
            first=side(LINEAR[1].name),
            second=side(ROOT.name),
            source="23.74 ± 0.09 against 26.22 ± 0.03 %",
        ),
        Claim(
            text="The linear rule is better than the fixed rate",
            first=side(LINEAR[1].name),
            second=side(FIXED.name),
            source="23.74 ± 0.09 against 41.67 ± 0.10 %",
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main([EXPERIMENT]))
