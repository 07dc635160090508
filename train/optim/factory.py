"""How weights are moved: every parameter in exactly one group, by the type of its module; the optimizer by its name.

None of ours absorbs the rate into its momentum: torch's SGD (Goyal et al. 2017, equation 9), Lars, Lamb and AdamW keep
it outside, so no momentum correction is needed when the rate jumps (their remark 2).
"""

import inspect
import re
from typing import Any

import torch
from torch import nn

from train.recipe.components import Optim
from train.tools import user_code
from train.tools.errors import TrainingError
from train.tools.filesystem import one_line_error

from .lamb import Lamb
from .lars import Lars

LAYERWISE_OPTIMIZERS = ("lars", "lamb")
NORM_TYPES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# What other people call a norm that is none of torch's: RmsNorm, FilterResponseNormTlu2d. Of one value per channel, for
# a NormedLinear is none.
NORM_NAME_PATTERN = re.compile("norm", re.IGNORECASE)
BIAS_NAME_PATTERN = re.compile(r"(^|_)bias(_|$)")  # bias, in_proj_bias, bias_ih_l0, q_bias


def parameter_kind(model: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Return what a parameter is: "norm", "bias" or "weight".

    By the type of its module: names such as "downsample.1" hide norms (a fault of several public trainers). What
    torch.nn.utils.parametrize has taken apart belongs to the module that it was taken from.
    """
    owner, apart, rest = f".{name}".partition(".parametrizations.")
    if not apart:
        owner, _, rest = f".{name}".rpartition(".")
    module, own = model.get_submodule(owner.removeprefix(".")), rest.split(".")[0]
    if isinstance(module, NORM_TYPES) or (
        NORM_NAME_PATTERN.search(type(module).__name__) and parameter.squeeze().ndim <= 1
    ):
        return "norm"
    flat = parameter.squeeze().ndim <= 1  # a table of position biases is learned as weights are
    return "bias" if flat and BIAS_NAME_PATTERN.search(own) else "weight"


def parameter_groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return the parameters in two groups: those that decay, then those that do not.

    Norms and biases decay as the recipe says; for LARS and LAMB never, and these adapt the first group only (the skip
    rule of You et al. 2017 and 2020, and Jia et al. 2018, section 3.2).
    """
    skip = optim.name in LAYERWISE_OPTIMIZERS
    holds = {"weight": True, "norm": optim.norm_decay and not skip, "bias": optim.bias_decay and not skip}
    decay: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # each once, however many modules share it
        (decay if holds[parameter_kind(model, name, parameter)] else free).append(parameter)
    return [
        {"params": decay, "weight_decay": optim.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Make the optimizer with rate 0: the schedule sets the rate before each step.

    Raises `Expected` when somebody's own cannot be imported, fails, or leaves a parameter out.
    """
    parts = parameter_groups(model, optim)
    match optim.name:
        case "sgd":
            return torch.optim.SGD(parts, lr=0.0, momentum=optim.momentum, nesterov=optim.nesterov)
        case "adamw":
            return torch.optim.AdamW(parts, lr=0.0, betas=optim.betas, eps=optim.eps)
        case "lars" | "lamb":
            layers, rest = parts
            parts = [{**layers, "adapt": True}, {**rest, "adapt": False}]
            if optim.name == "lars":
                return Lars(parts, momentum=optim.momentum, nesterov=optim.nesterov, trust=optim.trust)
            return Lamb(parts, betas=optim.betas, eps=optim.eps)
    return _build_custom_optimizer(model, optim, parts)


def _build_custom_optimizer(
    model: nn.Module, optim: Optim, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    function = user_code.import_function("optim, name", optim.name)
    made = user_code.call_user_code("optim, name", optim.name, lambda: function(param_groups, optim))
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainingError(f"optim, name: {optim.name} must return a torch.optim.Optimizer, not {type(made).__name__}")
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        raise TrainingError(
            f"optim, name: the step of {optim.name} cannot be called without arguments ({one_line_error(error)}), as it is "
            "here; one that needs a closure, such as LBFGS, cannot train"
        ) from error
    held = [id(one) for group in made.param_groups for one in group["params"]]
    if sorted(held) != sorted(id(one) for one in model.parameters()):
        raise TrainingError(f"optim, name: {optim.name} must take every parameter of its groups exactly once")
    return made


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
