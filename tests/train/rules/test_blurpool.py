"""Rules of BlurPool (Zhang 2019, "Making convolutional networks shift-invariant again")."""

import torch
from torch import nn
from torch.nn import functional

from train.models import blurpool, registry
from train.recipe import Model


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
    assert torch.equal(16 * blurpool.blur_kernel(), torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]))
    sampling = nn.Conv2d(16, 16, 1, 2, bias=False)
    sampling.weight.copy_(torch.eye(16)[:, :, None, None])
    rows, columns = torch.arange(8)[:, None], torch.arange(8)
    for stripes in ((-1.0) ** columns.expand(8, 8), (-1.0) ** rows.expand(8, 8), (-1.0) ** (rows + columns)):
        x = stripes.expand(1, 16, 8, 8)
        assert torch.equal(sampling(x).abs(), torch.ones(1, 16, 4, 4))
        assert torch.equal(blurpool.BlurredConvolution(sampling)(x)[:, :, 1:, 1:], torch.zeros(1, 16, 3, 3))
    constant = torch.ones(1, 16, 8, 8)
    assert torch.equal(blurpool.BlurredConvolution(sampling)(constant)[:, :, 1:, 1:], torch.ones(1, 16, 3, 3))


@torch.no_grad()
def test_every_strided_convolution_but_the_first_takes_a_blurred_input() -> None:
    """The recipes of FFCV: 16 input channels or more, the blur before the convolution, the same initial weights."""
    plain, blurred = (
        registry.build_model(Model(name="resnet10_tiny", blurpool=blur), 3, seed=0) for blur in (False, True)
    )
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
