"""LARS where the linear rule breaks (You et al. 2017; Jia et al. 2018).

python experiments/lars.py --data DIR
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.arms import MARGIN, Arm, Claim, Experiment, side
from experiments.command import main
from experiments.goyal import BATCH, EPOCHS, RAMP, RATE, recipe, row
from train.recipe import Recipe

TIMES = 128
TRUST = (0.01, 0.02, 0.04)


def poly(rate: float = RATE, **changes: Any) -> Recipe:
    """Return the recipe with LARS' own shape: a ramp, then down to 0 by a parabola."""
    phases = [row(0, RAMP, (rate / TIMES, rate)), row(RAMP, EPOCHS, (rate, 0.0), shape="polynomial")]
    return replace(recipe(**changes), phases=phases)


LARGE = BATCH * TIMES
SMALL = Arm(name=f"{BATCH}, SGD", recipe=poly())
SGD = (
    Arm(name=f"{LARGE}, SGD, linear", recipe=poly(), gpus=TIMES),
    Arm(name=f"{LARGE}, SGD, linear / 4", recipe=poly(RATE / 4), gpus=TIMES),
    Arm(name=f"{LARGE}, SGD, square root", recipe=poly(scaling="sqrt"), gpus=TIMES),
)
LARS = tuple(
    Arm(name=f"{LARGE}, LARS, trust {trust:g}", recipe=poly(name="lars", trust=trust), gpus=TIMES) for trust in TRUST
)

EXPERIMENT = Experiment(
    name="lars",
    title="3. LARS where the linear rule breaks",
    about=(
        f"{LARGE} images a step, {TIMES} times the base batch, over 11 epochs: a ramp of two, then a parabola to 0. "
        "LARS runs at the rate of the linear rule with three trust coefficients; SGD at this rate, a quarter of it, "
        "and by the square root. The best of three is held against the best of three."
    ),
    arms=(SMALL, *SGD, *LARS),
    claims=(
        Claim(
            text=f"With SGD the linear rule still holds at {TIMES} times the batch",
            first=side(SGD[0].name),
            second=side(SMALL.name),
            margin=MARGIN,
            source="up to 32 times (8192) it does; at 64 times the error is 24.79, at 128 27.55 % (Goyal, figure 3)",
        ),
        Claim(
            text=f"At {LARGE} LARS is better than SGD by the linear rule",
            first=side(*(one.name for one in LARS)),
            second=side(SGD[0].name),
            source="ResNet-50 at 65,536: 71.9 against 60.6 % top-1 (Jia et al. 2018)",
        ),
        Claim(
            text=f"At {LARGE} the best LARS is better than the best SGD",
            first=side(*(one.name for one in LARS)),
            second=side(*(one.name for one in SGD)),
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main([EXPERIMENT]))
