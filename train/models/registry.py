"""The network of a recipe with its first weights, and which of its layers makes the scores.

Ours end in a pooling that takes any shape, so sizes and rectangles may change at any step.
"""

import zlib
from collections.abc import Callable

import torch
from torch import nn

from train.recipe.components import Model
from train.tools.errors import TrainingError

from . import external, resnet
from .alexnet import AlexNet
from .resnet import BasicBlock, Bottleneck, ResNet

__all__ = [
    "MODEL_BUILDERS",
    "AlexNet",
    "BasicBlock",
    "Bottleneck",
    "ResNet",
    "build_model",
    "find_classifier",
    "weights_crc32",
]

MODEL_BUILDERS: dict[str, Callable[[int], nn.Module]] = {**resnet.RESNET_BUILDERS, "alexnet_bn": AlexNet}


def build_model(model: Model, classes: int, seed: int, log: Callable[[str], object] = lambda text: None) -> nn.Module:
    """Make the network with its first weights: the same ones for the same seed, on every rank and device.

    `say` is told in a line what of the recipe does not apply to somebody else's network, or was done to it. Raises
    `Expected` where the network cannot be had, or does not make scores [n, classes].
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.name in MODEL_BUILDERS:
            net = MODEL_BUILDERS[model.name](classes)
            for module in net.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if model.zero_gamma and isinstance(module, BasicBlock | Bottleneck):
                    nn.init.zeros_(module.last_norm.weight)  # type: ignore[arg-type]
        else:
            net = external.build_external_model(model, classes, log)
        if model.fc_std is not None:
            init_classifier(net, model, classes)
    return net


def init_classifier(net: nn.Module, model: Model, classes: int) -> None:
    """Draw the classifier's first weights with the recipe's spread, its biases 0. Raises `Expected`."""
    last = find_classifier(net)
    if last is None or not isinstance(last.weight, nn.Parameter):
        raise TrainingError(
            f"model, fc_std: the layer that makes the {classes} scores of {model.name} is not found; fc_std=None "
            "leaves it as it starts"
        )
    nn.init.normal_(last.weight, std=model.fc_std or 0.0)
    if last.bias is not None:
        nn.init.zeros_(last.bias)


def find_classifier(net: nn.Module) -> nn.Linear | nn.Conv2d | None:
    """Return the layer that makes the scores: ours has it as `fc`, another network's was found when it was looked at
    (`foreign.check_scores`). None when no layer is known to make them.
    """
    if isinstance(net, ResNet | AlexNet):
        return net.fc
    name = vars(net).get(external.CLASSIFIER_ATTRIBUTE)
    return None if name is None else net.get_submodule(name)  # type: ignore[return-value]


def weights_crc32(net: nn.Module) -> int:
    """Return a number of 32 bits that tells networks with other weights apart."""
    found = 0
    for one in net.state_dict().values():
        flat = one.detach().cpu().contiguous().view(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
