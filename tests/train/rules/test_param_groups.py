"""Rules of parameter groups: each parameter is in exactly one, and norms (and biases, if asked) do not decay.

Small architectures with the kinds of layers of timm and torchvision. Which parameters belong to norms and which are
biases is listed here by hand, name by name.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from train.optim import factory
from train.recipe import Optim


class WithOwnParameters(nn.Module):
    """A module with parameters of its own beside those of its submodules."""

    def __init__(self, own: dict[str, tuple[int, ...]], **parts: nn.Module) -> None:
        super().__init__()
        for name, shape in own.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        for name, part in parts.items():
            self.add_module(name, part)


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm over channels, as ConvNeXt has it."""


class CustomNorm(nn.Module):
    """A norm that is none of torch's, with names that no other norm has. timm has several."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.tau = nn.Parameter(torch.ones(1, 4, 1, 1)), nn.Parameter(torch.zeros(4))


class NormedLinear(nn.Module):
    """No norm in spite of its name: its parameter is a table of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5))


class BatchNormAct(nn.BatchNorm2d):
    """A subclass of a norm with an activation that learns, as in timm."""

    def __init__(self) -> None:
        super().__init__(4)
        self.act = nn.PReLU()


def with_shared_parameters(kind: str) -> nn.Module:
    first, second, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
    if kind == "weight":
        second.weight = first.weight
        return nn.Sequential(first, second)
    return nn.Sequential(first, norm, second, norm)


def norms_of_torch() -> nn.Module:
    norms = (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(4))
    return nn.Sequential(nn.Conv2d(3, 4, 3), *norms, nn.BatchNorm2d(4, affine=False), nn.Linear(4, 4))


def vision_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    own: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, 8), "pos_embed": (1, 5, 8)}
    return WithOwnParameters(own, patch=nn.Conv2d(3, 8, 4), block=layer, norm=nn.LayerNorm(8), head=nn.Linear(8, 3))


def misleading() -> nn.Module:
    """Return a norm under another name, and a Linear named like a norm; trainers that look for 'bn' fail on both."""
    down = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    return WithOwnParameters({}, downsample=down, bn=nn.Linear(4, 4))


def parametrized(layer: nn.Module, name: str) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())
    return nn.Sequential(layer)


def norm_parameters(*modules: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in ("weight", "bias")}


GRU = {f"bias_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")}
ENCODER = norm_parameters("block.norm1", "block.norm2", "norm")
ENCODER_BIASES = {f"block.{name}bias" for name in ("self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.")}
ENCODER_BIASES |= {"patch.bias", "head.bias"}
CASES: dict[str, tuple[Callable[[], nn.Module], set[str], set[str]]] = {  # builder, parameters of norms, biases
    "norms of torch": (norms_of_torch, norm_parameters("1", "2", "3") | {"4.weight"}, {"0.bias", "6.bias"}),
    "norm with own names": (lambda: nn.Sequential(CustomNorm(), nn.Linear(2, 2)), {"0.gain", "0.tau"}, {"1.bias"}),
    "norm with an activation": (
        lambda: nn.Sequential(ChannelNorm(4), BatchNormAct()),
        norm_parameters("0", "1"),
        set(),
    ),
    "parametrized norm": (
        lambda: parametrized(nn.LayerNorm(4), "weight"),
        {"0.bias", "0.parametrizations.weight.original"},
        set(),
    ),
    "not a norm": (lambda: nn.Sequential(NormedLinear()), set(), set()),
    "misleading names": (misleading, norm_parameters("downsample.1"), {"bn.bias"}),
    "vision transformer": (vision_transformer, ENCODER, ENCODER_BIASES),
    "gru": (lambda: nn.GRU(4, 4, bidirectional=True), set(), GRU),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4)), set(), {"0.bias"}),
    "bare parameters": (
        partial(WithOwnParameters, {"scale": (), "table": (3, 4), "bias": (4,), "q_bias": (4,), "bias_table": (9, 2)}),
        set(),
        {"bias", "q_bias"},  # a table of biases is learned as weights are
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), set(), {"bias"}),
    "parametrized bias": (lambda: parametrized(nn.Linear(4, 4), "bias"), set(), {"0.parametrizations.bias.original"}),
    "shared weight": (partial(with_shared_parameters, "weight"), set(), {"0.bias", "1.bias"}),
    "shared norm": (partial(with_shared_parameters, "norm"), norm_parameters("1"), {"0.bias", "2.bias"}),
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_groups_hold_each_parameter_once_with_its_decay(case: str) -> None:
    make, norms, biases = CASES[case]
    for norm_decay, bias_decay in product((False, True), repeat=2):
        layerwise = () if norm_decay else ("lars", "lamb")  # which refuse decay of norms
        for name in ("sgd", "adamw", *layerwise):
            net = make()
            optim = Optim(name=name, weight_decay=0.3, norm_decay=norm_decay, bias_decay=bias_decay)
            without_decay = (set() if norm_decay else norms) | (set() if bias_decay else biases)
            if name in layerwise:
                without_decay = norms | biases  # these optimizers skip both, whatever the recipe says
            names = {tensor: name for name, tensor in net.named_parameters()}
            groups = factory.build_optimizer(net, optim).param_groups
            grouped = [(names[parameter], group) for group in groups for parameter in group["params"]]
            assert sorted(name for name, _ in grouped) == sorted(names.values()), "each in exactly one group"
            assert {name: group["weight_decay"] for name, group in grouped} == {
                name: 0.0 if name in without_decay else 0.3 for name in names.values()
            }
            if name in layerwise:
                assert {name for name, group in grouped if not group["adapt"]} == without_decay
