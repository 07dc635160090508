"""Every parameter in exactly one group; none of the norms', and of the biases where asked, decays.

Thirty architectures in small, with all that one meets in timm and torchvision: what is a norm and what a bias is said
here by hand, name by name, and not found out.
"""

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


class Bare(nn.Module):
    """Parameters of its own, beside those of the modules it holds."""

    def __init__(self, own: dict[str, tuple[int, ...]], **parts: nn.Module) -> None:
        super().__init__()
        for name, shape in own.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        for name, part in parts.items():
            self.add_module(name, part)


class FilterResponseNorm(nn.Module):
    """Somebody's own norm (Singh and Krishnan 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, width, 1, 1)), nn.Parameter(torch.zeros(1, width, 1, 1))


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm over channels, as ConvNeXt has it."""


def tied(kind: str) -> nn.Module:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    if kind == "weight":
        two.weight = one.weight
        return nn.Sequential(one, two)
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(one, norm, two, norm) if kind == "norm" else nn.Sequential(one, nn.Sequential(one, two))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[0].requires_grad_(False)
    return net


def conv(norm: Callable[[int], nn.Module] | None = None, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), norm(4) if norm else nn.ReLU(), nn.Conv2d(4, 4, 1))


def sync() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(conv(nn.BatchNorm2d))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    own = {"cls_token": (1, 1, 8), "pos_embed": (1, 5, 8)}
    return Bare(own, patch=nn.Conv2d(3, 8, 4), block=layer, norm=nn.LayerNorm(8), head=nn.Linear(8, 3))


def convnext() -> nn.Module:
    block = Bare({"layer_scale": (4,)}, dwconv=nn.Conv2d(4, 4, 7, groups=4), norm=ChannelNorm(4), pw=nn.Linear(4, 16))
    return nn.Sequential(nn.Conv2d(3, 4, 4), block)


def swin() -> nn.Module:
    attention = Bare({"relative_position_bias_table": (9, 2)}, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))
    return Bare({}, norm1=nn.LayerNorm(8), attn=attention)


def beit() -> nn.Module:
    return Bare({"q_bias": (8,), "v_bias": (8,), "gamma_1": (8,)}, qkv=nn.Linear(8, 24, bias=False))


def squeeze() -> nn.Module:
    return Bare({}, conv=conv(nn.BatchNorm2d, False), se=nn.Sequential(nn.Conv2d(4, 1, 1), nn.Conv2d(1, 4, 1)))


def misleading() -> nn.Module:
    """Norms under other names, and a layer with a norm's name (trainers that look for 'bn' fail on both)."""
    down = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    return Bare({}, downsample=down, bn=nn.Linear(4, 4))


OURS = {name: partial(registry.build_model, Model(name=name), 10, 0) for name in MODELS}
N = ("weight", "bias")


def norm(*modules: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in N}


ENCODER = norm("block.norm1", "block.norm2", "norm")
ENCODER_BIASES = {"patch.bias", "block.self_attn.in_proj_bias", "block.self_attn.out_proj.bias", "block.linear1.bias",
                  "block.linear2.bias", "head.bias"}  # fmt: skip
GRU = {f"bias_{kind}_l0{way}" for kind in ("ih", "hh") for way in ("", "_reverse")}
CASES: dict[str, tuple[Callable[[], nn.Module], set[str], set[str]]] = {  # how it is made, its norms, its biases
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), set(), {"0.bias", "2.bias"}),
    "without a norm": (conv, set(), {"0.bias", "2.bias"}),
    "batch norm": (partial(conv, nn.BatchNorm2d), norm("1"), {"0.bias", "2.bias"}),
    "batch norm, no biases": (partial(conv, nn.BatchNorm2d, False), norm("1"), {"2.bias"}),
    "batch norm, synchronised": (sync, norm("1"), {"0.bias", "2.bias"}),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), norm("1"), {"0.bias"}),
    "batch norm 3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4)), norm("1"), {"0.bias"}),
    "group norm": (partial(conv, partial(nn.GroupNorm, 2)), norm("1"), {"0.bias", "2.bias"}),
    "instance norm": (partial(conv, partial(nn.InstanceNorm2d, affine=True)), norm("1"), {"0.bias", "2.bias"}),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), norm("0"), {"1.bias"}),
    "layer norm of maps": (lambda: nn.Sequential(nn.LayerNorm([4, 3, 3]), nn.Conv2d(4, 4, 1)), norm("0"), {"1.bias"}),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), {"0.weight"}, {"1.bias"}),
    "somebody's norm": (partial(conv, FilterResponseNorm), {"1.gamma", "1.beta"}, {"0.bias", "2.bias"}),
    "misleading names": (misleading, norm("downsample.1"), {"bn.bias"}),
    "vision transformer": (vit, ENCODER, ENCODER_BIASES),
    "convnext": (convnext, norm("1.norm"), {"0.bias", "1.dwconv.bias", "1.pw.bias"}),
    "swin": (swin, norm("norm1"), {"attn.qkv.bias", "attn.proj.bias"}),
    "beit": (beit, set(), {"q_bias", "v_bias"}),
    "squeeze and excitation": (squeeze, norm("conv.1"), {"conv.2.bias", "se.0.bias", "se.1.bias"}),
    "gru": (lambda: nn.GRU(4, 4, bidirectional=True), set(), GRU),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), set(), {"1.bias"}),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4)), set(), {"0.bias"}),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 2), set(), {"bias"}),
    "bilinear": (lambda: nn.Bilinear(2, 3, 4), set(), {"bias"}),
    "bare parameters": (partial(Bare, {"scale": (3,), "table": (3, 4), "bias": (4,)}), set(), {"bias"}),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), set(), {"bias"}),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), set(), {"bias"}),
    "shared weight": (partial(tied, "weight"), set(), {"0.bias", "1.bias"}),
    "shared norm": (partial(tied, "norm"), norm("1"), {"0.bias", "2.bias"}),
    "shared layer": (partial(tied, "layer"), set(), {"0.bias", "1.1.bias"}),
    "partly frozen": (frozen, norm("1"), {"0.bias"}),
}


def check(net: nn.Module, norms: set[str], biases: set[str], norm_decay: bool, bias_decay: bool, name: str) -> None:
    known: dict[str, Any] = dict(net.named_parameters())
    assert norms | biases <= known.keys()
    free = (set() if norm_decay else norms) | (set() if bias_decay else biases)
    if name in ("lars", "lamb"):
        free = norms | biases  # the skip rule, whatever is said of biases
    made = factory.build_optimizer(
        net, Optim(name=name, weight_decay=0.3, norm_decay=norm_decay, bias_decay=bias_decay)
    )
    places = {parameter: one for one, parameter in known.items()}
    held = [(places[one], group) for group in made.param_groups for one in group["params"]]
    assert sorted(one for one, _ in held) == sorted(known), "each in exactly one group"
    assert {one for one, group in held if group["weight_decay"] == 0} == free
    assert {group["weight_decay"] for _, group in held} <= {0.0, 0.3}
    if name in ("lars", "lamb"):
        assert {one for one, group in held if not group["adapt"]} == free


DECAYS = [(False, True), (False, False), (True, True), (True, False)]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_one_group_and_decays_unless_it_is_a_norms_or_a_bias(case: str) -> None:
    make, norms, biases = CASES[case]
    for norm_decay, bias_decay in DECAYS:
        for name in ("sgd", "adamw", *(() if norm_decay else ("lars", "lamb"))):  # those refuse to let norms decay
            check(make(), norms, biases, norm_decay, bias_decay, name)


@pytest.mark.parametrize("name", OURS)
def test_of_our_networks_only_the_classifiers_bias_is_no_norms_among_the_vectors(name: str) -> None:
    """161 tensors in a ResNet-50: 53 convolutions, 53 norms of two each, the classifier's two."""
    with torch.device("meta"):
        net = OURS[name]()
    vectors = {one for one, parameter in net.named_parameters() if parameter.ndim == 1}
    biases = {one for one in vectors if one in ("fc.bias", "hidden.0.bias", "hidden.3.bias")}
    check(net, vectors - biases, biases, False, False, "sgd")
    if name == "resnet50":
        assert len(list(net.parameters())) == 161 and len(vectors) == 2 * 53 + 1


def test_there_are_thirty() -> None:
    assert len(CASES) >= 30
