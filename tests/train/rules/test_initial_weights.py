"""Rules of the initial weights: identity blocks (Goyal et al. 2017, section 5.1), He's std, classifier."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.models import registry
from train.recipe import Model

BLOCKS = {"resnet10_tiny": 4, "resnet18": 8, "resnet50": 16}


@cache
def cached_network(name: str) -> Any:
    return registry.build_model(Model(name=name), 1000, seed=0)


def residual_blocks(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if hasattr(module, "shortcut")]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_zero_gamma_makes_every_block_its_shortcut(name: str) -> None:
    """With gamma = 0 in the last norm of the branch F, relu(F(x) + x) = x exactly, for every x >= 0."""
    found_blocks = residual_blocks(cached_network(name))
    assert len(found_blocks) == BLOCKS[name]
    for block in found_blocks:
        first_convolution = next(module for module in block.modules() if isinstance(module, nn.Conv2d))
        x = torch.rand(2, first_convolution.in_channels, 4, 4)
        assert torch.equal(block(x), torch.relu(block.shortcut(x)))
        if isinstance(block.shortcut, nn.Identity):
            assert torch.equal(block(x), x)


def test_convolutions_start_with_he_standard_deviation() -> None:
    """N(0, 2 / (k k outputs)) keeps the gradient's variance (He et al. 2015b, equation 14)."""
    checked = 0
    for module in cached_network("resnet18").modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 20_000:
            weights = module.weight.detach().double().numpy().ravel()
            expected_std = np.sqrt(2 / (module.kernel_size[0] * module.kernel_size[1] * module.out_channels))
            assert weights.std() == pytest.approx(expected_std, rel=0.03) and abs(weights.mean()) < 0.03 * expected_std
            assert (weights**4).mean() / (weights**2).mean() ** 2 == pytest.approx(
                3, rel=0.1
            )  # kurtosis of a normal distribution
            assert module.bias is None
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_classifier_starts_at_std_0_01_and_other_norms_at_one(name: str) -> None:
    """fc: N(0, 0.01^2), bias 0; gamma 1 and beta 0 but in the last norm of a block (Goyal et al. 2017, section 5.1)."""
    net = cached_network(name)
    weights = net.get_parameter("fc.weight").detach().double().numpy()
    assert weights.std() == pytest.approx(0.01, rel=0.01) and abs(weights.mean()) < 1e-4
    assert (weights**4).mean() / (weights**2).mean() ** 2 == pytest.approx(3, rel=0.05)
    assert not net.get_parameter("fc.bias").any()
    last_norms = {
        [module for module in block.children() if isinstance(module, nn.BatchNorm2d)][-1]
        for block in residual_blocks(net)
    }
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(0.0 if module in last_norms else 1.0).all() and not module.bias.any()
