"""What is minimised: each image's loss, by the recipe's name for it. Validation always tells the cross entropy."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from train.recipe.components import Optim
from train.tools import user_code
from train.tools.errors import TrainingError

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # scores [n, classes], labels [n] to losses [n]


def build_loss(optim: Optim) -> LossFunction:
    """Return the loss that the recipe names. Raises `Expected` when it cannot be imported."""
    if optim.loss == "cross_entropy":
        return partial(cross_entropy, reduction="none", label_smoothing=optim.label_smoothing)
    if optim.loss == "bce":
        return partial(binary_cross_entropy, label_smoothing=optim.label_smoothing)
    return CustomLoss(user_code.import_function("optim, loss", optim.loss), optim.loss)


def binary_cross_entropy(scores: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Each class is a question of its own: is it this one? Returns the mean over the classes for each image [n].

    The answers are smoothed as cross entropy's: 1 - e + e / classes and e / classes. Mean and smoothing are those of
    Wightman et al. 2021 ("ResNet strikes back", section 4; timm's BinaryCrossEntropy): with 1000 classes the gradient
    is about a thousandth of the sum's, which rates for SGD must make up for; LAMB and AdamW do not feel it.
    """
    classes = scores.shape[1]
    answers = torch.full_like(scores, label_smoothing / classes)
    answers.scatter_(1, labels[:, None], 1 - label_smoothing + label_smoothing / classes)
    return binary_cross_entropy_with_logits(scores, answers, reduction="none").mean(1)


class CustomLoss:
    """Somebody's loss of each image. The step divides by the whole batch: a mean of its own would count it twice."""

    def __init__(self, function: LossFunction, name: str) -> None:
        self.function, self.name, self.has_succeeded = function, name, False

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses. Raises `Expected` where it makes something else, or fails the first time: what has worked
        before fails for another reason, such as a device's, and that needs its trace.
        """
        if self.has_succeeded:
            losses = self.function(scores, labels)
        else:
            losses = user_code.call_user_code("optim, loss", self.name, lambda: self.function(scores, labels))
        if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape:
            shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise TrainingError(
                f"optim, loss: {self.name} must return each image's loss {list(labels.shape)}, not {shape}"
            )
        self.has_succeeded = True
        return losses
