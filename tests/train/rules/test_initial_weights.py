"""The first weights: blocks that are the identity (Goyal et al. 2017, section 5.1), He's spread, the classifier's."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.models import registry
from train.recipe import MODELS, Model

RESNETS = [name for name in MODELS if name.startswith("resnet")]
BLOCKS = {"resnet10_tiny": 4, "resnet10_cifar": 4, "resnet18": 8, "resnet34": 16, "resnet50": 16, "resnet101": 33,
          "resnet152": 50}  # fmt: skip


@lru_cache(1)
def built(name: str, classes: int = 100) -> Any:
    return registry.build_model(Model(name=name), classes, seed=0)


def blocks(net: nn.Module) -> list[Any]:
    return [one for one in net.modules() if hasattr(one, "shortcut")]


@pytest.mark.parametrize("name", RESNETS)
@torch.no_grad()
def test_at_the_start_every_residual_block_is_its_shortcut(name: str) -> None:
    """gamma = 0 in the last norm of the branch F: relu(F(x) + x) = x for x >= 0, exactly, for every x."""
    found = blocks(built(name))
    assert len(found) == BLOCKS[name]
    identities = 0
    for block in found:
        first = next(one for one in block.modules() if isinstance(one, nn.Conv2d))
        x = torch.rand(2, first.in_channels, 4, 4)
        assert torch.equal(block(x), torch.relu(block.shortcut(x)))
        if isinstance(block.shortcut, nn.Identity):
            identities += 1
            assert torch.equal(block(x), x)
    assert identities >= BLOCKS[name] - 4 and (identities or "10" in name)


@torch.no_grad()
def test_without_it_a_block_is_not() -> None:
    net = registry.build_model(Model(name="resnet18", zero_gamma=False), 10, seed=0)
    x = torch.rand(2, 64, 4, 4)
    assert not any(torch.allclose(block(x), x, atol=0.1) for block in blocks(net)[:2])


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_convolutions_start_with_hes_spread(name: str) -> None:
    """N(0, 2 / (k k outputs)), which keeps the gradient's variance (He et al. 2015b, equation 14)."""
    checked = 0
    for one in built(name).modules():
        if isinstance(one, nn.Conv2d) and one.weight.numel() > 20_000:
            w = one.weight.detach().double().numpy().ravel()
            spread = np.sqrt(2 / (one.kernel_size[0] * one.kernel_size[1] * one.out_channels))
            assert w.std() == pytest.approx(spread, rel=0.03) and abs(w.mean()) < 0.03 * spread
            assert (w**4).mean() / (w**2).mean() ** 2 == pytest.approx(3, rel=0.1)  # a normal distribution's
            assert one.bias is None
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_classifier_starts_at_a_hundredth_and_every_other_norm_at_one(name: str) -> None:
    """fc: N(0, 0.01^2), bias 0; gamma 1 and beta 0 but in the last norm of a block (Goyal et al. 2017, section 5.1)."""
    net = registry.build_model(Model(name=name), 1000, seed=0)
    w = net.fc.weight.detach().double().numpy()
    assert w.std() == pytest.approx(0.01, rel=0.01) and abs(w.mean()) < 1e-4
    assert (w**4).mean() / (w**2).mean() ** 2 == pytest.approx(3, rel=0.05)
    assert not net.fc.bias.any()
    last = {[one for one in block.children() if isinstance(one, nn.BatchNorm2d)][-1] for block in blocks(net)}
    for one in net.modules():
        if isinstance(one, nn.BatchNorm2d):
            assert one.weight.eq(0.0 if one in last else 1.0).all() and not one.bias.any()
