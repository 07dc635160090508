"""LARS and LAMB against their papers' formulas, written again in float64 numpy; what they leave alone; their state."""

import copy
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
    "lars": {"name": "lars", "trust": 0.02, "momentum": 0.9, "weight_decay": 0.01},
    "lars nesterov": {"name": "lars", "trust": 0.02, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    "lars no decay": {"name": "lars", "trust": 0.001, "momentum": 0.0, "weight_decay": 0.0},
    "lamb": {"name": "lamb", "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01},
    "lamb no decay": {"name": "lamb", "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
}


class Net(nn.Module):
    """Two layers that adapt, a norm and biases that do not, and weights that start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.zero = nn.Parameter(torch.zeros(3))
        nn.init.zeros_(self.last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.zero


SKIPPED = {"first.bias", "norm.weight", "norm.bias", "last.bias"}


def net(dtype: torch.dtype = torch.float64) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().to(dtype)


def gradients(model: nn.Module, step: int) -> None:
    """Some gradients: the same for the same step, of very different sizes."""
    made = np.random.default_rng(step)
    for number, one in enumerate(model.parameters()):
        one.grad = torch.from_numpy(made.standard_normal(tuple(one.shape)) * 10.0 ** (number - 3)).to(one.dtype)


def trained(model: nn.Module, how: Optim, rates: Any = RATES, first: int = 0) -> torch.optim.Optimizer:
    made = factory.build_optimizer(model, how)
    move(model, made, rates, first)
    return made


def move(model: nn.Module, made: torch.optim.Optimizer, rates: Any, first: int = 0) -> None:
    for step, rate in enumerate(rates, first):
        gradients(model, step)
        factory.set_lr(made, rate)
        made.step()


class Reference:
    """One parameter by the papers' formulas, in float64 and without torch."""

    def __init__(self, weight: np.ndarray, how: Optim, skip: bool) -> None:
        self.w, self.how, self.skip, self.t = weight.copy(), how, skip, 0
        self.m, self.v = np.zeros_like(weight), np.zeros_like(weight)
        self.decay = 0.0 if skip else how.weight_decay

    def step(self, g: np.ndarray, rate: float) -> None:
        self.t += 1
        (self.lars if self.how.name == "lars" else self.lamb)(g, rate)

    def lars(self, g: np.ndarray, rate: float) -> None:
        """You et al. 2017, equation 6; Goyal et al. 2017, equation 9: the rate is outside of the buffer."""
        length = np.sqrt((self.w**2).sum())
        local = self.how.trust * length / (np.sqrt((g**2).sum()) + self.decay * length)
        d = (1.0 if self.skip or length == 0 else local) * (g + self.decay * self.w)
        self.v = self.how.momentum * self.v + d
        self.w = self.w - rate * (d + self.how.momentum * self.v if self.how.nesterov else self.v)

    def lamb(self, g: np.ndarray, rate: float) -> None:
        """You et al. 2020, algorithm 2, phi the identity."""
        b1, b2 = self.how.betas
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        r = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.how.eps) + self.decay * self.w
        above, below = np.sqrt((self.w**2).sum()), np.sqrt((r**2).sum())
        self.w = self.w - rate * (1.0 if self.skip or above == 0 or below == 0 else above / below) * r


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_the_paper_also_when_the_rate_jumps(name: str) -> None:
    how, model = Optim(**SETTINGS[name]), net()
    expected = {key: Reference(one.detach().numpy(), how, key in SKIPPED) for key, one in model.named_parameters()}
    made = factory.build_optimizer(model, how)
    for step, rate in enumerate(RATES):
        gradients(model, step)
        for key, one in model.named_parameters():
            assert one.grad is not None
            expected[key].step(one.grad.numpy(), rate)
        move(model, made, [rate], step)
        for key, one in model.named_parameters():
            np.testing.assert_allclose(one.detach().numpy(), expected[key].w, rtol=1e-11, atol=1e-13, err_msg=key)


def test_lars_is_the_paper_s_with_the_momentum_corrected_where_the_rate_jumps() -> None:
    """You et al. 2017 keep the rate in the buffer: v = m v + rate l (g + b w); w = w - v. Goyal et al. 2017, remark 2:
    at a jump v must be multiplied by the new rate over the old one. Without that, steps differ after the first jump.
    """
    model = net()
    how = Optim(**SETTINGS["lars"])
    w = model.first.weight.detach().numpy().copy()
    buffers, plain, last = [np.zeros_like(w), np.zeros_like(w)], [w.copy(), w.copy()], RATES[0]
    made = factory.build_optimizer(model, how)
    for step, rate in enumerate(RATES):
        gradients(model, step)
        g = model.first.weight.grad.numpy()  # type: ignore[union-attr]
        for number, corrected in enumerate((True, False)):
            length = np.linalg.norm(plain[number])
            local = how.trust * length / (np.linalg.norm(g) + how.weight_decay * length)
            keep = how.momentum * (rate / last if corrected else 1.0)
            buffers[number] = keep * buffers[number] + rate * local * (g + how.weight_decay * plain[number])
            plain[number] = plain[number] - buffers[number]
        last = rate
        move(model, made, [rate], step)
        mine = model.first.weight.detach().numpy()
        np.testing.assert_allclose(mine, plain[0], rtol=1e-11)
        assert np.allclose(mine, plain[1], rtol=1e-9) is (step < 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_norms_and_biases_are_neither_scaled_nor_decayed(name: str) -> None:
    how, model = Optim(**{**SETTINGS[name], "weight_decay": 0.5}), net()
    made = factory.build_optimizer(model, how)
    adapted, skipped = made.param_groups
    names = {id(one): key for key, one in model.named_parameters()}
    assert {names[id(one)] for one in skipped["params"]} == SKIPPED
    assert (adapted["adapt"], skipped["adapt"], skipped["weight_decay"]) == (True, False, 0.0)
    before = model.norm.weight.detach().clone()
    gradients(model, 0)
    slope = model.norm.weight.grad
    assert slope is not None
    factory.set_lr(made, 0.5)
    made.step()
    moved = (before - model.norm.weight.detach()) / 0.5
    if how.name == "lars":  # plain SGD's first step
        torch.testing.assert_close(moved, slope * (1 + how.momentum * how.nesterov))
    else:  # Adam's first step: the gradient's sign
        torch.testing.assert_close(moved, slope / (slope.abs() + how.eps))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_layer_s_step_does_not_depend_on_how_large_its_gradient_is(name: str) -> None:
    found = []
    for factor in (1.0, 1e4):
        model = net()
        made = factory.build_optimizer(model, Optim(**{**SETTINGS[name], "weight_decay": 0.0, "eps": 1e-30}))
        gradients(model, 0)
        for one in model.parameters():
            one.grad = one.grad * factor  # type: ignore[operator]
        factory.set_lr(made, 0.1)
        made.step()
        found.append(model.first.weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_arithmetic_is_in_float32_whatever_the_parameters_are(name: str, dtype: torch.dtype) -> None:
    """Weights of 1e4 and gradients of 1e-6: their squares leave float16, in which all ratios would be 0 or infinite."""
    how = Optim(**{**SETTINGS[name], "eps": 1e-12})
    weight, gradient = torch.full((300, 300), 1e4, dtype=dtype), torch.full((300, 300), 1e-6, dtype=dtype)
    layer = nn.Linear(300, 300, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    expected = Reference(weight.double().numpy(), how, False)
    made = factory.build_optimizer(layer, how)
    layer.weight.grad = gradient.clone()
    rate = 20.0 if how.name == "lars" else 0.5  # a step that bfloat16's eight bits of the weight can show
    factory.set_lr(made, rate)
    made.step()
    expected.step(gradient.double().numpy(), rate)
    assert layer.weight.dtype == dtype and layer.weight.isfinite().all()
    rough = max(2e-4, torch.finfo(dtype).eps)  # a CPU adds 90,000 squares up one after the other
    torch.testing.assert_close(layer.weight.double(), torch.from_numpy(expected.w), rtol=rough, atol=0)
    assert not torch.equal(layer.weight, weight)
    kept = [one for state in made.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    assert kept and {one.dtype for one in kept} == {torch.float32}


# torch's own keep their state in the parameters' type; the trainer's parameters are never half
KINDS = [*((name, dtype) for name in SETTINGS for dtype in (torch.float64, torch.bfloat16))]


@pytest.mark.parametrize(("name", "dtype"), [*KINDS, ("sgd", torch.float64), ("adamw", torch.float64)], ids=str)
def test_a_saved_state_goes_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    how = Optim(**SETTINGS.get(name, {"name": name, "momentum": 0.9}))
    whole = net(dtype)
    trained(whole, how)
    first = net(dtype)
    made = trained(first, how, RATES[:3])
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": made.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = net(dtype)
    second.load_state_dict(saved["model"])
    other = factory.build_optimizer(second, how)
    other.load_state_dict(saved["optimizer"])
    move(second, other, RATES[3:], 3)
    for (key, one), two in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), key


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd", "adamw"])
def test_what_has_no_gradient_keeps_weights_and_state(name: str) -> None:
    how, model = Optim(**SETTINGS.get(name, {"name": name})), net()
    made = trained(model, how, RATES[:2])
    before = copy.deepcopy((model.first.state_dict(), made.state[model.first.weight]))
    for step in (2, 3):
        gradients(model, step)
        model.first.weight.grad = model.first.bias.grad = None
        made.step()
    assert all(torch.equal(one, before[0][key]) for key, one in model.first.state_dict().items())
    for key, one in made.state[model.first.weight].items():
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(before[1][key])), key


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_loss_scale_is_taken_out_first_and_a_step_with_infinities_is_left_out(name: str, bad: bool) -> None:
    """The scaler of float16, whose arithmetic is the same on a CPU."""
    how = Optim(**SETTINGS[name])
    models = net(torch.float32), net(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, scaled = (factory.build_optimizer(model, how) for model in models)
    gradients(models[0], 0)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        two.grad = one.grad * 1024  # type: ignore[operator]
    if bad:
        models[1].norm.bias.grad[0] = torch.inf  # type: ignore[index]
    scaler.scale(torch.ones(()))
    for made in (plain, scaled):
        factory.set_lr(made, 0.1)
    plain.step()
    scaler.step(scaled)
    scaler.update()
    start = net(torch.float32)
    for one, two, first in zip(*(model.parameters() for model in (*models, start)), strict=True):
        torch.testing.assert_close(two, first if bad else one)
    assert scaler.get_scale() == (512.0 if bad else 1024.0) and bool(scaled.state) is not bad


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_step_never_waits_for_the_device(kind: Any) -> None:
    """Tensors without content: whoever asks one for a number, as `.item()` or `if` do, cannot be answered."""
    with FakeTensorMode():
        model = Net()
        how = Optim(name=kind.__name__.lower(), weight_decay=0.1)
        made = factory.build_optimizer(model, how)
        assert isinstance(made, kind)
        for _ in range(3):
            for one in model.parameters():
                one.grad = torch.ones_like(one)
            factory.set_lr(made, 0.1)
            made.step()
        with pytest.raises(Exception, match=r"item|data-dependent|local_scalar"):
            bool(model.zero.sum() > 0)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_operations_go_over_all_tensors_at_once(name: str) -> None:
    """Ten times the layers are no more calls from Python."""

    def calls(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        made = factory.build_optimizer(model, Optim(name=name))
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        made.step()  # the state is made now
        count = 0

        class Counting(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal count
                count += "foreach" in function.__name__
                return function(*args, **(kwargs or {}))

        with Counting():
            made.step()
        return count

    assert calls(2) == calls(20) > 5
