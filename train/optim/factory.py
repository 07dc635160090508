"""Build a recipe's optimizer, with every parameter in exactly one group.

None of the built-in optimizers absorbs the learning rate into its momentum: torch's SGD (Goyal et al. 2017, equation
9), Lars, Lamb and AdamW keep it outside. So no momentum correction is needed when it jumps (their remark 2).
"""

import inspect
import re

import torch
from torch import nn

from train.recipe.components import Optim
from train.tools import user_code
from train.tools.errors import TrainingError, one_line_error

from .layerwise import Lamb, Lars, ParamDict

LAYERWISE_OPTIMIZERS = ("lars", "lamb")
NORM_TYPES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Class names of norms that are not torch's, such as RmsNorm and FilterResponseNormTlu2d. They count as norms only for
# parameters with one value per channel: a NormedLinear is none.
NORM_NAME_PATTERN = re.compile("norm", re.IGNORECASE)
BIAS_NAME_PATTERN = re.compile(r"(^|_)bias(_|$)")  # bias, in_proj_bias, bias_ih_l0, q_bias


def parameter_kind(model: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Return what a parameter of the model is: "norm", "bias" or "weight".

    Norms are recognized by the type of their module: names such as "downsample.1" hide them, a fault of several public
    trainers. A parameter that torch.nn.utils.parametrize has split off belongs to the module that it was split from.
    """
    owner, parametrized, rest = f".{name}".partition(".parametrizations.")
    if not parametrized:
        owner, _, rest = f".{name}".rpartition(".")
    module = model.get_submodule(owner.removeprefix("."))
    own_name = rest.split(".")[0]
    if isinstance(module, NORM_TYPES) or (
        NORM_NAME_PATTERN.search(type(module).__name__) and parameter.squeeze().ndim <= 1
    ):
        return "norm"
    is_vector = parameter.squeeze().ndim <= 1  # a table of position biases is learned as weights are
    return "bias" if is_vector and BIAS_NAME_PATTERN.search(own_name) else "weight"


def parameter_groups(model: nn.Module, optim: Optim) -> list[ParamDict]:
    """Return the model's parameters in two groups: those with weight decay, then those without.

    Norms and biases decay as the recipe says. Under LARS and LAMB they never do, and these optimizers adapt the
    learning rate of the first group only (the skip rule of You et al. 2017 and 2020, and Jia et al. 2018, section 3.2).
    """
    skip = optim.name in LAYERWISE_OPTIMIZERS
    decays = {"weight": True, "norm": optim.norm_decay and not skip, "bias": optim.bias_decay and not skip}
    with_decay: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # a parameter that several modules share comes once
        (with_decay if decays[parameter_kind(model, name, parameter)] else without_decay).append(parameter)
    return [{"params": with_decay, "weight_decay": optim.weight_decay}, {"params": without_decay, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the recipe's optimizer for the model's parameters. `set_lr` sets its learning rate before each step.

    Raises `TrainingError` when a user's optimizer cannot be imported, fails, or leaves a parameter out.
    """
    parts = parameter_groups(model, optim)
    match optim.name:
        case "sgd" | "adamw":
            fused = True if can_fuse(model) else None  # None leaves it to torch
            if optim.name == "adamw":
                return keep_fused(torch.optim.AdamW(parts, lr=0.0, betas=optim.betas, eps=optim.eps, fused=fused))
            sgd = torch.optim.SGD(parts, lr=0.0, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused)
            return keep_fused(sgd)
        case "lars" | "lamb":
            weights, rest = parts
            parts = [{**weights, "adapt": True}, {**rest, "adapt": False}]
            if optim.name == "lars":
                momentum: ParamDict = {"momentum": optim.momentum, "nesterov": optim.nesterov}
                return Lars(parts, **momentum, trust=optim.trust, form=optim.lars_form)
            return Lamb(parts, betas=optim.betas, eps=optim.eps)
    return _build_custom_optimizer(model, optim, parts)


def can_fuse(model: nn.Module) -> bool:
    """Return whether torch's fused kernels update the parameters: one kernel for many of them, on a GPU.

    With a loss scale they also leave out a step on the GPU, where others make the host wait in each step.
    """
    return all(parameter.is_cuda and parameter.is_floating_point() for parameter in model.parameters())


def keep_fused(optimizer: torch.optim.SGD | torch.optim.AdamW) -> torch.optim.Optimizer:
    """Return the optimizer; it stays fused, or not, when it loads the state of one that is the other.

    torch would take over from the checkpoint whether it is fused. And in a first step that is left out for its loss
    scale, its fused SGD would keep uninitialized memory as momentum: it starts as zeros, for the same first step.
    """
    settings = {name: optimizer.param_groups[0][name] for name in ("fused", "foreach")}

    def keep_settings(_: torch.optim.Optimizer, state: ParamDict) -> ParamDict:
        return {**state, "param_groups": [{**group, **settings} for group in state["param_groups"]]}

    def fill_momentum(loaded: torch.optim.Optimizer) -> None:
        for group in loaded.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                if loaded.state[parameter].get("momentum_buffer") is None:
                    loaded.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    optimizer.register_load_state_dict_pre_hook(keep_settings)
    if settings["fused"]:
        fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(fill_momentum)
    return optimizer


def _build_custom_optimizer(model: nn.Module, optim: Optim, param_groups: list[ParamDict]) -> torch.optim.Optimizer:
    """Call the user's function and check that what it returns can train all parameters."""
    function = user_code.import_function("optim, name", optim.name)
    optimizer = user_code.call_user_code("optim, name", optim.name, lambda: function(param_groups, optim))
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TrainingError(f"optim, name: {optim.name} must return a torch.optim.Optimizer, not {kind}")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise TrainingError(
            f"optim, name: the step of {optim.name} cannot be called without arguments ({one_line_error(error)}), as "
            "this trainer calls it; an optimizer that needs a closure, such as LBFGS, cannot be used"
        ) from error
    taken_ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if sorted(taken_ids) != sorted(id(parameter) for parameter in model.parameters()):
        raise TrainingError(f"optim, name: {optim.name} must take every parameter of its groups exactly once")
    return optimizer


def update_weights(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip: float | None) -> None:
    """Make one step from the summed gradients, shortened to the norm `clip` (None: as they are)."""
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], clip)
    scaler.step(optimizer)
    scaler.update()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
