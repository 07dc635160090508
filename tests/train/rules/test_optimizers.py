"""Rules of the optimizers and losses: against their papers' formulas in numpy and float64, at changing lr."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import Array, softmax
from torch import nn

from train.optim import factory, losses
from train.recipe import Optim

LEARNING_RATES = (0.5, 1.0, 3.0, 0.02, 0.7, 0.0, 1.5)
DECAY, MOMENTUM, B1, B2, EPS, TRUST = 0.05, 0.9, 0.8, 0.95, 1e-4, 0.02
SKIPPED = {"0.bias", "1.weight", "1.bias", "4.bias"}  # of `network`: parameters that LARS and LAMB skip


def network() -> nn.Sequential:
    """Return a convolution, a norm and a classifier whose weights have norms of different magnitudes."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5)).double()
    for number, parameter in enumerate(net.parameters()):
        nn.init.normal_(parameter, std=10.0 ** (number % 3 - 1))
    return net


def fixed_gradients(net: nn.Module) -> Iterator[tuple[float, dict[str, Array]]]:
    """Yield the learning rate and the gradients of each step; their norms differ by layer and step."""
    generator = np.random.default_rng(6)
    for number, lr in enumerate(LEARNING_RATES):
        scale = 10.0 ** (number % 3 - 2)
        yield lr, {name: scale * generator.normal(size=parameter.shape) for name, parameter in net.named_parameters()}


def optimizer_path(net: nn.Module, **options: Any) -> list[dict[str, Array]]:
    """Return every parameter after every step of our optimizer."""
    optimizer, path = factory.build_optimizer(net, Optim(**{"weight_decay": DECAY, **options})), []
    for lr, gradients in fixed_gradients(net):
        for name, parameter in net.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name]).to(parameter.dtype)
        factory.set_lr(optimizer, lr)
        optimizer.step()
        path.append({name: parameter.detach().numpy().astype(np.float64) for name, parameter in net.named_parameters()})
    return path


class Reference:
    """A parameter and its optimizer state in numpy."""

    def __init__(self, w: Array, decay: float, skipped: bool) -> None:
        self.w, self.decay, self.skipped, self.t = w, decay, skipped, 0
        self.u, self.v = np.zeros_like(w), np.zeros_like(w)


def sgd(state: Reference, g: Array, lr: float, nesterov: bool = False) -> None:
    """u = m u + g + decay w; w = w - lr u; with Nesterov w - lr (g + m u) (Sutskever et al. 2013, torch's form)."""
    g = g + state.decay * state.w
    state.u = MOMENTUM * state.u + g
    state.w = state.w - lr * (g + MOMENTUM * state.u if nesterov else state.u)


def lars(state: Reference, g: Array, lr: float, nesterov: bool = False) -> None:
    """l = trust |w| / (|g| + decay |w|) (You et al. 2017, equation 6); 1 without decay for skipped parameters."""
    weight_norm, gradient_norm = np.sqrt((state.w**2).sum()), np.sqrt((g**2).sum())
    is_scaled = not state.skipped and weight_norm > 0
    ratio = TRUST * weight_norm / (gradient_norm + state.decay * weight_norm) if is_scaled else 1.0
    step = ratio * (g + state.decay * state.w)
    state.u = MOMENTUM * state.u + step
    state.w = state.w - lr * (step + MOMENTUM * state.u if nesterov else state.u)


def lars_of_google(state: Reference, g: Array, lr: float, nesterov: bool = False) -> None:
    """TensorFlow 1's LARSOptimizer, whose ApplyMomentum is u = m u + g; w = w - (l lr) u, or w - (l lr) (g + m u).

    g is the gradient of Google's loss, which contains weight decay. l is 1 for skipped parameters.
    """
    g = g + state.decay * state.w
    weight_norm, gradient_norm = np.sqrt((state.w**2).sum()), np.sqrt((g**2).sum())
    ratio = 1.0 if state.skipped else TRUST * weight_norm / (gradient_norm + state.decay * weight_norm)
    state.u = MOMENTUM * state.u + g
    state.w = state.w - ratio * lr * (g + MOMENTUM * state.u if nesterov else state.u)


def adam_step(state: Reference, g: Array) -> Array:
    """Return Adam's bias-corrected step, of values about 1 (Kingma and Ba 2014, algorithm 1)."""
    state.t += 1
    state.u, state.v = B1 * state.u + (1 - B1) * g, B2 * state.v + (1 - B2) * g * g
    return np.asarray(state.u / (1 - B1**state.t) / (np.sqrt(state.v / (1 - B2**state.t)) + EPS))


def lamb(state: Reference, g: Array, lr: float) -> None:
    """r = Adam's step + decay w; w = w - lr |w| / |r| r (You et al. 2020, algorithm 2); skipped: w - lr r."""
    r = adam_step(state, g) + state.decay * state.w
    weight_norm, step_norm = np.sqrt((state.w**2).sum()), np.sqrt((r**2).sum())
    ratio = 1.0 if state.skipped or weight_norm == 0 else weight_norm / step_norm
    state.w = state.w - lr * ratio * r


def adamw(state: Reference, g: Array, lr: float) -> None:
    """Decoupled decay: w = w - lr (Adam's step + decay w) (Loshchilov and Hutter 2017, algorithm 2)."""
    state.w = state.w * (1 - lr * state.decay) - lr * adam_step(state, g)


def reference_path(
    net: nn.Module, rule: Callable[..., None], without_decay: set[str], decay: float = DECAY, **options: Any
) -> list[dict[str, Array]]:
    references = {
        name: Reference(parameter.detach().numpy().copy(), 0.0 if name in without_decay else decay, name in SKIPPED)
        for name, parameter in net.named_parameters()
    }
    path = []
    for lr, gradients in fixed_gradients(net):
        for name, parameter in references.items():
            rule(parameter, gradients[name], lr, **options)
        path.append({name: parameter.w for name, parameter in references.items()})
    return path


def assert_paths_equal(actual_path: list[dict[str, Array]], expected_path: list[dict[str, Array]]) -> None:
    for step, (actual, expected) in enumerate(zip(actual_path, expected_path, strict=True)):
        assert actual.keys() == expected.keys()
        for name in actual:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-11, atol=1e-13, err_msg=f"{step}, {name}")


NORM = {"1.weight", "1.bias"}  # does not decay; the classifier's bias does, as with 2018's --no-bn-wd
LARS: dict[str, Any] = {"name": "lars", "momentum": MOMENTUM, "trust": TRUST}
LAMB: dict[str, Any] = {"name": "lamb", "betas": (B1, B2), "eps": EPS}


ZEROS = ("0.weight", "4.weight")


@pytest.mark.parametrize(("options", "rule", "without_decay", "zeros"), [
    pytest.param({"momentum": MOMENTUM}, sgd, NORM, (), id="sgd"),
    pytest.param({"momentum": MOMENTUM, "nesterov": True}, sgd, NORM, (), id="nesterov"),
    pytest.param(LARS, lars, SKIPPED, (), id="lars"),
    pytest.param(LARS, lars, SKIPPED, ZEROS, id="lars, layers of zeros"),
    pytest.param({**LARS, "nesterov": True}, lars, SKIPPED, (), id="lars, nesterov"),
    pytest.param({**LARS, "weight_decay": 0.0}, lars, SKIPPED, (), id="lars without decay"),
    pytest.param({**LARS, "lars_form": "google"}, lars_of_google, SKIPPED, (), id="Google's lars"),
    pytest.param({**LARS, "lars_form": "google", "nesterov": True}, lars_of_google, SKIPPED, (),
                 id="Google's lars, nesterov"),
    pytest.param(LAMB, lamb, SKIPPED, (), id="lamb"),
    pytest.param(LAMB, lamb, SKIPPED, ZEROS, id="lamb, layers of zeros"),
    pytest.param({**LAMB, "weight_decay": 0.0}, lamb, SKIPPED, (), id="lamb without decay"),
    pytest.param({**LAMB, "name": "adamw"}, adamw, NORM, (), id="adamw"),
])  # fmt: skip
def test_optimizer_matches_its_formula(
    options: dict[str, Any], rule: Any, without_decay: set[str], zeros: tuple[str, ...]
) -> None:
    """The ratio is 1 where |w| is 0 (as in apex and MLPerf); a ratio of 0 would keep the layer at 0 forever."""
    net = network()
    for name in zeros:
        nn.init.zeros_(net.get_parameter(name))
    of_rule = {"nesterov": True} if options.get("nesterov") else {}
    expected = reference_path(net, rule, without_decay, options.get("weight_decay", DECAY), **of_rule)
    assert_paths_equal(optimizer_path(net, **options), expected)


def final_parameters_with_steps_left_out(**options: Any) -> list[Array]:
    """Return the parameters after `optimizer_path`'s steps, before each of which one with infinities is left out."""
    net = network()
    optimizer = factory.build_optimizer(net, Optim(**{"weight_decay": DECAY, **options}))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for lr, gradients in fixed_gradients(net):
        factory.set_lr(optimizer, lr)
        for is_left_out in (True, False):
            scaler.scale(torch.ones(()))
            for name, parameter in net.named_parameters():
                scaled = torch.from_numpy(gradients[name]).to(parameter.dtype) * scaler.get_scale()
                parameter.grad = scaled.fill_(torch.inf) if is_left_out else scaled
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().numpy() for parameter in net.parameters()]


@pytest.mark.parametrize(("name", "tolerance"), [("lars", 1e-5), ("lamb", 1e-5), ("sgd", 1e-9), ("adamw", 1e-9)])
def test_step_left_out_for_the_loss_scale_leaves_no_trace(
    name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in weights nor in momentum, nor in the count of steps for a bias correction.

    torch's fused SGD keeps uninitialized memory as momentum when its first step is left out; NaN stands for it.
    """
    expected = optimizer_path(network(), name=name, trust=TRUST)[-1]
    monkeypatch.setattr(factory, "can_fuse", lambda _: True)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, **kw: empty_like(like, **kw).fill_(torch.nan))
    actual = final_parameters_with_steps_left_out(name=name, trust=TRUST)
    for values, reference in zip(actual, expected.values(), strict=True):
        np.testing.assert_allclose(values, reference, rtol=tolerance)


GENERATOR = np.random.default_rng(8)
SCORES, LABELS = 4 * GENERATOR.normal(size=(40, 7)), GENERATOR.integers(0, 7, 40)


def cross_entropy(q: Array) -> Array:
    """Return -sum over classes of q log p, p = softmax (Szegedy et al. 2015, section 7)."""
    return np.asarray(-(q * np.log(softmax(SCORES))).sum(1))


def bce(q: Array) -> Array:
    """Return -1/K sum over classes of q log s + (1 - q) log(1 - s), s = sigmoid (Wightman et al. 2021, section 4)."""
    s = 1 / (1 + np.exp(-SCORES))
    return np.asarray(-(q * np.log(s) + (1 - q) * np.log(1 - s)).mean(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
@pytest.mark.parametrize(("name", "formula"), [("cross_entropy", cross_entropy), ("bce", bce)])
def test_loss_of_each_image_matches_formula(name: str, formula: Any, smoothing: float) -> None:
    """q = (1 - e) [k = label] + e / K. The trainer divides the sum by the number of images in the global batch."""
    q = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    own = losses.build_loss(Optim(loss=name, label_smoothing=smoothing))
    np.testing.assert_allclose(own(torch.from_numpy(SCORES), torch.from_numpy(LABELS)), formula(q), rtol=1e-12)
