"""Our networks: parameter counts, image shapes, strides, and their costs in the forecast.

Their initial weights are tested in tests/train/rules/test_networks.py.
"""

from typing import Any

import pytest
import torch
from torch import nn

from train.forecast import MODEL_COSTS
from train.models.registry import MODEL_BUILDERS, build_model, weights_crc32
from train.models.resnet import Bottleneck
from train.recipe import MODELS, Model

PARAMETERS = {  # with 1000 classes, as in torchvision and the papers
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # Krizhevsky et al. 2012's 60,965,224, without 1,376 biases of convolutions, with 6 norms of 1,632 channels
    "alexnet_bn": 60_965_224 - 1_376 + 2 * 1_632,
}


def test_model_builders_match_the_recipes_models() -> None:
    assert tuple(MODEL_BUILDERS) == MODELS


@pytest.mark.parametrize(("name", "shapes"), [
    *((name, [(33, 47), (160, 32)]) for name in ("resnet10_tiny", "resnet10_cifar", "resnet18")),
    ("alexnet_bn", [(227, 227), (63, 63), (128, 160)]),
])  # fmt: skip
def test_networks_accept_any_image_shape(name: str, shapes: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        net = MODEL_BUILDERS[name](7)
        for shape in shapes:
            assert net(torch.zeros(2, 3, *shape)).shape == (2, 7)


def test_bottleneck_stride_is_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        net: Any = MODEL_BUILDERS["resnet50"](7)
    strides = [
        (block.conv1.stride, block.conv2.stride, block.conv3.stride)
        for block in net.modules()
        if isinstance(block, Bottleneck)
    ]
    assert len(strides) == 16
    for index, block_strides in enumerate(strides):
        assert block_strides == ((1, 1), (2, 2) if index in (3, 7, 13) else (1, 1), (1, 1))


def test_build_model_same_seed_same_weights_keeps_rng_state() -> None:
    before = torch.get_rng_state()
    net, same_seed, other_seed = (build_model(Model(name="resnet10_tiny"), 10, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert weights_crc32(net) == weights_crc32(same_seed) != weights_crc32(other_seed)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_forecast_costs_match_the_networks(name: str) -> None:
    """The cost is the number of values that the convolutions write at 224 pixels, relative to ResNet-50."""

    def parameters_and_outputs(name: str) -> tuple[int, int]:
        output_sizes: list[int] = []
        with torch.device("meta"):
            net = MODEL_BUILDERS[name](1000)
            for module in net.modules():
                if isinstance(module, nn.Conv2d):
                    module.register_forward_hook(lambda _, __, out: output_sizes.append(out[0].numel()))
            net(torch.zeros(2, 3, 224, 224))
        return sum(parameter.numel() for parameter in net.parameters()), sum(output_sizes)

    work, cost_parameters = MODEL_COSTS[name]
    parameters, outputs = parameters_and_outputs(name)
    assert parameters == cost_parameters == PARAMETERS[name]
    assert work == pytest.approx(outputs / parameters_and_outputs("resnet50")[1], abs=0.0006)
