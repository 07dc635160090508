"""Losses of users."""

from typing import Any

import pytest
import torch

from train.optim import losses
from train.recipe import Optim
from train.tools.errors import TrainingError

SCORES, LABELS = torch.randn(5, 7), torch.tensor([0, 3, 6, 2, 3])


@pytest.mark.parametrize(("function", "message"), [
    (lambda scores, labels: scores.mean(), r"mine:loss must return each image's loss \[5\], not \[\]"),
    (lambda scores, labels: 0.5, r"mine:loss must return each image's loss \[5\], not float"),
])  # fmt: skip
def test_custom_loss_refuses_anything_but_one_loss_per_image(mine: Any, function: Any, message: str) -> None:
    """The step takes the mean itself, over the images of all processes (Goyal et al. 2017, remark 3)."""
    mine.loss = function
    with pytest.raises(TrainingError, match=message):
        losses.build_loss(Optim(loss="mine:loss"))(SCORES, LABELS)


def test_custom_loss_keeps_the_traceback_after_a_success(mine: Any) -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) < 3:
            raise ValueError("too\nfew")
        return scores[range(len(labels)), labels]

    mine.loss = loss
    custom_loss = losses.build_loss(Optim(loss="mine:loss"))
    with pytest.raises(TrainingError, match=r"loss: mine:loss fails, ValueError: too few, test_losses.py line \d+$"):
        custom_loss(SCORES[:2], LABELS[:2])
    assert torch.equal(custom_loss(SCORES, LABELS), SCORES[range(5), LABELS])
    with pytest.raises(ValueError, match="too\nfew"):
        custom_loss(SCORES[:2], LABELS[:2])
