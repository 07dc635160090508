"""SGD, LARS, LAMB and AdamW against their papers' formulas, in numpy and float64, over steps whose rate changes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import Array
from torch import nn

from train.optim import factory
from train.recipe import Optim

RATES = (0.5, 1.0, 3.0, 0.02, 0.7, 0.0, 1.5)
DECAY, M, B1, B2, EPS, TRUST = 0.05, 0.9, 0.8, 0.95, 1e-6, 0.02
SKIPPED = {"0.bias", "1.weight", "1.bias", "4.bias"}  # of `network`: its biases and its norm


def network() -> nn.Sequential:
    """A convolution, a norm and a classifier, with weights of unlike lengths."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5)).double()
    for number, one in enumerate(net.parameters()):
        nn.init.normal_(one, std=10.0 ** (number % 3 - 1))
    return net


def gradients(net: nn.Module) -> Iterator[tuple[float, dict[str, Array]]]:
    """A rate and the gradients of each step: fixed ones, of lengths that differ by layer and step."""
    dice = np.random.default_rng(6)
    for number, rate in enumerate(RATES):
        scale = 10.0 ** (number % 3 - 2)
        yield rate, {name: scale * dice.normal(size=one.shape) for name, one in net.named_parameters()}


def ours(net: nn.Module, **how: Any) -> list[dict[str, Array]]:
    """Every parameter after every step."""
    made, path = factory.build_optimizer(net, Optim(weight_decay=DECAY, **how)), []
    for rate, slopes in gradients(net):
        for name, one in net.named_parameters():
            one.grad = torch.from_numpy(slopes[name]).to(one.dtype)
        factory.set_lr(made, rate)
        made.step()
        path.append({name: one.detach().numpy().astype(np.float64) for name, one in net.named_parameters()})
    return path


class Reference:
    """One parameter's own state."""

    def __init__(self, w: Array, decay: float, skipped: bool) -> None:
        self.w, self.decay, self.skipped, self.t = w, decay, skipped, 0
        self.u, self.v = np.zeros_like(w), np.zeros_like(w)


def sgd(one: Reference, g: Array, rate: float, nesterov: bool = False) -> None:
    """u = m u + g + decay w; w = w - rate u, or with Nesterov's g + m u (Sutskever et al. 2013, torch's form)."""
    g = g + one.decay * one.w
    one.u = M * one.u + g
    one.w = one.w - rate * (g + M * one.u if nesterov else one.u)


def lars(one: Reference, g: Array, rate: float, nesterov: bool = False) -> None:
    """l = trust |w| / (|g| + decay |w|) (You et al. 2017, equation 6); for what is skipped l = 1 without decay."""
    size, slope = np.sqrt((one.w**2).sum()), np.sqrt((g**2).sum())
    local = 1.0 if one.skipped or size == 0 else TRUST * size / (slope + one.decay * size)
    step = local * (g + one.decay * one.w)
    one.u = M * one.u + step
    one.w = one.w - rate * (step + M * one.u if nesterov else one.u)


def moments(one: Reference, g: Array) -> Array:
    """Adam's step of length about 1, with the bias taken out (Kingma and Ba 2014, algorithm 1)."""
    one.t += 1
    one.u, one.v = B1 * one.u + (1 - B1) * g, B2 * one.v + (1 - B2) * g * g
    return np.asarray(one.u / (1 - B1**one.t) / (np.sqrt(one.v / (1 - B2**one.t)) + EPS))


def lamb(one: Reference, g: Array, rate: float) -> None:
    """r = Adam's step + decay w; w = w - rate |w| / |r| r (You et al. 2020, algorithm 2); skipped: |w| / |r| = 1."""
    r = moments(one, g) + one.decay * one.w
    size, length = np.sqrt((one.w**2).sum()), np.sqrt((r**2).sum())
    one.w = one.w - rate * (1.0 if one.skipped or size == 0 or length == 0 else size / length) * r


def adamw(one: Reference, g: Array, rate: float) -> None:
    """Decay beside the step: w = w - rate (Adam's step + decay w) (Loshchilov and Hutter 2017, algorithm 2)."""
    one.w = one.w * (1 - rate * one.decay) - rate * moments(one, g)


def by_hand(net: nn.Module, rule: Callable[..., None], free: set[str], **how: Any) -> list[dict[str, Array]]:
    known = {
        name: Reference(one.detach().numpy().copy(), 0.0 if name in free else DECAY, name in SKIPPED)
        for name, one in net.named_parameters()
    }
    path = []
    for rate, slopes in gradients(net):
        for name, one in known.items():
            rule(one, slopes[name], rate, **how)
        path.append({name: one.w for name, one in known.items()})
    return path


def agree(mine: list[dict[str, Array]], theirs: list[dict[str, Array]]) -> None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-9, atol=1e-12, err_msg=f"step {number}, {name}")


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_formula(nesterov: bool) -> None:
    """Norms do not decay, the classifier's bias does: 2018's --no-bn-wd."""
    net = network()
    expected = by_hand(net, sgd, {"1.weight", "1.bias"}, nesterov=nesterov)
    agree(ours(net, momentum=M, nesterov=nesterov), expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_the_formula_and_skips_norms_and_biases(nesterov: bool) -> None:
    net = network()
    expected = by_hand(net, lars, SKIPPED, nesterov=nesterov)
    agree(ours(net, name="lars", momentum=M, trust=TRUST, nesterov=nesterov), expected)


def test_lamb_is_the_formula_and_skips_norms_and_biases() -> None:
    net = network()
    expected = by_hand(net, lamb, SKIPPED)
    agree(ours(net, name="lamb", betas=(B1, B2), eps=EPS), expected)


def test_adamw_is_the_formula() -> None:
    net = network()
    expected = by_hand(net, adamw, {"1.weight", "1.bias"})
    agree(ours(net, name="adamw", betas=(B1, B2), eps=EPS), expected)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_layer_of_zeros_moves_by_the_plain_step_instead_of_standing_still_for_ever(name: str) -> None:
    """Ratio 1 where |w| is 0 (apex and MLPerf do so too): 0 would keep it there."""
    net = network()
    nn.init.zeros_(net[4].weight)
    nn.init.zeros_(net[0].weight)
    expected = by_hand(net, {"lars": lars, "lamb": lamb}[name], SKIPPED)
    found = ours(net, name=name, momentum=M, trust=TRUST, betas=(B1, B2), eps=EPS)
    agree(found, expected)
    assert np.abs(found[0]["4.weight"]).max() > 0


def test_the_step_of_lars_is_as_long_as_trust_says_whatever_the_gradient() -> None:
    """|step| = rate trust |w| without decay: what holds the update in proportion where linear scaling breaks."""
    for scale in (1e-8, 1.0, 1e8):
        net = network()
        before = net[4].weight.detach().clone()
        made = factory.build_optimizer(net, Optim(name="lars", trust=TRUST, weight_decay=0.0))
        factory.set_lr(made, 2.0)
        net[4].weight.grad = scale * torch.ones_like(before)
        made.step()
        moved = (net[4].weight.detach() - before).norm().item()
        assert moved == pytest.approx(2.0 * TRUST * before.norm().item(), rel=1e-12)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_layerwise_ratios_are_computed_in_single_precision_at_least(name: str) -> None:
    """Jia et al. 2018, section 3.1: |w| / |g| is 2^18 here, which float16 does not know, nor g^2, which is 2^-40."""
    single, half = (nn.Linear(64, 64, bias=False) for _ in range(2))
    nn.init.constant_(single.weight, 0.25)
    half.load_state_dict(single.state_dict())
    half.half()
    for net in (single, half):
        made = factory.build_optimizer(net, Optim(name=name, trust=1.0, eps=1e-8, weight_decay=0.0))
        factory.set_lr(made, 0.25)
        net.weight.grad = torch.full_like(net.weight, 2.0**-20)
        made.step()
    np.testing.assert_allclose(single.weight.detach().numpy(), 0.75 * 0.25, rtol=1e-4)
    np.testing.assert_allclose(half.weight.detach().float().numpy(), single.weight.detach().numpy(), rtol=2e-3)
