"""LARS and LAMB: optimizers that scale the step of each layer by its own norms.

Weights and gradients are float32 in any precision of a run: in float16 the ratio of a layer would leave the range (Jia
et al. 2018, section 3.1). No operation makes the host wait, and each goes over all tensors of a group at once.
"""

from collections.abc import Callable
from typing import Any

import torch

# A group of parameters with its settings, the state of a parameter, or a whole state dict.
ParamDict = dict[str, Any]  # Any: so torch.optim defines them
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that scales steps layer by layer in its parameter groups with `adapt`, not in the others.

    With a loss scale, a step whose gradients are infinite or not a number is left out without the host waiting for the
    device: `GradScaler` sets `grad_scale` and `found_inf`, tensors on the device, for the time of a step. Such steps
    are counted in the state of each parameter, as `skipped`.
    """

    _step_supports_amp_scaling = True  # read by `GradScaler.step`
    state_names: tuple[str, ...] = ()  # the tensors that `update_weights` keeps for each parameter

    def __init__(self, groups: list[ParamDict], **defaults: Any) -> None:  # Any: as in ParamDict
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "adapt": True, **defaults})

    def update_weights(self, group: ParamDict, weights: Tensors, gradients: Tensors, states: list[ParamDict]) -> None:
        """Change the weights of a group in place by one step; `weights`, `gradients` and `states` run in parallel."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Parameters without one keep their weights and their state."""
        assert closure is None, "the training loop computes the gradients"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            states = [self.state[parameter] for parameter in parameters]
            if hasattr(self, "found_inf"):
                self._update_unless_infinite(group, parameters, gradients, states)
            else:
                self.update_weights(group, parameters, gradients, states)

    def _update_unless_infinite(
        self, group: ParamDict, weights: Tensors, gradients: Tensors, states: list[ParamDict]
    ) -> None:
        """Update the weights by scaled gradients; put weights and state back if a gradient was not finite."""
        is_infinite = self.found_inf.reshape(()) > 0  # type: ignore[attr-defined]
        grad_scale: torch.Tensor | None = self.grad_scale  # type: ignore[attr-defined]
        zero = torch.zeros((), device=is_infinite.device)
        for state in states:
            if "skipped" not in state:
                state["skipped"] = zero.clone()
        # Without gradients all that a step computes is finite, and can be multiplied by 0 to leave it out.
        finite = [torch.where(is_infinite, zero.to(gradient.dtype), gradient) for gradient in gradients]
        if grad_scale is not None:
            torch._foreach_mul_(finite, grad_scale.double().reciprocal().float().reshape(()))
        changing = [*weights]
        for name in self.state_names:
            changing += state_tensors(name, weights, states)
        old_values = torch._foreach_mul(changing, is_infinite)
        self.update_weights(group, weights, finite, states)
        torch._foreach_mul_(changing, ~is_infinite)
        torch._foreach_add_(changing, old_values)
        torch._foreach_add_([state["skipped"] for state in states], len(states) * [is_infinite.float()])


class Lars(LayerwiseOptimizer):
    """LARS for parameter groups with `adapt`; SGD with momentum for the other groups, which hold norms and biases.

    The learning rate (lr) is scaled in each layer: norm of the weights over that of gradients. The settings are
    `momentum`, `nesterov`, `trust` and `form`.

        form "paper" (You et al. 2017, 1708.03888)     form "google", with h = g + decay w
        l = trust |w| / (|g| + decay |w|)              l = trust |w| / (|h| + decay |w|)
        v = momentum v + l (g + decay w)               v = momentum v + h
        w = w - lr v                                   w = w - lr l v

    The paper's buffer absorbs the learning rate (v = m v + lr l (g + decay w); w = w - v). There, a jump of it would
    need the momentum correction of Goyal et al. 2017 (remark 2: m lr' / lr). Here it stays outside of v, as in torch's
    SGD: the steps are the same at a constant learning rate, and the correction is built in when it changes.

    Google's form is that of TensorFlow 1 (tensorflow/contrib/opt/python/training/lars_optimizer.py at 5c8077a), with
    which Google trained ResNet-50 on 32,768 images a step. The ratio is not part of its buffer. It gets the gradients h
    of a loss that contains weight decay (tensorflow/tpu, models/official/resnet/resnet_main.py at 11a028b).

    With Nesterov's momentum, x + momentum v takes the place of v in both forms, where x was added to the buffer.
    """

    state_names = ("momentum_buffer",)

    def update_weights(self, group: ParamDict, weights: Tensors, gradients: Tensors, states: list[ParamDict]) -> None:
        """Apply one step of LARS, as the formulas above say, to the weights of a group in place."""
        decay, momentum, is_google = group["weight_decay"], group["momentum"], group["form"] == "google"
        steps: tuple[torch.Tensor, ...] | list[torch.Tensor] = torch._foreach_add(gradients, weights, alpha=decay)
        ratios: list[torch.Tensor] = []
        if group["adapt"]:
            lengths = tensor_norms(weights)
            gradient_norms = tensor_norms(steps if is_google else gradients)
            ratios = norm_ratios(group["trust"] * lengths, gradient_norms + decay * lengths)
        if ratios and not is_google:
            torch._foreach_mul_(steps, ratios)
        buffers = state_tensors("momentum_buffer", weights, states)
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, steps)
        steps = torch._foreach_add(steps, buffers, alpha=momentum) if group["nesterov"] else buffers
        if ratios and is_google:
            steps = torch._foreach_mul(steps, ratios)
        torch._foreach_add_(weights, steps, alpha=-group["lr"])


class Lamb(LayerwiseOptimizer):
    """LAMB for parameter groups with `adapt`, Adam for the other groups. Its settings are `betas` and `eps`.

    Adam's step with decoupled weight decay, rescaled in each layer to the length of the layer's weights:

        m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2          You et al. 2020 (1904.00962), algorithm 2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr |w| / |u| u                                          phi is the identity

    The learning rate is part of neither m nor v, so it may jump. t counts the steps of each parameter: after a frozen
    phase it is smaller for the parameters that were frozen.
    """

    state_names = ("mean", "square")

    def update_weights(self, group: ParamDict, weights: Tensors, gradients: Tensors, states: list[ParamDict]) -> None:
        """Apply one step of LAMB, as the formulas above say, to the weights of a group in place."""
        b1, b2 = group["betas"]
        for state in states:
            state["step"] = state.get("step", 0) + 1
        means = state_tensors("mean", weights, states)
        squares = state_tensors("square", weights, states)
        torch._foreach_mul_(means, b1)
        torch._foreach_add_(means, gradients, alpha=1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - b2)
        denominators = torch._foreach_div(squares, bias_corrections(b2, states))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(denominators, bias_corrections(b1, states))
        steps = torch._foreach_div(means, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(steps, norm_ratios(tensor_norms(weights), tensor_norms(steps)))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])


def state_tensors(name: str, weights: Tensors, states: list[ParamDict]) -> list[torch.Tensor]:
    """Return the state tensor of each parameter by its name. Before a parameter's first step it is made, as zeros."""
    for weight, state in zip(weights, states, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(weight)
    return [state[name] for state in states]


def bias_corrections(beta: float, states: list[ParamDict]) -> list[float] | list[torch.Tensor]:
    """Return 1 - beta^t of each parameter, where t is the number of its steps that were not left out."""
    if not any("skipped" in state for state in states):
        return [1 - beta ** state["step"] for state in states]
    device = next(state["skipped"].device for state in states if "skipped" in state)
    none = torch.zeros((), device=device)
    skipped = torch.stack([state.get("skipped", none) for state in states])
    steps = torch.tensor([state["step"] for state in states], dtype=torch.float64).to(device, non_blocking=True)
    return list((1 - beta ** (steps - skipped)).float().unbind())


def tensor_norms(tensors: Tensors) -> torch.Tensor:
    """Return the Euclidean norm of each of n tensors, as one vector [n]."""
    return torch.stack(torch._foreach_norm(tensors))


def norm_ratios(numerator: torch.Tensor, denominator: torch.Tensor) -> list[torch.Tensor]:
    """Return numerator / denominator of each layer; 1 where one of the two is 0."""
    ratio = torch.where((numerator > 0) & (denominator > 0), numerator / denominator, torch.ones_like(numerator))
    return list(ratio.unbind())
