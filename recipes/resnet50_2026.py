"""ResNet-50 on ImageNet to 93 % top-5 with what is known in 2026, on p4d (A100) and p5 (H100). Ours, not yet run.

    imgnet-cluster plan --machines 1,2,4,8 --type p4d.24xlarge,p5.48xlarge --only resnet50_2026 recipes/resnet50_2026.py
    imgnet-cluster launch --local --data DIR --only resnet50_2026 recipes/resnet50_2026.py

Nothing here is tuned: each choice was part of a published run that reached 93 %. docs/recipes-beside-papers.md has the
forecasts.

    claimed     nothing; the entry that the phases follow: 21.63 min to 93.05 % after 21 epochs on 8 V100, one run
    measured    nothing
    ours: no run yet

 1 machine      Alibaba's DAWNBench entry of March 2020 (alibabacloud_resnet50_gn6e_1_machine_tensorflow.json), which
                reached 93 % with the least work: 96, 128, 224 and 288 pixels for 12, 6, 2 and 1 epochs, 2048 images a
                step and 1024 at the end, five epochs of warm-up to 1.2, then a line down to 0.0001, min_scale 0.08 and
                0.5, rectangles, Nesterov, decay 1e-4. It passed 93 by 0.05 points, so here one epoch is added at 224
                and one at 288 pixels. The rate follows their line, over 23 epochs. Where the batch halves for 288
                pixels, the rate is halved by the linear rule (Goyal et al. 2017, 2.1). The warm-up starts at 0.15, the
                rate of 256 images, and rises step by step (Goyal et al., 2.2). Not taken: momentum from 0.96 to 0.90.
 2, 4 machines  the same by the linear rule: up to 8,192 images a step it costs no accuracy (Goyal et al., figure 3). At
                8,192 images the rate is 4.0 at most, the largest that fast.ai's tables have at this batch.
 8 machines     half the batch in each GPU, so that a step has 8,192 images again: 16,384 cost 1.2 points (figure 3).
16 machines     resnet50_2026_lars: Alibaba's entry on 128 V100 (2.63 min to 93.04 after 28 epochs): LARS, 32,768
                images, rate 25 after 14 epochs, a line down to 0.2, trust 0.0008, label smoothing 0.1; half the rate
                where the batch halves. Theirs clipped the trust and cycled the momentum, 0.90 to 0.98; ours does not.

All: no decay on norms (93.2 to 93.48 in imagenet18) and biases, zero-gamma and classifier N(0, 0.01) (Goyal et al.,
5.1), label smoothing 0.1 (all since 2019), copies of 160 and 352 pixels and min_scale 0.087 from the latter
(imagenet18). The trainer chooses channels_last and bf16 by itself. Not taken: blur pooling; EMA (timm: below 0.05);
mixup and cutmix, which pay from 200 epochs on; torch.compile, which takes a minute for each of four sizes.
"""

from collections.abc import Iterator
from dataclasses import replace

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

# fmt: off
one_machine = [
    Phase(epochs=( 0,  5), size=96,  batch=256, lr=1.2, shape="gradual_warmup", copy=160, validate="last"),
    Phase(epochs=( 5, 12), size=96,  batch=256, lr=(1.2, 0.7334),      copy=160, validate="last"),
    Phase(epochs=(12, 18), size=128, batch=256, lr=(0.7334, 0.3334),   copy=160, validate="last"),
    Phase(epochs=(18, 21), size=224, batch=256, lr=(0.3334, 0.1334),   copy=352, min_scale=0.087),
    Phase(epochs=(21, 23), size=288, batch=128, lr=(0.0667, 0.00005),  min_scale=0.5, rect_val=True),
]

two_machines = [
    Phase(epochs=( 0,  5), size=96,  batch=256, lr=2.4, shape="gradual_warmup", copy=160, validate="last"),
    Phase(epochs=( 5, 12), size=96,  batch=256, lr=(2.4, 1.4667),      copy=160, validate="last"),
    Phase(epochs=(12, 18), size=128, batch=256, lr=(1.4667, 0.6668),   copy=160, validate="last"),
    Phase(epochs=(18, 21), size=224, batch=256, lr=(0.6668, 0.2668),   copy=352, min_scale=0.087),
    Phase(epochs=(21, 23), size=288, batch=128, lr=(0.1334, 0.0001),   min_scale=0.5, rect_val=True),
]

four_machines = [
    Phase(epochs=( 0,  5), size=96,  batch=256, lr=4.0, shape="gradual_warmup", copy=160, validate="last"),
    Phase(epochs=( 5, 12), size=96,  batch=256, lr=(4.0, 2.4446),      copy=160, validate="last"),
    Phase(epochs=(12, 18), size=128, batch=256, lr=(2.4446, 1.1114),   copy=160, validate="last"),
    Phase(epochs=(18, 21), size=224, batch=256, lr=(1.1114, 0.4447),   copy=352, min_scale=0.087),
    Phase(epochs=(21, 23), size=288, batch=128, lr=(0.2224, 0.00017),  min_scale=0.5, rect_val=True),
]

eight_machines = [replace(phase, batch=phase.batch // 2) for phase in four_machines]

sixteen_machines = [
    Phase(epochs=( 0, 13), size=96,  batch=256, lr=(0.0, 23.2143),     copy=160, min_scale=0.11, validate="last"),
    Phase(epochs=(13, 14), size=128, batch=256, lr=(23.2143, 25.0),    copy=160, min_scale=0.11, validate="last"),
    Phase(epochs=(14, 24), size=128, batch=256, lr=(25.0, 7.2857),     copy=160, min_scale=0.11, validate="last"),
    Phase(epochs=(24, 27), size=224, batch=256, lr=(7.2857, 1.9714),   copy=352, min_scale=0.11),
    Phase(epochs=(27, 28), size=288, batch=128, lr=(0.9857, 0.1),      min_scale=0.5, rect_val=True),
]
# fmt: on


def recipes() -> Iterator[Recipe]:
    """Yield the recipe for 1 to 8 machines, then the one with LARS for 16 machines."""
    sgd = Recipe(
        name="resnet50_2026",
        data=IMAGENET,
        model=Model(name="resnet50", zero_gamma=True, fc_std=0.01),
        optim=Optim(nesterov=True, weight_decay=1e-4, norm_decay=False, bias_decay=False, label_smoothing=0.1),
        tables={1: one_machine, 2: two_machines, 4: four_machines, 8: eight_machines},
        machines=1,
        gpus=8,
        target=93.0,
        types=("p5.48xlarge", "p4d.24xlarge", "p4de.24xlarge", "g6e.48xlarge"),
    )
    yield sgd
    lars = replace(sgd.optim, name="lars", trust=0.0008)
    yield replace(sgd, name="resnet50_2026_lars", optim=lars, tables={}, phases=sixteen_machines, machines=16)
