"""Rules of the losses: cross entropy, label smoothing, binary cross entropy; against numpy in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import Array, softmax

from train.optim import losses
from train.recipe import Optim

generator = np.random.default_rng(8)
SCORES, LABELS = 4 * generator.normal(size=(40, 7)), generator.integers(0, 7, 40)


def cross_entropy(q: Array) -> Array:
    """Return -sum over classes of q log p, p = softmax (Szegedy et al. 2015, section 7)."""
    return np.asarray(-(q * np.log(softmax(SCORES))).sum(1))


def bce(q: Array) -> Array:
    """Return -1/K sum over classes of q log s + (1 - q) log(1 - s), s = sigmoid (Wightman et al. 2021, section 4)."""
    s = 1 / (1 + np.exp(-SCORES))
    return np.asarray(-(q * np.log(s) + (1 - q) * np.log(1 - s)).mean(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
@pytest.mark.parametrize(("name", "formula"), [("cross_entropy", cross_entropy), ("bce", bce)])
def test_loss_of_each_image_matches_formula(name: str, formula: Any, smoothing: float) -> None:
    """q = (1 - e) [k = label] + e / K. The trainer divides the sum by the number of images in the global batch."""
    q = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    own = losses.build_loss(Optim(loss=name, label_smoothing=smoothing))
    np.testing.assert_allclose(own(torch.from_numpy(SCORES), torch.from_numpy(LABELS)), formula(q), rtol=1e-12)
