"""Rules of the networks: their initial weights, and BlurPool (Zhang 2019)."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from train.models import registry, resnet
from train.recipe import Model

BLOCKS = {"resnet10_tiny": 4, "resnet18": 8, "resnet50": 16}


@cache
def cached_network(name: str) -> Any:
    return registry.build_model(Model(name=name), 1000, seed=0)


def residual_blocks(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if hasattr(module, "downsample")]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_zero_gamma_makes_every_block_its_shortcut(name: str) -> None:
    """With gamma = 0 in the last norm of the branch F, relu(F(x) + x) = x exactly, for every x >= 0."""
    found_blocks = residual_blocks(cached_network(name))
    assert len(found_blocks) == BLOCKS[name]
    for block in found_blocks:
        first_convolution = next(module for module in block.modules() if isinstance(module, nn.Conv2d))
        x = torch.rand(2, first_convolution.in_channels, 4, 4)
        assert torch.equal(block(x), torch.relu(block.downsample(x)))
        if isinstance(block.downsample, nn.Identity):
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


def blur_by_shifts(x: torch.Tensor) -> torch.Tensor:
    """Blur with [1, 2, 1] / 4 along height, then width, as weighted sums of shifted copies. Zero padding."""
    for axis in (2, 3):
        padded = functional.pad(x, (0, 0, 1, 1) if axis == 2 else (1, 1))
        size = x.shape[axis]
        before, here, after = (padded.narrow(axis, shift, size) for shift in range(3))
        x = before / 4 + here / 2 + after / 4
    return x


@torch.no_grad()
def test_filter_is_tri_3_and_removes_the_nyquist_frequency() -> None:
    """Section 3.2 and figure 4: Tri-3 is [1, 2, 1] x [1, 2, 1]. What stride 2 would alias to a constant becomes 0."""
    assert torch.equal(16 * resnet.blur_kernel(), torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]))
    sampling = nn.Conv2d(16, 16, 1, 2, bias=False)
    sampling.weight.copy_(torch.eye(16)[:, :, None, None])
    rows, columns = torch.arange(8)[:, None], torch.arange(8)
    for stripes in ((-1.0) ** columns.expand(8, 8), (-1.0) ** rows.expand(8, 8), (-1.0) ** (rows + columns)):
        x = stripes.expand(1, 16, 8, 8)
        assert torch.equal(sampling(x).abs(), torch.ones(1, 16, 4, 4))
        assert torch.equal(resnet.BlurredConvolution(sampling)(x)[:, :, 1:, 1:], torch.zeros(1, 16, 3, 3))
    constant = torch.ones(1, 16, 8, 8)
    assert torch.equal(resnet.BlurredConvolution(sampling)(constant)[:, :, 1:, 1:], torch.ones(1, 16, 3, 3))


@torch.no_grad()
def test_every_strided_convolution_but_the_first_takes_a_blurred_input() -> None:
    """The recipes of FFCV: 16 input channels or more, the blur before the convolution, the same initial weights."""
    plain, blurred = (registry.build_model(Model(name="resnet10_tiny", blurpool=blur), 3, 0) for blur in (False, True))
    convolutions = {key: module for key, module in plain.named_modules() if isinstance(module, nn.Conv2d)}
    found = 0
    for key, convolution in convolutions.items():
        is_strided = convolution.stride != (1, 1) and convolution.in_channels > 3
        found += is_strided
        x = torch.randn(1, convolution.in_channels, 7, 8)
        expected = convolution(blur_by_shifts(x) if is_strided else x)
        torch.testing.assert_close(blurred.get_submodule(key)(x), expected)
    assert found == 6  # one in each of three stages, and its shortcut
    state, expected_state = blurred.state_dict(), plain.state_dict()
    assert list(state) == list(expected_state), "weights of either network fit the other one"
    assert all(torch.equal(state[key], expected_state[key]) for key in state)
