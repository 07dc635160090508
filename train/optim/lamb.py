"""LAMB: Adam's step with decoupled weight decay, rescaled in each layer to the length of the layer's weights.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2          You et al. 2020 (1904.00962), algorithm 2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
    w = w - lr |w| / |u| u                                          phi is the identity

The learning rate is part of neither m nor v, so it may jump. t counts the steps of each parameter: after a frozen phase
it is smaller for the parameters that were frozen.
"""

import torch

from .layerwise import (
    LayerwiseOptimizer,
    ParamDict,
    TensorSequence,
    bias_corrections,
    norm_ratios,
    state_tensors,
    tensor_norms,
)


class Lamb(LayerwiseOptimizer):
    """LAMB for parameter groups with `adapt`, Adam for the other groups. Its settings are `betas` and `eps`."""

    state_names = ("mean", "square")

    def update_weights(
        self, group: ParamDict, weights: TensorSequence, gradients: TensorSequence, states: list[ParamDict]
    ) -> None:
        """Apply one step of LAMB, as the formulas of the module say, to the weights of a group in place."""
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
