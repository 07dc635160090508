"""LAMB: Adam's step, with decay beside it, made as long for each layer as its weights are.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2          You et al. 2020 (1904.00962), algorithm 2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
    w = w - rate |w| / |u| u                                        phi is the identity

The rate is in neither m nor v, so it may jump. t counts a parameter's own steps: after a frozen phase it is smaller for
what was frozen.
"""

from typing import Any

import torch

from .layerwise import LayerwiseOptimizer, TensorSequence, scale_by_ratio, state_tensors, tensor_norms


class Lamb(LayerwiseOptimizer):
    """LAMB for the groups with `adapt`; Adam for the others, which hold norms and biases."""

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6
    ) -> None:
        super().__init__(groups, betas=betas, eps=eps)

    def update_weights(
        self, group: dict[str, Any], weights: TensorSequence, gradients: TensorSequence, states: list[dict[str, Any]]
    ) -> None:
        """See the module."""
        b1, b2 = group["betas"]
        for state in states:
            state["step"] = state.get("step", 0) + 1
        first, second = state_tensors("mean", weights, states), state_tensors("square", weights, states)
        torch._foreach_mul_(first, b1)
        torch._foreach_add_(first, gradients, alpha=1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - b2)
        below = torch._foreach_div(second, [1 - b2 ** state["step"] for state in states])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_mul_(below, [1 - b1 ** state["step"] for state in states])
        steps = torch._foreach_div(first, below)
        if group["weight_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            scale_by_ratio(steps, tensor_norms(weights), tensor_norms(steps))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])
