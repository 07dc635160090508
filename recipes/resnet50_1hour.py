"""ImageNet in 1 hour: Goyal et al. 2017 (arXiv 1706.02677), 8192 images a step on 256 GPUs, and their baseline of 256.

    imgnet-cluster plan recipes/resnet50_1hour.py                                  # all of them
    imgnet-cluster launch --local --only resnet50_1hour_256 --data DIR recipes/resnet50_1hour.py
    imgnet-cluster launch --local --keep-batch --only resnet50_1hour --data DIR recipes/resnet50_1hour.py   # 8192, here

The linear rule and its warm-up (section 2): a rate of 0.1 for 256 images is 3.2 for 8192. It is reached over five
epochs from 0.1 in equal steps, and divided by 10 at epochs 30, 60 and 80 of 90. Each GPU's batch norm sees n = 32
images, whatever the number of GPUs. Nesterov momentum is the default; plain momentum was as good (section 5.1).

    top-1 error in %, mean of 5 runs        claimed and measured (tables 1 and 2)
    resnet50_1hour_256                      23.60 +- .12
    resnet50_1hour                          23.74 +- .09     1 hour on 256 P100
    resnet50_1hour_constant                 25.88 +- .56     0.1 for five epochs, then 3.2 at once
    resnet50_1hour_cold                     24.84 +- .37     no warm-up
    resnet50_1hour_plain                    "equally good"
    resnet101_1hour_256                     22.08 +- .06
    resnet101_1hour                         22.36 +- .09     92.5 minutes on 256 P100
    ours: no run yet

The paper was read in full. From section 5.1: decay 1e-4 except for batch norm's gamma and beta, He's initialisation,
gamma 0 in the last norm of a block, classifier N(0, 0.01), crops and flips as in fb.resnet.torch. Their schedule has
14,075 steps, ours has 14,130: the last step of an epoch takes the 3,215 images that are left, instead of going on into
the next epoch.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

from ._phases import step_decay_phases

COMMON_FIELDS: dict[str, Any] = {"size": 224, "batch": 32}  # the paper's n = 32
DROP_EPOCHS = (30, 60, 80)
NESTEROV = Optim(momentum=0.9, nesterov=True, weight_decay=1e-4, norm_decay=False, bias_decay=True)

gradual = Phase(epochs=(0, 5), lr=3.2, shape="gradual_warmup", **COMMON_FIELDS)  # from 0.1 to 3.2
constant = Phase(epochs=(0, 5), lr=3.2, shape="constant_warmup", **COMMON_FIELDS)  # holds 0.1
after_warmup = step_decay_phases(3.2, 5, DROP_EPOCHS, 90, **COMMON_FIELDS)

hour = Recipe(
    name="resnet50_1hour",
    data=IMAGENET,
    model=Model(name="resnet50", zero_gamma=True, fc_std=0.01),
    optim=NESTEROV,
    phases=[gradual, *after_warmup],
    machines=32,
    gpus=8,
    types=("p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge", "p4de.24xlarge"),
)
baseline = replace(
    hour, name="resnet50_1hour_256", phases=step_decay_phases(0.1, 0, DROP_EPOCHS, 90, **COMMON_FIELDS), machines=1
)


def recipes() -> Iterator[Recipe]:
    """Yield the rows of the paper's table 1, plain momentum, and ResNet-101 of its table 2c."""
    yield hour
    yield replace(hour, name="resnet50_1hour_constant", phases=[constant, *after_warmup])
    yield replace(hour, name="resnet50_1hour_cold", phases=step_decay_phases(3.2, 0, DROP_EPOCHS, 90, **COMMON_FIELDS))
    yield replace(hour, name="resnet50_1hour_plain", optim=replace(NESTEROV, nesterov=False))
    yield baseline
    for resnet50, name in ((hour, "resnet101_1hour"), (baseline, "resnet101_1hour_256")):
        yield replace(resnet50, name=name, model=replace(hour.model, name="resnet101"))
