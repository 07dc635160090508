"""The training loss of a recipe, one value per image. Validation always reports the cross entropy."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from train.recipe.components import Optim
from train.recipe.schedule import Epoch
from train.tools import user_code
from train.tools.errors import Diverged, TrainingError

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # scores [n, classes], labels [n] -> losses [n]


def build_loss(optim: Optim) -> LossFunction:
    """Return the loss function that the recipe names. Raises `TrainingError` when a user's loss cannot be imported."""
    if optim.loss == "cross_entropy":
        return partial(cross_entropy, reduction="none", label_smoothing=optim.label_smoothing)
    if optim.loss == "bce":
        return partial(binary_cross_entropy, label_smoothing=optim.label_smoothing)
    return check_losses(user_code.import_function("optim, loss", optim.loss), optim.loss)


def check_finite(losses: Sequence[float], epoch: Epoch, first_step: int) -> None:
    """Raise `Diverged` with the first step whose loss is not finite. The losses begin with that of `first_step`."""
    for step, loss in enumerate(losses, first_step):
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {epoch.first_step + step + 1} (epoch {epoch.number + 1}, learning "
                f"rate {epoch.lr_at(step):.4g}); lower the learning rate or lengthen the warm-up"
            )


def binary_cross_entropy(scores: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the binary cross entropy of scores [n, classes] against labels [n], as the mean over the classes [n].

    Each class is a yes/no question of its own. With label smoothing e the answers are 1 - e + e / classes for the label
    and e / classes for every other class, as in cross entropy. Mean and smoothing are those of Wightman et al. 2021
    ("ResNet strikes back", section 4; timm's BinaryCrossEntropy). With 1000 classes the gradient of the mean is about a
    thousandth of that of the sum. The learning rates of SGD must make up for it; LAMB and AdamW are not affected.
    """
    classes = scores.shape[1]
    answers = torch.full_like(scores, label_smoothing / classes)
    answers.scatter_(1, labels[:, None], 1 - label_smoothing + label_smoothing / classes)
    return binary_cross_entropy_with_logits(scores, answers, reduction="none").mean(1)


def check_losses(function: LossFunction, name: str) -> LossFunction:
    """Return a user's loss function, checked to return one loss per image.

    The training step divides by the whole batch itself: with a function that returns a mean it would divide twice. The
    returned function raises `TrainingError` when the user's returns something else, or fails the first time. A function
    that has worked before fails for another reason, such as a device error; its exception then keeps its traceback.
    """
    has_succeeded = False

    def losses_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal has_succeeded
        if has_succeeded:
            losses = function(scores, labels)
        else:
            losses = user_code.call_user_code("optim, loss", name, lambda: function(scores, labels))
        if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape:
            returned = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            expected = list(labels.shape)
            raise TrainingError(f"optim, loss: {name} must return each image's loss {expected}, not {returned}")
        has_succeeded = True
        return losses

    return losses_of
