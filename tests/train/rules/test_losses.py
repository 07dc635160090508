"""What is minimised, written out: cross entropy, label smoothing, binary cross entropy; in numpy and float64."""

import numpy as np
import pytest
import torch
from support.trainer_in_process import softmax

from train.optim import losses
from train.recipe import Optim

dice = np.random.default_rng(8)
SCORES, LABELS = 4 * dice.normal(size=(40, 7)), dice.integers(0, 7, 40)


def ours(**how: object) -> torch.Tensor:
    return losses.build_loss(Optim(**how))(torch.from_numpy(SCORES), torch.from_numpy(LABELS))  # type: ignore[arg-type]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_cross_entropy_with_label_smoothing(smoothing: float) -> None:
    """L = -sum over classes of q log p, q = (1 - e) [k = label] + e / K (Szegedy et al. 2015, section 7)."""
    logs = np.log(softmax(SCORES))
    wanted = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    np.testing.assert_allclose(ours(label_smoothing=smoothing), -(wanted * logs).sum(1), rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_asks_each_class_on_its_own(smoothing: float) -> None:
    """L = -1/K sum over classes of q log s + (1 - q) log(1 - s), s = 1 / (1 + exp(-score)), with the q of above
    (Wightman et al. 2021, section 4).
    """
    s = 1 / (1 + np.exp(-SCORES))
    q = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    expected = -(q * np.log(s) + (1 - q) * np.log(1 - s)).mean(1)
    np.testing.assert_allclose(ours(loss="bce", label_smoothing=smoothing), expected, rtol=1e-11)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_a_loss_is_told_for_each_image_so_that_the_step_can_divide_by_all_of_them(loss: str) -> None:
    found = ours(loss=loss)
    assert found.shape == (40,) and len(set(found.tolist())) == 40
