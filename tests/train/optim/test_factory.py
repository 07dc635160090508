"""The optimizer: which parameters decay, its settings, and optimizers of users."""

import sys
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from train.models.registry import build_model
from train.optim import factory
from train.optim.lamb import Lamb
from train.optim.lars import Lars
from train.recipe import Model, Optim
from train.tools.errors import TrainingError

NORM_TYPES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


class MixedNet(nn.Module):
    """A network with all kinds of parameters: norms under misleading names, biases, a bare and a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.plain = nn.ModuleList([nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)])
        self.norm_of_name_only = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.ones(3))
        self.shared = nn.Linear(4, 4)
        self.shared.weight = self.norm_of_name_only.weight


def parameters_by_kind(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Return a network's norms, biases and weights, told by the types of their modules."""
    by_kind: dict[str, set[nn.Parameter]] = {"norm": set(), "bias": set(), "weight": set()}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = "norm" if isinstance(module, NORM_TYPES) else "bias" if name == "bias" else "weight"
            by_kind[kind].add(parameter)
    return by_kind


MODEL_MAKERS = {"mixed": MixedNet, "resnet18": lambda: build_model(Model(name="resnet18"), 10, 0)}


@pytest.mark.parametrize("name", MODEL_MAKERS)
@pytest.mark.parametrize("norm_decay", [True, False])
@pytest.mark.parametrize("bias_decay", [True, False])
def test_build_optimizer_decays_by_module_type(name: str, norm_decay: bool, bias_decay: bool) -> None:
    model = MODEL_MAKERS[name]()
    by_kind = parameters_by_kind(model)
    optimizer = factory.build_optimizer(model, Optim(weight_decay=0.3, norm_decay=norm_decay, bias_decay=bias_decay))
    decay, free = optimizer.param_groups
    assert (decay["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    expected = (
        by_kind["weight"] | (by_kind["norm"] if norm_decay else set()) | (by_kind["bias"] if bias_decay else set())
    )
    assert set(decay["params"]) == expected
    assert set(free["params"]) == set(model.parameters()) - expected


TIMM_MODELS = (
    "resnet18", "regnetx_002", "efficientnet_b0", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050",
    "swin_tiny_patch4_window7_224", "beit_base_patch16_224", "mixer_s16_224", "nfnet_f0",
)  # fmt: skip


def names_by_group(model: nn.Module, optim: Optim) -> tuple[set[str], set[str]]:
    """Return the names of the parameters with and without decay; check that each parameter is in one group, once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        [names[id(parameter)] for parameter in group["params"]] for group in factory.parameter_groups(model, optim)
    ]
    assert sorted(chain(*groups)) == sorted(names.values())
    decay, free = map(set, groups)
    return decay, free


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_parameter_groups_of_timm_models(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed here")
    model = timm.create_model(name, pretrained=False)
    decay, free = names_by_group(model, Optim(bias_decay=False))
    biases = {name for name, _ in model.named_parameters() if name.endswith((".bias", "q_bias", "v_bias"))}
    assert biases <= free and len(decay) > 10


def test_build_optimizer_takes_all_parameters_and_settings() -> None:
    model = MixedNet()
    for name, kind in {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lars": Lars, "lamb": Lamb}.items():
        optimizer = factory.build_optimizer(model, Optim(name=name, betas=(0.8, 0.9), eps=0.1, momentum=0.7, trust=0.2))
        assert type(optimizer) is kind
        taken = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        assert sorted(taken) == sorted(id(parameter) for parameter in model.parameters())
        settings = {"betas": (0.8, 0.9), "eps": 0.1, "momentum": 0.7, "trust": 0.2}
        first = optimizer.param_groups[0]
        assert all(first[key] == value for key, value in settings.items() if key in first)
        assert ("betas" in first) is (name in ("adamw", "lamb")) and ("trust" in first) is (name == "lars")


# --- optimizers of users ---------------------------------------------------------------------------------------------


def test_custom_optimizer_gets_groups_and_settings(mine: Any) -> None:
    def build(groups: Any, optim: Optim) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, lr=0.0, momentum=optim.momentum)

    mine.build = build
    settings = Optim(name="mine:build", momentum=0.6, weight_decay=0.2, bias_decay=False)
    optimizer = factory.build_optimizer(MixedNet(), settings)
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.6


@pytest.mark.parametrize(("build", "message"), [
    (lambda groups, optim: None, "mine:build must return a torch.optim.Optimizer, not NoneType"),
    (lambda groups, optim: torch.optim.SGD(groups[:1], lr=0.0), "mine:build must take every parameter of its groups"),
    (lambda groups, optim: torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]]),
     r"the step of mine:build cannot be called without arguments \(.*'closure'\), as this trainer calls it; "
     r"an optimizer that needs a"),
    (lambda groups, optim: 1 / 0,
     "mine:build fails, ZeroDivisionError: division by zero, test_factory.py line [0-9]+$"),
    (lambda groups, optim: torch.optim.SGD(groups, lr=-1.0),
     "mine:build fails, ValueError: Invalid learning rate: -1.0"),
    (lambda groups, optim: sys.exit(0), "mine:build fails, SystemExit: 0"),
])  # fmt: skip
def test_custom_optimizer_unusable_is_a_one_line_error(mine: Any, build: Any, message: str) -> None:
    """The trainer of 2018 lost every second parameter (facts/seeds.md 1.9)."""
    mine.build = build
    with pytest.raises(TrainingError, match="optim, name: " + message) as caught:
        factory.build_optimizer(MixedNet(), Optim(name="mine:build"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), [
    ("mine:build", "optim, name: mine has no function build"),
    ("no_such_module_here:build", "optim, name: no_such_module_here cannot be imported here .*PYTHONPATH"),
])  # fmt: skip
def test_custom_optimizer_missing_is_a_one_line_error(mine: Any, name: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message) as caught:
        factory.build_optimizer(MixedNet(), Optim(name=name))
    assert "\n" not in str(caught.value)


def steps_with_loss_scale(optim: Optim, faults: list[float], monkeypatch: pytest.MonkeyPatch, fused: bool) -> Any:
    """Return a network after steps with a loss scale; gradients of a step are infinite where `faults` says so."""
    monkeypatch.setattr(factory, "can_fuse", lambda _: fused)  # torch has the same fused kernels for CPUs
    net = nn.Linear(64, 8)
    nn.init.constant_(net.weight, 0.5)
    nn.init.constant_(net.bias, 0.5)
    junk = [torch.full((8, 64), 1e9) for _ in range(50)]
    del junk  # memory that is used again has numbers in it
    optimizer = factory.build_optimizer(net, optim)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, fault in enumerate(faults):
        factory.set_lr(optimizer, 0.1)
        scaler.scale(torch.ones(()))
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, fault or (step + 1) * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            loaded = factory.build_optimizer(net, optim)
            loaded.load_state_dict(optimizer.state_dict())
            optimizer = loaded
    return net, optimizer


@pytest.mark.parametrize("optim", [Optim(), Optim(nesterov=True), Optim(name="adamw", weight_decay=0.1)])
def test_fused_step_left_out_for_the_loss_scale_leaves_no_trace(optim: Optim, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused SGD takes uninitialized memory for its momentum after a first step that is left out."""
    faults = [torch.inf, 0.0, 0.0, torch.inf, 0.0]
    net, optimizer = steps_with_loss_scale(optim, faults, monkeypatch, fused=True)
    expected, plain = steps_with_loss_scale(optim, faults, monkeypatch, fused=False)
    assert all(group["fused"] for group in optimizer.param_groups) and plain.param_groups[0]["fused"] is None
    for actual, reference in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("was_fused", [True, False])
def test_optimizer_stays_fused_or_not_on_another_device(
    name: str, was_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a GPU is loaded on a CPU, and one of a CPU on a GPU."""
    optim = Optim(name=name)
    _, saved = steps_with_loss_scale(optim, [0.0], monkeypatch, fused=was_fused)
    state = saved.state_dict()
    if name == "sgd" and not was_fused:
        state["state"][1] = {"momentum_buffer": None}  # of a parameter that was frozen
    monkeypatch.setattr(factory, "can_fuse", lambda _: not was_fused)
    loaded = factory.build_optimizer(nn.Linear(64, 8), optim)
    loaded.load_state_dict(state)
    assert {group["fused"] for group in loaded.param_groups} == {None if was_fused else True}
    assert all(value is not None for values in loaded.state.values() for value in values.values())
    for parameter in chain.from_iterable(group["params"] for group in loaded.param_groups):
        parameter.grad = torch.ones_like(parameter)
    loaded.step()


def test_set_lr_sets_all_groups_from_zero() -> None:
    optimizer = factory.build_optimizer(MixedNet(), Optim())
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    factory.set_lr(optimizer, 0.7)
    assert {group["lr"] for group in optimizer.param_groups} == {0.7}
