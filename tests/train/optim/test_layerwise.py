"""LARS and LAMB: their state, and what a step costs. Their formulas are in tests/train/rules."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.optim import factory
from train.optim.lamb import Lamb
from train.optim.lars import Lars
from train.recipe import Optim

RATES = (0.1, 0.1, 3.0, 0.001, 0.5, 0.5)  # with jumps up and down
SETTINGS: dict[str, dict[str, Any]] = {
    "lars": {"name": "lars", "trust": 0.02, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "lamb": {"name": "lamb", "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01},
}


class TinyNet(nn.Module):
    """Two layers that adapt, a norm and biases that do not, and weights that start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.zero = nn.Parameter(torch.zeros(3))
        nn.init.zeros_(self.last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.zero


def make_net(dtype: torch.dtype) -> TinyNet:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TinyNet().to(dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    """Set gradients of very different sizes, the same ones for the same step."""
    generator = np.random.default_rng(step)
    for number, parameter in enumerate(model.parameters()):
        values = generator.standard_normal(tuple(parameter.shape)) * 10.0 ** (number - 3)
        parameter.grad = torch.from_numpy(values).to(parameter.dtype)


def train(model: nn.Module, optim: Optim, rates: Any = RATES, first: int = 0) -> torch.optim.Optimizer:
    optimizer = factory.build_optimizer(model, optim)
    take_steps(model, optimizer, rates, first)
    return optimizer


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rates: Any, first: int = 0) -> None:
    for step, rate in enumerate(rates, first):
        set_gradients(model, step)
        factory.set_lr(optimizer, rate)
        optimizer.step()


@pytest.mark.parametrize("name", SETTINGS)
def test_load_state_dict_of_half_precision_parameters_continues_with_the_same_bits(name: str) -> None:
    """torch would round the state to the type of the parameters."""
    optim, dtype = Optim(**SETTINGS[name]), torch.bfloat16
    uninterrupted = make_net(dtype)
    train(uninterrupted, optim)
    interrupted = make_net(dtype)
    optimizer = train(interrupted, optim, RATES[:3])
    file = io.BytesIO()
    torch.save({"model": interrupted.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_net(dtype)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = factory.build_optimizer(resumed, optim)
    resumed_optimizer.load_state_dict(saved["optimizer"])
    take_steps(resumed, resumed_optimizer, RATES[3:], 3)
    for (key, expected), actual in zip(uninterrupted.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(actual, expected), key


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_step_never_waits_for_the_device(kind: Any) -> None:
    """Fake tensors have no content: `.item()` or `if` on them, which would wait for the device, raises."""
    with FakeTensorMode():
        model = TinyNet()
        optim = Optim(name=kind.__name__.lower(), weight_decay=0.1)
        optimizer = factory.build_optimizer(model, optim)
        assert isinstance(optimizer, kind)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            factory.set_lr(optimizer, 0.1)
            if step == 2:  # from now on with a loss scale, as `GradScaler.step` sets it
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
            optimizer.step()
        with pytest.raises(Exception, match=r"item|data-dependent|local_scalar"):
            bool(model.zero.sum() > 0)
