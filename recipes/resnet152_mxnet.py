"""ResNet-152 on ImageNet with MXNet: Wei Wu's run of 2016 and Mu Li's on 10 machines and more.

    imgnet-cluster plan recipes/resnet152_mxnet.py
    imgnet-cluster launch --local --only resnet152_mxnet_256 --data DIR recipes/resnet152_mxnet.py

Two rules of their time: the rate grows slower than the batch (0.1, 0.5, 1 for 256, 2560, 5120), without warm-up; and
the augmentation ends before the training does: from epoch 100 of 120 on crops of 224 of 256 pixels (`augment=False`).

    batch   rate   drops        claimed
      256   0.1    30, 60, 90   top-1 error 22.25 %, top-5 6.42 % (tornadomeet/ResNet, one crop), 8 M40
     2560   0.5    30, 60, 90   "almost identical convergence rate" (MXNet's image-classification README), 80 GPUs
     5120   1      later        no loss (Mu Li's thesis, section 4.6, as Goyal et al. quote it)
    ours: no run yet

Sources: tornadomeet/ResNet, log/resnet-152.log (256, rate 0.1, momentum 0.9, decay 1e-4), log/README.md (drops;
"disable the recommend aug since epoch 101", which counts from 1) and train_resnet.py: Nesterov's momentum, 120 epochs,
images of 480 pixels made 256 to 480 before a crop of 224, so 22 to 77 % of the centre square and, at the usual ratio of
4 to 3, from 16 % of the image on; "level 1" is a crop of 224 from 256 pixels, mirrored or not. 32 images a GPU there.
Not certain: at 5120 we do not know the epochs of the drops, for the thesis was not read: 40, 70 and 100 are a guess;
nor its machines: 20 of 8 here. Not the same: their net is of the second form (norm and ReLU first), ours v1.5; we
change no colours; MXNet decays gammas but no betas [from memory], here all norms decay and no other bias.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

from ._rows import step_decay_phases

COMMON_FIELDS: dict[str, Any] = {"size": 224, "batch": 32, "min_scale": 0.16}


def make_phases(first_lr: float, drop_epochs: Sequence[int]) -> list[Phase]:
    """Return the phases of 120 epochs; from epoch 100 on they do not augment."""
    last = first_lr / 10 ** sum(one <= 100 for one in drop_epochs)
    before = step_decay_phases(first_lr, 0, [one for one in drop_epochs if one < 100], 100, **COMMON_FIELDS)
    return [*before, Phase(epochs=(100, 120), lr=last, augment=False, **COMMON_FIELDS)]


def recipes() -> Iterator[Recipe]:
    """Yield the three batches, each on as many machines of eight GPUs as it takes with 32 images a GPU."""
    for batch, rate, at in ((256, 0.1, (30, 60, 90)), (2560, 0.5, (30, 60, 90)), (5120, 1.0, (40, 70, 100))):
        yield Recipe(
            name=f"resnet152_mxnet_{batch}",
            data=IMAGENET,
            model=Model(name="resnet152", zero_gamma=False, fc_std=0.03125),  # Xavier: sqrt(2 / 2048)
            optim=Optim(momentum=0.9, nesterov=True, weight_decay=1e-4, norm_decay=True, bias_decay=False),
            phases=make_phases(rate, at),
            machines=batch // 256,
            gpus=8,
            types=("p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge", "p4de.24xlarge"),
        )
