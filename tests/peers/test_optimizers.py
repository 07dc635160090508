"""LARS and LAMB against timm's, on the tensors of a small ResNet in float64, at a rate that changes in each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers import run_script

from train.models.registry import build_model
from train.optim import factory
from train.recipe import Model, Optim

STEPS = 50
LARS: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
CASES: dict[str, tuple[Optim, dict[str, Any]]] = {
    "lars": (Optim(name="lars", **LARS), {**LARS, "eps": 0.0}),
    "lars nesterov": (Optim(name="lars", nesterov=True, **LARS), {**LARS, "eps": 0.0, "nesterov": True}),
    # timm's default clips the norm of all gradients, which is no part of LAMB.
    "lamb": (Optim(name="lamb", weight_decay=0.02), {"weight_decay": 0.02, "eps": 1e-6, "max_grad_norm": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_timms_after_50_steps(name: str, tmp_path: Path) -> None:
    optim, options = CASES[name]
    net = build_model(Model(name="resnet10_tiny"), 10, seed=0).double()
    optimizer = factory.build_optimizer(net, optim)
    parameters = list(net.parameters())
    adapted = {id(parameter) for group in optimizer.param_groups if group["adapt"] for parameter in group["params"]}
    generator = torch.Generator().manual_seed(1)
    rates = [0.1 + 2.0 * torch.rand((), generator=generator).item() for _ in range(STEPS)]
    gradients = [
        [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) for parameter in parameters]
        for _ in range(STEPS)
    ]
    case = {
        "name": optim.name,
        "options": options,
        "weights": [parameter.detach().clone() for parameter in parameters],
        "decays": [id(parameter) in adapted for parameter in parameters],
        "rates": rates,
        "gradients": gradients,
    }
    torch.save(case, tmp_path / "case.pt")
    run_script("timm_optimizers.py", tmp_path / "case.pt", tmp_path / "theirs.pt", module="timm")
    for rate, step_gradients in zip(rates, gradients, strict=True):
        factory.set_lr(optimizer, rate)
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for ours, theirs in zip(parameters, torch.load(tmp_path / "theirs.pt", weights_only=True), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)
