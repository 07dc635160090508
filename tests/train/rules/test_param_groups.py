"""Rules of parameter groups: each parameter is in exactly one, and norms (and biases, if asked) do not decay.

About fifty small architectures with the kinds of layers of timm and torchvision. Which parameters belong to norms
and which are biases is listed here by hand, name by name.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from train.models import registry
from train.optim import factory
from train.recipe import MODELS, Model, Optim


class WithOwnParameters(nn.Module):
    """A module with parameters of its own beside those of its submodules."""

    def __init__(self, own: dict[str, tuple[int, ...]], **parts: nn.Module) -> None:
        super().__init__()
        for name, shape in own.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        for name, part in parts.items():
            self.add_module(name, part)


class FilterResponseNorm(nn.Module):
    """A norm that torch does not have (Singh and Krishnan 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, width, 1, 1)), nn.Parameter(torch.zeros(1, width, 1, 1))


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm over channels, as ConvNeXt has it."""


class CustomNorm(nn.Module):
    """A norm that is none of torch's, with names that no other norm has; timm has several."""

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
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    if kind == "weight":
        second.weight = first.weight
        return nn.Sequential(first, second)
    shared_norm = nn.BatchNorm1d(4)
    return (
        nn.Sequential(first, shared_norm, second, shared_norm)
        if kind == "norm"
        else nn.Sequential(first, nn.Sequential(first, second))
    )


def partly_frozen() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[0].requires_grad_(False)
    return net


def convolutional(make_norm: Callable[[int], nn.Module] | None = None, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), make_norm(4) if make_norm else nn.ReLU(), nn.Conv2d(4, 4, 1))


def synchronized_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(convolutional(nn.BatchNorm2d))


def vision_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    own: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, 8), "pos_embed": (1, 5, 8)}
    return WithOwnParameters(own, patch=nn.Conv2d(3, 8, 4), block=layer, norm=nn.LayerNorm(8), head=nn.Linear(8, 3))


def convnext() -> nn.Module:
    block = WithOwnParameters(
        {"layer_scale": (4,)}, dwconv=nn.Conv2d(4, 4, 7, groups=4), norm=ChannelNorm(4), pw=nn.Linear(4, 16)
    )
    return nn.Sequential(nn.Conv2d(3, 4, 4), block)


def swin() -> nn.Module:
    attention = WithOwnParameters({"relative_position_bias_table": (9, 2)}, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))
    return WithOwnParameters({}, norm1=nn.LayerNorm(8), attn=attention)


def beit() -> nn.Module:
    return WithOwnParameters({"q_bias": (8,), "v_bias": (8,), "gamma_1": (8,)}, qkv=nn.Linear(8, 24, bias=False))


def squeeze_and_excitation() -> nn.Module:
    return WithOwnParameters(
        {}, conv=convolutional(nn.BatchNorm2d, False), se=nn.Sequential(nn.Conv2d(4, 1, 1), nn.Conv2d(1, 4, 1))
    )


def misleading() -> nn.Module:
    """Return a norm under another name, and a Linear named like a norm; trainers that look for 'bn' fail on both."""
    down = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    return WithOwnParameters({}, downsample=down, bn=nn.Linear(4, 4))


def all_batch_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))


def nested_lists() -> nn.Module:
    classifiers = nn.ModuleDict({"a": nn.Linear(2, 2), "norm": nn.Linear(2, 2)})
    return nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), classifiers])


def parametrized(layer: nn.Module, name: str) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())
    return nn.Sequential(layer)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


def lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d())
    net(torch.zeros(2, 3, 2, 2))
    return net


OURS = {name: partial(registry.build_model, Model(name=name), 10, 0) for name in MODELS}
NORM_PARAMETERS = ("weight", "bias")


def norm_parameters(*modules: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in NORM_PARAMETERS}


ENCODER = norm_parameters("block.norm1", "block.norm2", "norm")
ENCODER_BIASES = {
    "patch.bias",
    "block.self_attn.in_proj_bias",
    "block.self_attn.out_proj.bias",
    "block.linear1.bias",
    "block.linear2.bias",
    "head.bias",
}
GRU = {f"bias_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")}
CASES: dict[str, tuple[Callable[[], nn.Module], set[str], set[str]]] = {  # builder, parameters of norms, biases
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), set(), {"0.bias", "2.bias"}),
    "without a norm": (convolutional, set(), {"0.bias", "2.bias"}),
    "batch norm": (partial(convolutional, nn.BatchNorm2d), norm_parameters("1"), {"0.bias", "2.bias"}),
    "batch norm, no biases": (partial(convolutional, nn.BatchNorm2d, False), norm_parameters("1"), {"2.bias"}),
    "batch norm, synchronized": (synchronized_norm, norm_parameters("1"), {"0.bias", "2.bias"}),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), norm_parameters("1"), {"0.bias"}),
    "batch norm 3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4)), norm_parameters("1"), {"0.bias"}),
    "group norm": (partial(convolutional, partial(nn.GroupNorm, 2)), norm_parameters("1"), {"0.bias", "2.bias"}),
    "trainer norm": (
        partial(convolutional, partial(nn.InstanceNorm2d, affine=True)),
        norm_parameters("1"),
        {"0.bias", "2.bias"},
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), norm_parameters("0"), {"1.bias"}),
    "layer norm of maps": (
        lambda: nn.Sequential(nn.LayerNorm([4, 3, 3]), nn.Conv2d(4, 4, 1)),
        norm_parameters("0"),
        {"1.bias"},
    ),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), {"0.weight"}, {"1.bias"}),
    "norm unknown to torch": (partial(convolutional, FilterResponseNorm), {"1.gamma", "1.beta"}, {"0.bias", "2.bias"}),
    "misleading names": (misleading, norm_parameters("downsample.1"), {"bn.bias"}),
    "vision transformer": (vision_transformer, ENCODER, ENCODER_BIASES),
    "convnext": (convnext, norm_parameters("1.norm"), {"0.bias", "1.dwconv.bias", "1.pw.bias"}),
    "swin": (swin, norm_parameters("norm1"), {"attn.qkv.bias", "attn.proj.bias"}),
    "beit": (beit, set(), {"q_bias", "v_bias"}),
    "squeeze and excitation": (
        squeeze_and_excitation,
        norm_parameters("conv.1"),
        {"conv.2.bias", "se.0.bias", "se.1.bias"},
    ),
    "gru": (lambda: nn.GRU(4, 4, bidirectional=True), set(), GRU),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), set(), {"1.bias"}),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4)), set(), {"0.bias"}),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 2), set(), {"bias"}),
    "bilinear": (lambda: nn.Bilinear(2, 3, 4), set(), {"bias"}),
    "bare parameters": (partial(WithOwnParameters, {"scale": (3,), "table": (3, 4), "bias": (4,)}), set(), {"bias"}),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), set(), {"bias"}),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), set(), {"bias"}),
    "shared weight": (partial(with_shared_parameters, "weight"), set(), {"0.bias", "1.bias"}),
    "shared norm": (partial(with_shared_parameters, "norm"), norm_parameters("1"), {"0.bias", "2.bias"}),
    "shared layer": (partial(with_shared_parameters, "layer"), set(), {"0.bias", "1.1.bias"}),
    "no parameter but a weight": (lambda: nn.Conv2d(3, 2, 1, bias=False), set(), set()),
    "scalar": (partial(WithOwnParameters, {"scale": ()}), set(), set()),
    "only a norm": (lambda: nn.LayerNorm(3), {"weight", "bias"}, set()),
    "norm without scale": (
        lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Linear(1, 1)),
        set(),
        {"1.bias"},
    ),
    "batch norms of all dimensions": (all_batch_norms, norm_parameters("0", "1", "2", "3"), set()),
    "norm with own names": (
        lambda: nn.Sequential(CustomNorm(), nn.Linear(2, 2)),
        {"0.gain", "0.tau"},
        {"1.bias"},
    ),
    "not a norm": (lambda: nn.Sequential(NormedLinear()), set(), set()),
    "norm with an activation": (
        lambda: nn.Sequential(ChannelNorm(4), BatchNormAct()),
        norm_parameters("0", "1"),
        set(),
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)))),
        norm_parameters("0.0.1"),
        {"0.0.0.bias"},
    ),
    "lists": (nested_lists, set(), {"0.0.bias", "1.a.bias", "1.norm.bias"}),
    "parameter list": (lambda: nn.ParameterList([torch.ones(2), torch.ones(2, 2)]), set(), set()),
    "parameter dict": (lambda: nn.ParameterDict({"bias": torch.ones(2), "w": torch.ones(2, 2)}), set(), {"bias"}),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        set(),
        {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"},
    ),
    "lstm": (lambda: nn.LSTM(2, 2), set(), {"bias_ih_l0", "bias_hh_l0"}),
    "old weight norm": (old_weight_norm, set(), {"bias"}),
    "parametrized norm": (
        lambda: parametrized(nn.LayerNorm(4), "weight"),
        {"0.bias", "0.parametrizations.weight.original"},
        set(),
    ),
    "parametrized bias": (lambda: parametrized(nn.Linear(4, 4), "bias"), set(), {"0.parametrizations.bias.original"}),
    "lazy": (lazy, norm_parameters("1"), {"0.bias"}),
    "partly frozen": (partly_frozen, norm_parameters("1"), {"0.bias"}),
}


def assert_groups(
    net: nn.Module, norms: set[str], biases: set[str], norm_decay: bool, bias_decay: bool, name: str
) -> None:
    parameters: dict[str, Any] = dict(net.named_parameters())
    assert norms | biases <= parameters.keys()
    without_decay = (set() if norm_decay else norms) | (set() if bias_decay else biases)
    if name in ("lars", "lamb"):
        without_decay = norms | biases  # these optimizers skip both, whatever the recipe says
    optimizer = factory.build_optimizer(
        net, Optim(name=name, weight_decay=0.3, norm_decay=norm_decay, bias_decay=bias_decay)
    )
    names = {tensor: parameter_name for parameter_name, tensor in parameters.items()}
    grouped = [(names[parameter_name], group) for group in optimizer.param_groups for parameter_name in group["params"]]
    assert sorted(parameter_name for parameter_name, _ in grouped) == sorted(parameters), "each in exactly one group"
    assert {parameter_name for parameter_name, group in grouped if group["weight_decay"] == 0} == without_decay
    assert {group["weight_decay"] for _, group in grouped} <= {0.0, 0.3}
    if name in ("lars", "lamb"):
        assert {parameter_name for parameter_name, group in grouped if not group["adapt"]} == without_decay


DECAYS = [(False, True), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize("case", CASES)
def test_parameter_groups_hold_each_parameter_once_with_its_decay(case: str) -> None:
    make, norms, biases = CASES[case]
    for norm_decay, bias_decay in DECAYS:
        for name in (
            "sgd",
            "adamw",
            *(() if norm_decay else ("lars", "lamb")),
        ):  # LARS and LAMB do not accept decay of norms
            assert_groups(make(), norms, biases, norm_decay, bias_decay, name)


@pytest.mark.parametrize("name", OURS)
def test_parameter_groups_of_our_networks(name: str) -> None:
    """All vectors are norms' but the biases of the fully connected layers.

    A ResNet-50 has 161 tensors: 53 convolutions, 53 norms of two each, the classifier's two.
    """
    with torch.device("meta"):
        net = OURS[name]()
    vectors = {parameter_name for parameter_name, parameter in net.named_parameters() if parameter.ndim == 1}
    biases = {
        parameter_name for parameter_name in vectors if parameter_name in ("fc.bias", "hidden.0.bias", "hidden.3.bias")
    }
    assert_groups(net, vectors - biases, biases, False, False, "sgd")
    if name == "resnet50":
        assert len(list(net.parameters())) == 161 and len(vectors) == 2 * 53 + 1


def test_cases_cover_thirty_architectures() -> None:
    assert len(CASES) >= 30
