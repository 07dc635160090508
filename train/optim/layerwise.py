"""What LARS and LAMB share: steps whose length is set for each layer by its own norms.

All arithmetic is in float32 at least, for half-precision parameters too (Jia et al. 2018, section 3.1: a layer's ratio
leaves float16's range); the state is kept so, parameters are rounded when they are written back. No operation makes
the host wait for the device, and each goes over all of a group's tensors at once.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

TensorSequence = list[torch.Tensor] | tuple[torch.Tensor, ...]
HALF_DTYPES = (torch.float16, torch.bfloat16)


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer of groups of parameters; with `adapt` a group's steps are scaled layer by layer, without it not."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "adapt": True, **defaults})

    def update_weights(
        self, group: dict[str, Any], weights: TensorSequence, gradients: TensorSequence, states: list[dict[str, Any]]
    ) -> None:
        """Move the weights in place by one step of a group."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; the others keep their weights and their state."""
        assert closure is None, "the loop computes the gradients"
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            weights = [to_float32(one) for one in parameters]
            self.update_weights(
                group, weights, [to_float32(one.grad) for one in parameters], [self.state[one] for one in parameters]
            )
            for one, weight in zip(parameters, weights, strict=True):
                if one.dtype in HALF_DTYPES:
                    one.copy_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back bit for bit: torch would round it to a half-precision parameter's type."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, one in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if one.dtype in HALF_DTYPES and isinstance(value, torch.Tensor):
                    self.state[one][name] = value.to(one.device, torch.float32, copy=True)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or what half precision holds as float32."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def state_tensors(name: str, weights: TensorSequence, states: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return each parameter's tensor of this name in its state, zeros before the first step."""
    for weight, state in zip(weights, states, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(weight)
    return [state[name] for state in states]


def tensor_norms(tensors: TensorSequence) -> torch.Tensor:
    """Return each tensor's Euclidean norm, as one vector."""
    return torch.stack(torch._foreach_norm(tensors))


def scale_by_ratio(tensors: TensorSequence, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
    """Multiply each tensor in place by its layer's above / below; by 1 where one of them is 0."""
    ratio = torch.where((numerator > 0) & (denominator > 0), numerator / denominator, torch.ones_like(numerator))
    torch._foreach_mul_(tensors, list(ratio.unbind()))
