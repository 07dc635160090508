"""LARS and LAMB: half precision, their state, the scale of the loss. Their formulas are in tests/train/rules."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from support.known import known
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.optim import factory
from train.optim.lamb import Lamb
from train.optim.lars import Lars
from train.recipe import Optim

RATES = (0.1, 0.1, 3.0, 0.001, 0.5, 0.5)  # with jumps up and down
SETTINGS: dict[str, dict[str, Any]] = {
    "lars": {"name": "lars", "trust": 0.02, "momentum": 0.9, "weight_decay": 0.01},
    "lars nesterov": {"name": "lars", "trust": 0.02, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    "lars no decay": {"name": "lars", "trust": 0.001, "momentum": 0.0, "weight_decay": 0.0},
    "lamb": {"name": "lamb", "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01},
    "lamb no decay": {"name": "lamb", "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
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


NOT_ADAPTED = {"first.bias", "norm.weight", "norm.bias", "last.bias"}


def make_net(dtype: torch.dtype = torch.float64) -> TinyNet:
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


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_step_is_independent_of_the_gradient_scale(name: str) -> None:
    weights = []
    for factor in (1.0, 1e4):
        model = make_net()
        optimizer = factory.build_optimizer(model, Optim(**{**SETTINGS[name], "weight_decay": 0.0, "eps": 1e-30}))
        set_gradients(model, 0)
        for parameter in model.parameters():
            parameter.grad = known(parameter.grad) * factor
        factory.set_lr(optimizer, 0.1)
        optimizer.step()
        weights.append(model.first.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_step_computes_in_float32_for_half_precision_parameters(name: str, dtype: torch.dtype) -> None:
    """Weights of 1e4 and gradients of 1e-6: their squares leave float16, in which all ratios would be 0 or infinite."""
    optim = Optim(**{**SETTINGS[name], "eps": 1e-12})
    weight, gradient = torch.full((300, 300), 1e4, dtype=dtype), torch.full((300, 300), 1e-6, dtype=dtype)
    layer, exact = (nn.Linear(300, 300, bias=False).to(number_type) for number_type in (dtype, torch.float64))
    for net in (exact, layer):
        net.weight = nn.Parameter(weight.to(net.weight.dtype, copy=True))
        net.weight.grad = gradient.to(net.weight.dtype, copy=True)
        optimizer = factory.build_optimizer(net, optim)
        # A rate that is large enough for bfloat16's eight bits of the weight.
        factory.set_lr(optimizer, 20.0 if optim.name == "lars" else 0.5)
        optimizer.step()
    assert layer.weight.dtype == dtype and layer.weight.isfinite().all()
    tolerance = max(2e-4, torch.finfo(dtype).eps)  # a CPU sums 90,000 squares one after the other
    torch.testing.assert_close(layer.weight.double(), exact.weight, rtol=tolerance, atol=0)
    assert not torch.equal(layer.weight, weight)
    state_tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert state_tensors and {tensor.dtype for tensor in state_tensors} == {torch.float32}


# Not bfloat16 for torch's own optimizers: they keep their state in the type of the parameters, which the trainer never
# has in half precision.
LAYERWISE_CASES = [(name, dtype) for name in SETTINGS for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype"), [*LAYERWISE_CASES, ("sgd", torch.float64), ("adamw", torch.float64)], ids=str
)
def test_load_state_dict_continues_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    optim = Optim(**SETTINGS.get(name, {"name": name, "momentum": 0.9}))
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


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd", "adamw"])
def test_step_without_gradient_keeps_weights_and_state(name: str) -> None:
    optim, model = Optim(**SETTINGS.get(name, {"name": name})), make_net()
    optimizer = train(model, optim, RATES[:2])
    weights = copy.deepcopy(model.first.state_dict())
    state = copy.deepcopy(optimizer.state[model.first.weight])
    for step in (2, 3):
        set_gradients(model, step)
        model.first.weight.grad = model.first.bias.grad = None
        optimizer.step()
    assert all(torch.equal(parameter, weights[key]) for key, parameter in model.first.state_dict().items())
    for key, value in optimizer.state[model.first.weight].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[key])), key


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler_unscales_and_skips_steps_with_infinities(name: str, overflow: bool) -> None:
    """The loss scaler of float16; its arithmetic is the same on a CPU."""
    optim = Optim(**SETTINGS[name])
    models = make_net(torch.float32), make_net(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, scaled = (factory.build_optimizer(model, optim) for model in models)
    set_gradients(models[0], 0)
    for parameter, scaled_parameter in zip(*(model.parameters() for model in models), strict=True):
        scaled_parameter.grad = known(parameter.grad) * 1024
    if overflow:
        models[1].norm.bias.grad[0] = torch.inf  # type: ignore[index]
    scaler.scale(torch.ones(()))
    for optimizer in (plain, scaled):
        factory.set_lr(optimizer, 0.1)
    plain.step()
    scaler.step(scaled)
    scaler.update()
    start = make_net(torch.float32)
    for expected, actual, initial in zip(*(model.parameters() for model in (*models, start)), strict=True):
        torch.testing.assert_close(actual, initial if overflow else expected)
    assert scaler.get_scale() == (512.0 if overflow else 1024.0)
    assert all(state["skipped"] == overflow for state in scaled.state.values()) and len(scaled.state) == 7


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_steps_left_out_for_the_loss_scale_leave_no_trace(name: str) -> None:
    """Infinite gradients at the first step, in the middle and after a resume: the others are steps as without them."""
    optim = Optim(**SETTINGS[name])
    plain_model, model = make_net(torch.float32), make_net(torch.float32)
    plain, scaled = factory.build_optimizer(plain_model, optim), factory.build_optimizer(model, optim)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    factory.set_lr(plain, 0.1)
    factory.set_lr(scaled, 0.1)
    for step, fault in enumerate((torch.inf, 0, 0, torch.nan, 0, -torch.inf, 0)):
        scaler.scale(torch.ones(()))
        set_gradients(model, step)
        for parameter in model.parameters():
            known(parameter.grad).mul_(scaler.get_scale())
        if fault:
            known(model.norm.bias.grad)[0] = fault
        else:
            set_gradients(plain_model, step)
            plain.step()
        scaler.step(scaled)
        scaler.update()
        if step == 4:
            loaded = factory.build_optimizer(model, optim)
            loaded.load_state_dict(copy.deepcopy(scaled.state_dict()))
            scaled = loaded
            factory.set_lr(scaled, 0.1)
    for expected, actual in zip(plain_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    assert all(state["skipped"] == 3 for state in scaled.state.values())


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


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_step_calls_operations_once_for_all_tensors(name: str) -> None:
    """Ten times as many layers do not need more calls from Python."""

    def calls(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = factory.build_optimizer(model, Optim(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the state
        count = 0

        class Counting(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal count
                count += "foreach" in function.__name__
                return function(*args, **(kwargs or {}))

        with Counting():
            optimizer.step()
        return count

    assert calls(2) == calls(20) > 5
