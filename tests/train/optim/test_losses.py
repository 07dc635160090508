"""What is minimised: each image's loss, against the formulas in float64; a loss of one's own."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from train.optim import losses
from train.recipe import Optim
from train.tools.errors import TrainingError


def images(classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    scores = torch.randn(5, classes, generator=made, dtype=torch.float64) * 4
    return scores, torch.tensor([0, 3, classes - 1, 2, 3])


def smooth(labels: torch.Tensor, classes: int, e: float) -> np.ndarray:
    """Szegedy et al. 2015, section 7: (1 - e) of the label, e of all classes alike."""
    return (1 - e) * np.eye(classes)[labels.numpy()] + e / classes


@pytest.mark.parametrize("e", [0.0, 0.1, 0.3])
def test_cross_entropy_is_that_of_smoothed_labels(e: float) -> None:
    scores, labels = images()
    x = scores.numpy()
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    found = losses.build_loss(Optim(label_smoothing=e))(scores, labels)
    np.testing.assert_allclose(found, -(smooth(labels, 7, e) * logs).sum(1), rtol=1e-12)


@pytest.mark.parametrize("e", [0.0, 0.1, 0.3])
def test_binary_cross_entropy_asks_one_question_of_each_class_and_means_them(e: float) -> None:
    """Wightman et al. 2021, section 4; smoothing and mean as timm's BinaryCrossEntropy."""
    scores, labels = images()
    yes = 1 / (1 + np.exp(-scores.numpy()))
    answers = smooth(labels, 7, e)
    expected = -(answers * np.log(yes) + (1 - answers) * np.log(1 - yes)).mean(1)
    found = losses.build_loss(Optim(loss="bce", label_smoothing=e))(scores, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_each_image_has_its_own_loss_and_its_own_gradient(loss: str) -> None:
    scores, labels = images()
    scores.requires_grad_()
    build = losses.build_loss(Optim(loss=loss, label_smoothing=0.1))
    found = build(scores, labels)
    assert found.shape == labels.shape
    for place in range(len(labels)):
        alone = build(scores[place : place + 1], labels[place : place + 1])
        torch.testing.assert_close(alone[0], found[place])
        (slope,) = torch.autograd.grad(found[place], scores, retain_graph=True)
        assert slope[place].any() and not slope[[one for one in range(5) if one != place]].any()


def test_a_loss_of_one_s_own_is_called_with_scores_and_labels(mine: Any) -> None:
    def squares(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (scores.gather(1, labels[:, None])[:, 0] - 1) ** 2

    mine.squares = squares
    scores, labels = images()
    assert torch.equal(losses.build_loss(Optim(loss="mine:squares"))(scores, labels), squares(scores, labels))


@pytest.mark.parametrize(("made", "said"), [
    (lambda scores, labels: scores.mean(), r"mine:loss must return each image's loss \[5\], not \[\]"),
    (lambda scores, labels: scores, r"mine:loss must return each image's loss \[5\], not \[5, 7\]"),
    (lambda scores, labels: 0.5, r"mine:loss must return each image's loss \[5\], not float"),
])  # fmt: skip
def test_a_mean_over_the_batch_is_refused_for_the_step_takes_it_itself(mine: Any, made: Any, said: str) -> None:
    """Goyal et al. 2017, remark 3: the mean is over all processes' images."""
    mine.loss = made
    with pytest.raises(TrainingError, match=said):
        losses.build_loss(Optim(loss="mine:loss"))(*images())


def test_one_that_fails_is_one_line_and_one_that_has_worked_keeps_its_trace(mine: Any) -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) < 3:
            raise ValueError("too\nfew")
        return scores[:, 0]

    mine.loss = loss
    scores, labels = images()
    found = losses.build_loss(Optim(loss="mine:loss"))
    with pytest.raises(TrainingError, match=r"loss: mine:loss fails, ValueError: too few, test_losses.py line \d+$"):
        found(scores[:2], labels[:2])
    assert torch.equal(found(scores, labels), scores[:, 0])
    with pytest.raises(ValueError, match="too\nfew"):
        found(scores[:2], labels[:2])
    mine.loss = lambda scores, labels: sys.exit(0)
    with pytest.raises(TrainingError, match=r"optim, loss: mine:loss fails, SystemExit: 0, test_losses.py"):
        losses.build_loss(Optim(loss="mine:loss"))(scores, labels)


def test_one_that_is_not_there_is_one_line(mine: Any) -> None:
    with pytest.raises(TrainingError, match="optim, loss: mine has no function loss"):
        losses.build_loss(Optim(loss="mine:loss"))
