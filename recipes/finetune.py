"""Fine-tune a pretrained ResNet-50 on your own images, in one folder per class: first the classifier, then all layers.

    imgnet-cluster launch --local --data data/own recipes/finetune.py         # data/own/train/<class>/*, val/<class>/*

Copy this file, and put in the numbers of your images and the file of the weights. That is a state dict, such as
torchvision's resnet50 (torch.save of its state_dict()), or a checkpoint of one of our runs. Where the number of classes
differs, the classifier starts from random weights.

    claimed, measured: nothing; the accuracy depends on the images
    ours: no run yet

The two phases follow Howard and Ruder 2018 (the last layer first, then unfreeze), with one cycle each (Smith and Topin
2017). The rates are ours, for 64 images a step: 0.05 for a new classifier, a fifth of it for pretrained weights. Images
have 224 pixels, as such weights were trained on. The last phase validates on whole rectangles, beside the squares.
"""

from train.recipe import Data, Model, Optim, Phase, Recipe

# fmt: off
recipe = Recipe(
    name="finetune",
    data=Data(name="own", root="data/own", train=5_000, val=1_000),
    model=Model(name="resnet50", weights="resnet50.pt"),
    optim=Optim(momentum=0.9, weight_decay=1e-4, bias_decay=False, label_smoothing=0.1),
    machines=1,
    gpus=1,
    types=("g6.2xlarge", "g5.2xlarge", "g6e.2xlarge"),
    phases=[
        Phase(epochs=(0, 2), size=224, batch=64, lr=0.05, shape="one_cycle", min_scale=0.35, frozen=True),
        Phase(epochs=(2, 8), size=224, batch=64, lr=0.01, shape="one_cycle", min_scale=0.35, rect_val=True),
    ],
)
# fmt: on
