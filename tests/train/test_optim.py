"""The optimizer: who decays, and a step as the papers write it."""

import pytest
import torch
from torch import nn

from train import optim
from train.models import build
from train.recipe import Model, Optim

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


class Mixed(nn.Module):
    """Every kind of parameter: norms of all sorts under misleading names, biases, a bare one, a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.plain = nn.ModuleList([nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)])
        self.norm_of_name_only = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.ones(3))
        self.shared = nn.Linear(4, 4)
        self.shared.weight = self.norm_of_name_only.weight


def sorts(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Parameters by what they are, told from their modules."""
    found: dict[str, set[nn.Parameter]] = {"norm": set(), "bias": set(), "weight": set()}
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            found["norm" if isinstance(module, NORMS) else "bias" if name == "bias" else "weight"].add(one)
    return found


MODELS = {"mixed": Mixed, "resnet18": lambda: build(Model(name="resnet18"), 10, 0)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm_decay", [True, False])
@pytest.mark.parametrize("bias_decay", [True, False])
def test_decay_holds_by_the_type_of_module(name: str, norm_decay: bool, bias_decay: bool) -> None:
    model = MODELS[name]()
    sort = sorts(model)
    made = optim.build(model, Optim(weight_decay=0.3, norm_decay=norm_decay, bias_decay=bias_decay))
    decay, free = made.param_groups
    assert (decay["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    expected = sort["weight"] | (sort["norm"] if norm_decay else set()) | (sort["bias"] if bias_decay else set())
    assert set(decay["params"]) == expected
    assert set(free["params"]) == set(model.parameters()) - expected


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_group(name: str) -> None:
    model = MODELS[name]()
    grouped = [id(one) for group in optim.groups(model, Optim(bias_decay=False)) for one in group["params"]]
    assert sorted(grouped) == sorted(id(one) for one in model.parameters())


def test_the_rate_is_zero_until_it_is_set_and_then_the_same_for_all() -> None:
    made = optim.build(Mixed(), Optim())
    assert {group["lr"] for group in made.param_groups} == {0.0}
    optim.set_rate(made, 0.7)
    assert {group["lr"] for group in made.param_groups} == {0.7}


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_the_papers_also_when_the_rate_jumps(nesterov: bool) -> None:
    """Goyal et al. 2017, equation 9: u = m u + g; w = w - rate u. The rate is not in u: no momentum correction."""
    model = nn.Linear(3, 1, bias=False).double()
    w, u = model.weight.detach().clone(), torch.zeros(1, 3, dtype=torch.float64)
    made = optim.build(model, Optim(momentum=0.9, weight_decay=0.01, nesterov=nesterov))
    for step, rate in enumerate((0.1, 0.1, 3.0, 0.001, 0.5)):
        x = torch.arange(3.0, dtype=torch.float64) - step
        optim.set_rate(made, rate)
        made.zero_grad()
        model(x).backward()
        made.step()
        g = x[None] + 0.01 * w
        u = 0.9 * u + g
        w = w - rate * (g + 0.9 * u if nesterov else u)
        assert torch.allclose(model.weight, w, rtol=1e-12)
