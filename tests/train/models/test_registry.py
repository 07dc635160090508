"""Our networks: parameter counts, image shapes, initial weights, strides, and their costs in the forecast."""

from typing import Any

import pytest
import torch
from torch import nn

from train.forecast import MODEL_COSTS
from train.models.alexnet import AlexNet
from train.models.registry import MODEL_BUILDERS, BasicBlock, Bottleneck, ResNet, build_model
from train.recipe import MODELS, Model

SMALL = ["resnet10_tiny", "resnet10_cifar", "resnet18"]
PARAMETERS = {  # with 1000 classes, as in torchvision and the papers
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # Krizhevsky et al. 2012's 60,965,224, without 1,376 biases of convolutions, with 6 norms of 1,632 channels
    "alexnet_bn": 60_965_224 - 1_376 + 2 * 1_632,
}


def build(name: str, classes: int = 10, seed: int = 0, **settings: Any) -> ResNet:
    net = build_model(Model(name=name, **settings), classes, seed)
    assert isinstance(net, ResNet)
    return net


def test_model_builders_match_the_recipes_models() -> None:
    assert tuple(MODEL_BUILDERS) == MODELS


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(32, 32), (33, 47), (64, 96), (160, 32), (32, 161)])
def test_networks_accept_any_image_shape(name: str, shape: tuple[int, int]) -> None:
    net = build(name, classes=7).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, 3, *shape)).shape == (2, 7)


def test_bottleneck_stride_is_in_the_3x3_convolution() -> None:
    strides = [
        (block.conv1.stride, block.conv2.stride, block.conv3.stride, block.conv2.kernel_size)
        for block in build("resnet50").stages
        if isinstance(block, Bottleneck)
    ]
    assert len(strides) == 16
    for block_index, block_strides in enumerate(strides):
        stride_3x3 = (2, 2) if block_index in (3, 7, 13) else (1, 1)
        assert block_strides == ((1, 1), stride_3x3, (1, 1), (3, 3))


def test_build_model_same_seed_same_weights_keeps_rng_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    state, same_seed, other_seed = (build("resnet10_tiny", seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], same_seed[name]) for name in state)
    assert not torch.equal(state["fc.weight"], other_seed["fc.weight"])
    assert not torch.equal(state["stem.0.weight"], other_seed["stem.0.weight"])


# --- AlexNet with batch norm -----------------------------------------------------------------------------------------


def test_alexnet_norm_after_each_convolution_and_pool5() -> None:
    """Jia et al. 2018, section 3.2, figure 3."""
    with torch.device("meta"):
        parts = [type(module).__name__ for module in AlexNet(10).features]
    layer, pool = ["Conv2d", "BatchNorm2d", "ReLU"], ["MaxPool2d"]
    assert parts == [*layer, *pool, *layer, *pool, *layer, *layer, *layer, *pool, "BatchNorm2d"]


def test_alexnet_adaptive_pool_is_identity_at_224() -> None:
    net = build_model(Model(name="alexnet_bn"), 7, 0).eval()
    assert isinstance(net, AlexNet)
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net(x), net.fc(net.hidden(net.features(x).flatten(1))))
        for shape in ((63, 63), (128, 160), (288, 224)):
            assert net(torch.zeros(1, 3, *shape)).shape == (1, 7)


@pytest.mark.parametrize("name", [name for name in PARAMETERS])
def test_forecast_model_costs_match_the_networks(name: str) -> None:
    """The cost is the number of values that the convolutions write at 224 pixels, relative to ResNet-50."""

    def convolution_outputs(name: str) -> int:
        with torch.device("meta"):
            net, output_sizes = MODEL_BUILDERS[name](1000), [0]
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, __, out: output_sizes.append(out[0].numel()))
        with torch.device("meta"):
            net(torch.zeros(2, 3, 224, 224))
        return sum(output_sizes)

    work, parameters = MODEL_COSTS[name]
    assert parameters == PARAMETERS[name]
    assert work == pytest.approx(convolution_outputs(name) / convolution_outputs("resnet50"), abs=0.0006)
