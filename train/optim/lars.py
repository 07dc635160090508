"""LARS: SGD with momentum whose rate is scaled in each layer by the ratio of the weights' norm to the gradient's norm.

    l = trust |w| / (|g| + decay |w|)        You et al. 2017 (1708.03888), equation 6
    v = momentum v + l (g + decay w)
    w = w - rate v

The paper's buffer absorbs the rate (v = m v + rate l (g + decay w); w = w - v). There, a jump of the rate would need
the momentum correction of Goyal et al. 2017 (remark 2: m rate' / rate). Here the rate stays outside of v, as in
torch's SGD: the steps are the same at a constant rate, and the correction is built in when the rate changes.
"""

import torch

from .layerwise import LayerwiseOptimizer, ParamDict, TensorSequence, scale_by_ratio, state_tensors, tensor_norms


class Lars(LayerwiseOptimizer):
    """LARS for parameter groups with `adapt`; SGD with momentum for the other groups, which hold norms and biases."""

    def __init__(
        self, groups: list[ParamDict], *, momentum: float = 0.9, nesterov: bool = False, trust: float = 0.001
    ) -> None:
        super().__init__(groups, momentum=momentum, nesterov=nesterov, trust=trust)

    def update_weights(
        self, group: ParamDict, weights: TensorSequence, gradients: TensorSequence, states: list[ParamDict]
    ) -> None:
        """Apply one step of LARS, as the formulas of the module say, to the weights of a group in place."""
        decay, momentum = group["weight_decay"], group["momentum"]
        steps = torch._foreach_add(gradients, weights, alpha=decay)
        if group["adapt"]:
            lengths = tensor_norms(weights)
            scale_by_ratio(steps, group["trust"] * lengths, tensor_norms(gradients) + decay * lengths)
        buffers = state_tensors("momentum_buffer", weights, states)
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, steps)
        if group["nesterov"]:
            torch._foreach_add_(steps, buffers, alpha=momentum)
        torch._foreach_add_(weights, steps if group["nesterov"] else buffers, alpha=-group["lr"])
