"""ResNet-50 on ImageNet to 93 % top-5: the schedules of fast.ai and DIU, 2018, for 1, 2, 4, 8 and 16 machines.

    imgnet-cluster plan --machines 8 recipes/resnet50_18min.py                 # the table, the steps
    imgnet-cluster launch --local recipes/resnet50_18min.py                    # this machine's GPUs, the table for 1
    imgnet-cluster launch --local --data sample --scale 0.01 recipes/resnet50_18min.py     # a rehearsal, all phases

Small images come first. The batch doubles where other schedules lower the rate. The last epochs use whole rectangles at
288 pixels, so that training ends at the size it is tested on. The machines were p3.16xlarge: 8 V100, 25 Gbit/s. AWS
stopped listing them in 2026; the next of `types` that EC2 offers is taken.

    machines   claimed (comment in train.py)   measured (DAWNBench entry: time to 93 % top-5, top-1 / top-5, price)
        1      109:12 to 93.00                 104.6 min   75.56 / 93.11    $42.66   (another group's run)
        2      54 min to 93.364                none
        4      29:44 to 93.05                  29.71 min   75.72 / 93.008   $48.48
        8      19:04 to 93.0                   18.88 min   75.81 / 93.012   $61.63   (hit at epoch 29)
       16      16:08 to 93.04, pre-warmed      18.09 min   75.67 / 93.11   $118.07   (hit at epoch 38)
    ours: no run yet

Phases: diux-dev/imagenet18 train.py (2 machines: cybertronai/imagenet18), with one phase for each change. The last
phase of 16 machines is written (38, 50) there; the target is reached at its start. `data resize` makes the copies 160
and 352.
"""

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

# fmt: off
one_machine = [
    Phase(epochs=( 0,  7), size=128, batch=512, lr=(1.0, 2.0),          min_scale=0.08,  copy=160),
    Phase(epochs=( 7, 13), size=128, batch=512, lr=(2.0, 0.25),         min_scale=0.08,  copy=160),
    Phase(epochs=(13, 22), size=224, batch=224, lr=(0.4375, 0.04375),   min_scale=0.087, copy=352),
    Phase(epochs=(22, 25), size=224, batch=224, lr=(0.04375, 0.004375), min_scale=0.087, copy=352),
    Phase(epochs=(25, 28), size=288, batch=128, lr=(0.0025, 0.00025),   min_scale=0.5,   rect_val=True),
]

two_machines = [
    Phase(epochs=( 0,  6), size=128, batch=256, lr=(1.5, 3.0),          min_scale=0.08,  copy=160),
    Phase(epochs=( 6, 11), size=128, batch=512, lr=3.0,                 min_scale=0.08,  copy=160),
    Phase(epochs=(11, 13), size=128, batch=512, lr=(3.0, 1.5),          min_scale=0.08,  copy=160),
    Phase(epochs=(13, 16), size=224, batch=224, lr=1.3125,              min_scale=0.087, copy=352),
    Phase(epochs=(16, 23), size=224, batch=224, lr=(1.3125, 0.13125),   min_scale=0.087, copy=352),
    Phase(epochs=(23, 28), size=224, batch=224, lr=(0.13125, 0.013125), min_scale=0.087, copy=352),
    Phase(epochs=(28, 30), size=288, batch=128, lr=(0.0075, 0.00075),   min_scale=0.5,   rect_val=True),
]

four_machines = [
    Phase(epochs=( 0,  6), size=128, batch=256, lr=(2.0, 4.0),          min_scale=0.08,  copy=160),
    Phase(epochs=( 6, 11), size=128, batch=512, lr=4.0,                 min_scale=0.08,  copy=160),
    Phase(epochs=(11, 13), size=128, batch=512, lr=(4.0, 2.0),          min_scale=0.08,  copy=160),
    Phase(epochs=(13, 16), size=224, batch=224, lr=1.75,                min_scale=0.087, copy=352),
    Phase(epochs=(16, 24), size=224, batch=224, lr=(1.75, 0.175),       min_scale=0.087, copy=352),
    Phase(epochs=(24, 28), size=224, batch=224, lr=(0.175, 0.0175),     min_scale=0.087, copy=352),
    Phase(epochs=(28, 30), size=288, batch=128, lr=(0.01, 0.001),       min_scale=0.5,   rect_val=True),
]

eight_machines = [
    Phase(epochs=( 0,  6), size=128, batch=128, lr=(1.92, 3.84),        min_scale=0.08,  copy=160),
    Phase(epochs=( 6, 11), size=128, batch=256, lr=3.84,                min_scale=0.08,  copy=160),
    Phase(epochs=(11, 14), size=128, batch=256, lr=(3.84, 1.92),        min_scale=0.08,  copy=160),
    Phase(epochs=(14, 17), size=224, batch=128, lr=1.92,                min_scale=0.087, copy=352),
    Phase(epochs=(17, 23), size=224, batch=224, lr=(1.92, 0.336),       min_scale=0.087, copy=352),
    Phase(epochs=(23, 29), size=224, batch=224, lr=(0.336, 0.0336),     min_scale=0.087, copy=352),
    Phase(epochs=(29, 36), size=288, batch=128, lr=(0.0192, 0.00192),   min_scale=0.5,   rect_val=True),
]

sixteen_machines = [
    Phase(epochs=( 0,  6), size=128, batch= 64, lr=(1.88, 3.76),        min_scale=0.08,  copy=160),
    Phase(epochs=( 6, 16), size=128, batch=128, lr=3.76,                min_scale=0.08,  copy=160),
    Phase(epochs=(16, 19), size=224, batch= 64, lr=1.88,                min_scale=0.08,  copy=None),
    Phase(epochs=(19, 31), size=224, batch=192, lr=0.564,               min_scale=0.08,  copy=None),
    Phase(epochs=(31, 37), size=224, batch=192, lr=0.0564,              min_scale=0.08,  copy=None),
    Phase(epochs=(37, 38), size=288, batch=128, lr=0.0376,              min_scale=0.5,   rect_val=True),
    Phase(epochs=(38, 50), size=288, batch=128, lr=0.00376,             min_scale=0.5,   copy=None, rect_val=True),
]
# fmt: on

recipe = Recipe(
    name="resnet50_18min",
    data=IMAGENET,
    model=Model(name="resnet50", zero_gamma=True, fc_std=0.01),
    optim=Optim(momentum=0.9, weight_decay=1e-4, norm_decay=False, bias_decay=True),
    tables={1: one_machine, 2: two_machines, 4: four_machines, 8: eight_machines, 16: sixteen_machines},
    machines=16,
    gpus=8,
    target=93.0,
    types=("p3.16xlarge", "p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge", "p4de.24xlarge", "g6e.48xlarge"),
)
