"""Optimizers and losses of users, torch's fused optimizers, the cost of a step of LARS and LAMB.

Formulas and groups of parameters are in tests/train/rules.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.optim import factory, losses
from train.optim.layerwise import Lamb, Lars
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
     "mine:build fails, ZeroDivisionError: division by zero, test_optim.py line [0-9]+$"),
    (lambda groups, optim: torch.optim.SGD(groups, lr=-1.0),
     "mine:build fails, ValueError: Invalid learning rate: -1.0"),
    (None, "mine has no function build"),
])  # fmt: skip
def test_custom_optimizer_unusable_is_a_one_line_error(mine: Any, build: Any, message: str) -> None:
    """The trainer of 2018 (diux-dev/imagenet18) lost every second parameter."""
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


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_step_never_waits_for_the_device(kind: Any) -> None:
    """Fake tensors have no content: `.item()` or `if` on them, which would wait for the device, raises."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        optimizer = factory.build_optimizer(model, Optim(name=kind.__name__.lower(), weight_decay=0.1))
        assert isinstance(optimizer, kind)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            factory.set_lr(optimizer, 0.1)
            if step == 2:  # from now on with a loss scale, as `GradScaler.step` sets it
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
            optimizer.step()
        with pytest.raises(Exception, match=r"item|data-dependent|local_scalar"):
            bool(model.get_parameter("0.weight").sum() > 0)


SCORES, LABELS = torch.randn(5, 7), torch.tensor([0, 3, 6, 2, 3])


@pytest.mark.parametrize(("function", "message"), [
    (lambda scores, labels: scores.mean(), r"mine:loss must return each image's loss \[5\], not \[\]"),
    (lambda scores, labels: 0.5, r"mine:loss must return each image's loss \[5\], not float"),
])  # fmt: skip
def test_custom_loss_refuses_anything_but_one_loss_per_image(mine: Any, function: Any, message: str) -> None:
    """The step takes the mean itself, over the images of all processes (Goyal et al. 2017, remark 3)."""
    mine.loss = function
    with pytest.raises(TrainingError, match=message):
        losses.build_loss(Optim(loss="mine:loss"))(SCORES, LABELS)


def test_custom_loss_keeps_the_traceback_after_a_success(mine: Any) -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) < 3:
            raise ValueError("too\nfew")
        return scores[range(len(labels)), labels]

    mine.loss = loss
    custom_loss = losses.build_loss(Optim(loss="mine:loss"))
    with pytest.raises(TrainingError, match=r"loss: mine:loss fails, ValueError: too few, test_optim.py line \d+$"):
        custom_loss(SCORES[:2], LABELS[:2])
    assert torch.equal(custom_loss(SCORES, LABELS), SCORES[range(5), LABELS])
    with pytest.raises(ValueError, match="too\nfew"):
        custom_loss(SCORES[:2], LABELS[:2])
