"""One loss per image, and losses of users. Their formulas are in tests/train/rules/test_losses.py."""

import sys
from typing import Any

import pytest
import torch

from train.optim import losses
from train.recipe import Optim
from train.tools.errors import TrainingError


def scores_and_labels(classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, classes, generator=generator, dtype=torch.float64) * 4
    return scores, torch.tensor([0, 3, classes - 1, 2, 3])


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_build_loss_gives_each_image_its_own_loss_and_gradient(loss: str) -> None:
    scores, labels = scores_and_labels()
    scores.requires_grad_()
    loss_function = losses.build_loss(Optim(loss=loss, label_smoothing=0.1))
    values = loss_function(scores, labels)
    assert values.shape == labels.shape
    for image in range(len(labels)):
        alone = loss_function(scores[image : image + 1], labels[image : image + 1])
        torch.testing.assert_close(alone[0], values[image])
        (gradient,) = torch.autograd.grad(values[image], scores, retain_graph=True)
        assert gradient[image].any() and not gradient[[other for other in range(5) if other != image]].any()


def test_custom_loss_is_called_with_scores_and_labels(mine: Any) -> None:
    def squares(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (scores.gather(1, labels[:, None])[:, 0] - 1) ** 2

    mine.squares = squares
    scores, labels = scores_and_labels()
    assert torch.equal(losses.build_loss(Optim(loss="mine:squares"))(scores, labels), squares(scores, labels))


@pytest.mark.parametrize(("function", "message"), [
    (lambda scores, labels: scores.mean(), r"mine:loss must return each image's loss \[5\], not \[\]"),
    (lambda scores, labels: scores, r"mine:loss must return each image's loss \[5\], not \[5, 7\]"),
    (lambda scores, labels: 0.5, r"mine:loss must return each image's loss \[5\], not float"),
])  # fmt: skip
def test_custom_loss_refuses_anything_but_one_loss_per_image(mine: Any, function: Any, message: str) -> None:
    """The step takes the mean itself, over the images of all processes (Goyal et al. 2017, remark 3)."""
    mine.loss = function
    with pytest.raises(TrainingError, match=message):
        losses.build_loss(Optim(loss="mine:loss"))(*scores_and_labels())


def test_custom_loss_keeps_the_traceback_after_a_success(mine: Any) -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) < 3:
            raise ValueError("too\nfew")
        return scores[:, 0]

    mine.loss = loss
    scores, labels = scores_and_labels()
    custom_loss = losses.build_loss(Optim(loss="mine:loss"))
    with pytest.raises(TrainingError, match=r"loss: mine:loss fails, ValueError: too few, test_losses.py line \d+$"):
        custom_loss(scores[:2], labels[:2])
    assert torch.equal(custom_loss(scores, labels), scores[:, 0])
    with pytest.raises(ValueError, match="too\nfew"):
        custom_loss(scores[:2], labels[:2])
    mine.loss = lambda scores, labels: sys.exit(0)
    with pytest.raises(TrainingError, match=r"optim, loss: mine:loss fails, SystemExit: 0, test_losses.py"):
        losses.build_loss(Optim(loss="mine:loss"))(scores, labels)


def test_build_loss_missing_function_is_a_one_line_error(mine: Any) -> None:
    with pytest.raises(TrainingError, match="optim, loss: mine has no function loss"):
        losses.build_loss(Optim(loss="mine:loss"))
