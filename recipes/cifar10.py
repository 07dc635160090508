"""CIFAR-10 as JPEG files with a small residual network, in minutes on two processor cores.

imgnet-cluster launch --local --data data/cifar10 recipes/cifar10.py
"""

from train.recipe import Data, Model, Optim, Phase, Recipe

# fmt: off
recipe = Recipe(
    name="cifar10",
    data=Data(name="cifar10", root="data/cifar10", train=50_000, val=10_000),
    model=Model(name="resnet10_cifar", zero_gamma=False),
    optim=Optim(momentum=0.9, weight_decay=5e-4, bias_decay=False, label_smoothing=0.1),
    machines=1,
    gpus=1,
    types=("c7i.2xlarge", "c6i.2xlarge", "m7i.2xlarge"),
    phases=[
        Phase(epochs=(0, 2),  size=32, batch=64,  lr=(0.02, 0.2), min_scale=0.75),
        Phase(epochs=(2, 7),  size=32, batch=128, lr=(0.2, 0.08), min_scale=0.75),
        Phase(epochs=(7, 10), size=32, batch=128, lr=(0.08, 0.0), min_scale=0.75),
    ],
)
# fmt: on
