"""Optimizers of users, and torch's fused ones. Formulas and groups of parameters are in tests/train/rules."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from train.optim import factory
from train.recipe import Optim
from train.tools.errors import TrainingError


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))


def test_custom_optimizer_gets_groups_and_settings(mine: Any) -> None:
    def build(groups: Any, optim: Optim) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, lr=0.0, momentum=optim.momentum)

    mine.build = build
    settings = Optim(name="mine:build", momentum=0.6, weight_decay=0.2, bias_decay=False)
    optimizer = factory.build_optimizer(make_net(), settings)
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
    (None, "mine has no function build"),
])  # fmt: skip
def test_custom_optimizer_unusable_is_a_one_line_error(mine: Any, build: Any, message: str) -> None:
    """The trainer of 2018 lost every second parameter (facts/seeds.md 1.9)."""
    mine.build = build
    with pytest.raises(TrainingError, match="optim, name: " + message) as caught:
        factory.build_optimizer(make_net(), Optim(name="mine:build"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("was_fused", [True, False])
def test_optimizer_stays_fused_or_not_on_another_device(
    name: str, was_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a GPU is loaded on a CPU, and one of a CPU on a GPU. torch has fused kernels for CPUs too."""

    def build(fused: bool) -> torch.optim.Optimizer:
        monkeypatch.setattr(factory, "can_fuse", lambda _: fused)
        optimizer = factory.build_optimizer(nn.Linear(64, 8), Optim(name=name))
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            parameter.grad = torch.ones_like(parameter)
        return optimizer

    saved = build(was_fused)
    saved.step()
    state = saved.state_dict()
    if name == "sgd" and not was_fused:
        state["state"][1] = {"momentum_buffer": None}  # of a parameter that was frozen
    loaded = build(not was_fused)
    loaded.load_state_dict(state)
    assert {group["fused"] for group in loaded.param_groups} == {None if was_fused else True}
    assert all(value is not None for values in loaded.state.values() for value in values.values())
    loaded.step()
