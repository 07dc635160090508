"""LARS: SGD with momentum whose learning rate (lr) is scaled in each layer: norm of the weights over that of gradients.

    form "paper" (You et al. 2017, 1708.03888)     form "google", with h = g + decay w
    l = trust |w| / (|g| + decay |w|)              l = trust |w| / (|h| + decay |w|)
    v = momentum v + l (g + decay w)               v = momentum v + h
    w = w - lr v                                   w = w - lr l v

The paper's buffer absorbs the learning rate (v = m v + lr l (g + decay w); w = w - v). There, a jump of it would need
the momentum correction of Goyal et al. 2017 (remark 2: m lr' / lr). Here it stays outside of v, as in torch's SGD: the
steps are the same at a constant learning rate, and the correction is built in when it changes.

Google's form is that of TensorFlow 1 (tensorflow/contrib/opt/python/training/lars_optimizer.py at 5c8077a), with which
Google trained ResNet-50 on 32,768 images a step. The ratio is not part of its buffer. It gets the gradients h of a loss
that contains weight decay (tensorflow/tpu, models/official/resnet/resnet_main.py at 11a028b).

With Nesterov's momentum, x + momentum v takes the place of v in both forms, where x is what was added to the buffer.
"""

import torch

from .layerwise import LayerwiseOptimizer, ParamDict, TensorSequence, norm_ratios, state_tensors, tensor_norms


class Lars(LayerwiseOptimizer):
    """LARS for parameter groups with `adapt`; SGD with momentum for the other groups, which hold norms and biases.

    Its settings are `momentum`, `nesterov`, `trust` and `form`.
    """

    state_names = ("momentum_buffer",)

    def update_weights(
        self, group: ParamDict, weights: TensorSequence, gradients: TensorSequence, states: list[ParamDict]
    ) -> None:
        """Apply one step of LARS, as the formulas of the module say, to the weights of a group in place."""
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
