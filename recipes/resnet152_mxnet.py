"""ResNet-152 on ImageNet with MXNet: Wei Wu's run of 2016, and Mu Li's on 10 machines and more.

    imgnet-cluster plan recipes/resnet152_mxnet.py
    imgnet-cluster launch --local --only resnet152_mxnet_256 --data DIR recipes/resnet152_mxnet.py

They follow two rules of their time. The rate grows more slowly than the batch (0.1, 0.5, 1 for 256, 2560, 5120),
without warm-up. The augmentation ends before the training does: from epoch 100 of 120 on, crops of 224 are taken from
images of 256 pixels (`augment=False`).

    batch   rate   drops        claimed
      256   0.1    30, 60, 90   top-1 error 22.25 %, top-5 6.42 % (tornadomeet/ResNet, one crop), 8 M40
     2560   0.5    30, 60, 90   "almost identical convergence rate" (MXNet's image-classification README), 80 GPUs
     5120   1      later        no loss (Mu Li's thesis, section 4.6, as Goyal et al. quote it)
    ours: no run yet

Sources: tornadomeet/ResNet, log/resnet-152.log (256, rate 0.1, momentum 0.9, decay 1e-4), log/README.md (drops;
"disable the recommend aug since epoch 101", which counts from 1) and train_resnet.py: Nesterov momentum and 120 epochs.
Images of 480 pixels are resized to 256 to 480 pixels before a crop of 224. So a crop covers 22 to 77 % of the centre
square and, at the usual aspect ratio of 4 to 3, at least 16 % of the image. "level 1" is a crop of 224 from 256 pixels,
mirrored or not. They have 32 images a GPU.

Uncertain: at 5120 the epochs of the drops are unknown, because we have not read the thesis; 40, 70 and 100 are a guess.
So are its machines: 20 with 8 GPUs here. Different: their network is of the second form (norm and ReLU first), ours is
v1.5; we do not change colours; MXNet decays gammas but no betas [from memory], here all norms decay and no other bias.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

from ._phases import step_decay_phases

COMMON_FIELDS: dict[str, Any] = {"size": 224, "batch": 32, "min_scale": 0.16}  # Any: fields of several types


def make_phases(first_lr: float, drop_epochs: Sequence[int]) -> list[Phase]:
    """Return the phases of 120 epochs. From epoch 100 on they do not augment."""
    augmented = step_decay_phases(first_lr, 0, [epoch for epoch in drop_epochs if epoch < 100], 100, **COMMON_FIELDS)
    last_lr = first_lr / 10 ** sum(epoch <= 100 for epoch in drop_epochs)
    return [*augmented, Phase(epochs=(100, 120), lr=last_lr, augment=False, **COMMON_FIELDS)]


def recipes() -> Iterator[Recipe]:
    """Yield a recipe for each batch, on as many machines of 8 GPUs as it needs with 32 images a GPU."""
    for batch, rate, drop_epochs in ((256, 0.1, (30, 60, 90)), (2560, 0.5, (30, 60, 90)), (5120, 1.0, (40, 70, 100))):
        yield Recipe(
            name=f"resnet152_mxnet_{batch}",
            data=IMAGENET,
            model=Model(name="resnet152", zero_gamma=False, fc_std=0.03125),  # Xavier: sqrt(2 / 2048)
            optim=Optim(momentum=0.9, nesterov=True, weight_decay=1e-4, norm_decay=True, bias_decay=False),
            phases=make_phases(rate, drop_epochs),
            machines=batch // 256,
            gpus=8,
            types=("p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge", "p4de.24xlarge"),
        )
