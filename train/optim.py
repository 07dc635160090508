"""SGD as the papers mean it: every parameter in exactly one group, decay by the type of module.

torch's SGD keeps the rate out of the momentum buffer (Goyal et al. 2017, equation 9), so no momentum correction is
needed when the rate jumps (their remark 2).
"""

from typing import Any

import torch
from torch import nn

from .recipe import Optim

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


def groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return SGD's parameter groups: those that decay, then those that do not.

    Chosen by module type: names such as "downsample.1" hide norms (a fault of several public trainers).
    """
    decay: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            held = optim.norm_decay if isinstance(module, NORMS) else optim.bias_decay or name != "bias"
            (decay if held else free).append(parameter)
    assert len(seen) == sum(1 for _ in model.parameters()), "a parameter is in no group"
    return [
        {"params": decay, "weight_decay": optim.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def build(model: nn.Module, optim: Optim) -> torch.optim.SGD:
    """Make the optimizer with rate 0: the schedule sets the rate before each step."""
    return torch.optim.SGD(groups(model, optim), lr=0.0, momentum=optim.momentum, nesterov=optim.nesterov)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
