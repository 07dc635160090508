"""The exponential moving average of a network's weights, which is validated and published in place of the weights.

    average = decay * average + (1 - decay) * weights        after each step

Polyak and Juditsky 1992 ("Acceleration of stochastic approximation by averaging") show why an average over the last
steps is nearer to the optimum than the last weights are. The details are those of TensorFlow's
`ExponentialMovingAverage` as EfficientNet trains with it: in the first steps the decay of step t, counted from 1, is
(1 + t) / (10 + t) where that is lower, so that the random initial weights are soon forgotten; running means and
variances of batch norm are averaged like weights.

On another than the nominal number of GPUs the average reaches back over as many images (`Schedule.ema_decay`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn


class WeightAverage:
    """The average of a model's parameters and of its batch-norm statistics. Without a decay, there is no average."""

    def __init__(
        self,
        model: nn.Module,
        norm_buffers: Sequence[torch.Tensor],
        decay: float | None,
        write_to_norms: Callable[[], None],
    ) -> None:
        """`write_to_norms` puts the running means and variances into `norm_buffers` before they are read."""
        self.model = model
        self.decay = decay
        self.write_to_norms = write_to_norms
        self.tensors = [*(parameter.data for parameter in model.parameters()), *norm_buffers]
        self.averages: list[torch.Tensor] = []
        self.restart()

    def restart(self) -> None:
        """Begin with the model's present weights."""
        if self.decay is not None:
            self.averages = [tensor.clone() for tensor in self.tensors]

    def update(self, step: int) -> None:
        """Include the weights after a step, counted from 1."""
        if self.decay is not None:
            self.write_to_norms()
            torch._foreach_lerp_(self.averages, self.tensors, 1 - min(self.decay, (1 + step) / (10 + step)))

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the average into the model for a while. Afterwards the model has the bits that it had before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # Without a decay there are no averages.
        for tensor, average in zip(self.tensors, self.averages, strict=self.decay is not None):
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the model with the averaged weights; {} when there is no average."""
        if not self.averages:
            return {}
        with self.in_model():
            return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        if state:
            with self.in_model():
                self.model.load_state_dict(state)
