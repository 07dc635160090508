"""Builds a recipe's network with its initial weights, and finds the layer that makes the scores (the classifier)."""

import zlib
from collections.abc import Callable

import torch
from torch import nn

from train.recipe.components import Model
from train.tools.errors import TrainingError

from . import external, resnet
from .alexnet import AlexNet
from .resnet import BasicBlock, Bottleneck, ResNet

# The networks of this project, by name; each builder takes the number of classes.
MODEL_BUILDERS: dict[str, Callable[[int], nn.Module]] = {**resnet.RESNET_BUILDERS, "alexnet_bn": AlexNet}


def build_model(model: Model, classes: int, seed: int, log: Callable[[str], object] = lambda text: None) -> nn.Module:
    """Build a network with its initial weights: the same weights for the same seed, on every rank and device.

    `log` receives one line about each setting that does not apply to an external network, and about what was changed in
    one. Raises `TrainingError` when the network cannot be built or does not return scores [n, classes].
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.name in MODEL_BUILDERS:
            net = MODEL_BUILDERS[model.name](classes)
            if model.blurpool:
                resnet.blur_strided_convolutions(net)
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
    """Draw the classifier's weights from N(0, fc_std^2), with bias 0. Raises `TrainingError` if it is not known."""
    classifier = find_classifier(net)
    if classifier is None or not isinstance(classifier.weight, nn.Parameter):
        raise TrainingError(
            f"model, fc_std: cannot find the layer of {model.name} that makes the {classes} scores; set fc_std=None to "
            "keep its own initial weights"
        )
    nn.init.normal_(classifier.weight, std=model.fc_std or 0.0)
    if classifier.bias is not None:
        nn.init.zeros_(classifier.bias)


def find_classifier(net: nn.Module) -> nn.Linear | nn.Conv2d | None:
    """Return the layer that makes the scores: `fc` in our networks, in others as recorded; None if not known."""
    if isinstance(net, ResNet | AlexNet):
        return net.fc
    name = vars(net).get(external.CLASSIFIER_ATTRIBUTE)
    return None if name is None else net.get_submodule(name)  # type: ignore[return-value]


def weights_crc32(net: nn.Module) -> int:
    """Return a 32-bit checksum of all weights and buffers."""
    checksum = 0
    for tensor in net.state_dict().values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum
