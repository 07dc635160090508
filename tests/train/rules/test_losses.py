"""Rules of the losses: cross entropy, label smoothing, binary cross entropy; against numpy in float64."""

import numpy as np
import pytest
import torch
from support.trainer_in_process import softmax

from train.optim import losses
from train.recipe import Optim

generator = np.random.default_rng(8)
SCORES, LABELS = 4 * generator.normal(size=(40, 7)), generator.integers(0, 7, 40)


def our_losses(**options: object) -> torch.Tensor:
    return losses.build_loss(Optim(**options))(torch.from_numpy(SCORES), torch.from_numpy(LABELS))  # type: ignore[arg-type]


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_cross_entropy_with_label_smoothing_matches_formula(smoothing: float) -> None:
    """L = -sum over classes of q log p, q = (1 - e) [k = label] + e / K (Szegedy et al. 2015, section 7)."""
    log_probabilities = np.log(softmax(SCORES))
    targets = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    np.testing.assert_allclose(our_losses(label_smoothing=smoothing), -(targets * log_probabilities).sum(1), rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_bce_is_mean_over_classes(smoothing: float) -> None:
    """L = -1/K sum over classes of q log s + (1 - q) log(1 - s), s = 1 / (1 + exp(-score)), with q as above
    (Wightman et al. 2021, section 4).
    """
    s = 1 / (1 + np.exp(-SCORES))
    q = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    expected = -(q * np.log(s) + (1 - q) * np.log(1 - s)).mean(1)
    np.testing.assert_allclose(our_losses(loss="bce", label_smoothing=smoothing), expected, rtol=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_loss_has_one_value_per_image(loss: str) -> None:
    """The trainer divides their sum by the number of images in the global batch."""
    values = our_losses(loss=loss)
    assert values.shape == (40,) and len(set(values.tolist())) == 40
