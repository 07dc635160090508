"""ResNet-50 and AlexNet with LARS: 32,768 and 65,536 images a step. You et al. 2017, Jia et al. 2018 (Tencent).

    imgnet-cluster plan recipes/resnet50_lars.py
    imgnet-cluster launch --local --keep-batch --only resnet50_lars_32k --data DIR recipes/resnet50_lars.py

The rate of each layer is scaled by the norm of its weights over that of its gradient, in fp32: in fp16 the ratio leaves
the range (Jia et al., section 3.1). A linear warm-up is followed by a polynomial of power 2. Norms and biases do not
decay: with their decay 64k reached 71.9 %, without it the accuracy of the baseline (section 3.2). AlexNet has a batch
norm after pool5 (also 3.2).

    recipe              claimed
    resnet50_lars_32k   76.3 % top-1 on a TPU pod (message of TensorFlow's LARS commit)
    resnet50_lars_64k   75.8 % in 6.6 minutes on 2048 P40 (Jia et al.); You et al. 73.2 %
    alexnet_lars_32k    none that we have read
    alexnet_lars_64k    58.7 % in 4 minutes (Jia et al.), 95 epochs
    ours: no run yet

Rates of ResNet-50 are those of Google's reference, tensorflow/tpu models/official/resnet/lars_util.py at 11a028b: for
32,768 images 34.0 after 12 epochs, above it 41.0 after 16, from 0, trust 0.001, decay 1e-4 (resnet_config.py), momentum
0.9. Later versions say 32.0 after 14, and 31.2 after 25. Its optimizer, TensorFlow's, has another form than the paper:
resnet50_lars_32k takes that form, `lars_form="google"`; the others have the paper's. Google's loss contains weight
decay (resnet_main.py), also of the classifier's bias, which does not decay here. AlexNet at 32k: borisgin/nvcaffe,
models/alexnet_bn, solver_32k.prototxt: from 1 to 32 in 10 epochs of 100, decay 5e-4, trust 0.001.

Uncertain: the rates of Jia et al., which we have not read. For AlexNet at 64k, 32 x sqrt(2) = 45.25 is a guess by the
square-root rule, and so are 1024 GPUs with 64 images [recalled]. The machines at 32k, with 32 images a GPU, are our
choice.
"""

from collections.abc import Iterator
from dataclasses import replace

from train.recipe import IMAGENET, Model, Optim, Phase, Recipe

# fmt: off
lars_32k = [
    Phase(epochs=( 0, 12), size=224, batch=32, lr=(0.0, 34.0)),
    Phase(epochs=(12, 90), size=224, batch=32, lr=(34.0, 0.0), shape="polynomial"),
]

lars_64k = [
    Phase(epochs=( 0, 16), size=224, batch=32, lr=(0.0, 41.0)),
    Phase(epochs=(16, 90), size=224, batch=32, lr=(41.0, 0.0), shape="polynomial"),
]

alexnet_32k = [
    Phase(epochs=( 0,  10), size=224, batch=32, lr=(1.0, 32.0)),
    Phase(epochs=(10, 100), size=224, batch=32, lr=(32.0, 0.0), shape="polynomial"),
]

alexnet_64k = [
    Phase(epochs=( 0, 10), size=224, batch=64, lr=(1.0, 45.25)),
    Phase(epochs=(10, 95), size=224, batch=64, lr=(45.25, 0.0), shape="polynomial"),
]
# fmt: on

LARS = Optim(name="lars", momentum=0.9, trust=0.001, weight_decay=1e-4, norm_decay=False, bias_decay=False)


def recipes() -> Iterator[Recipe]:
    """Yield ResNet-50 and AlexNet at both batches."""
    resnet = Recipe(
        name="resnet50_lars_32k",
        data=IMAGENET,
        model=Model(name="resnet50", zero_gamma=True, fc_std=0.01),
        optim=replace(LARS, lars_form="google"),
        phases=lars_32k,
        machines=128,
        gpus=8,
        types=("p5.48xlarge", "p4d.24xlarge", "p4de.24xlarge", "g6e.48xlarge"),
    )
    yield resnet
    yield replace(resnet, name="resnet50_lars_64k", optim=LARS, phases=lars_64k, machines=256)
    alexnet = replace(resnet, model=Model(name="alexnet_bn", fc_std=0.01), optim=replace(LARS, weight_decay=5e-4))
    yield replace(alexnet, name="alexnet_lars_32k", phases=alexnet_32k, machines=128)
    yield replace(alexnet, name="alexnet_lars_64k", phases=alexnet_64k, machines=128)
