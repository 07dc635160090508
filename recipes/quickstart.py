"""The built-in data set, ten kinds of drawn shapes, small enough for two processor cores: from nothing to a result.

    imgnet-cluster launch --local recipes/quickstart.py

It shows the three ideas of 2018 in small: small images first, a batch that grows instead of a rate that falls, whole
rectangles at the end. Zero-gamma is off: in a network of four blocks and 500 steps it costs half of the accuracy
(LOG.md).
"""

from train.recipe import SAMPLE, Model, Optim, Phase, Recipe

# fmt: off
recipe = Recipe(
    name="quickstart",
    data=SAMPLE,
    model=Model(name="resnet10_tiny", zero_gamma=False),
    optim=Optim(momentum=0.9, nesterov=True, weight_decay=5e-4, bias_decay=False, label_smoothing=0.1),
    machines=1,
    gpus=1,
    types=("c7i.2xlarge", "c6i.2xlarge", "m7i.2xlarge"),
    phases=[
        Phase(epochs=(0, 2), size=64, batch=32, lr=(0.005, 0.05), min_scale=0.35, copy=80),
        Phase(epochs=(2, 6), size=64, batch=64, lr=(0.1, 0.05),   min_scale=0.35, copy=80),
        Phase(epochs=(6, 9), size=96, batch=64, lr=(0.05, 0.0),   min_scale=0.5,  copy=128, rect_val=True),
    ],
)
# fmt: on
