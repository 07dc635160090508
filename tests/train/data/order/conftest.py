"""Sizes of images for the tests of orders and shapes."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def random_sizes() -> Any:
    """Return widths and heights with ImageNet's distribution, and some extremes: random_sizes(images, seed)."""

    def draw(images: int, seed: int = 0) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        ratios = np.exp(rng.normal(0.2, 0.35, images)).clip(0.2, 5)
        short = rng.integers(60, 900, images)
        return np.maximum(1, (short * ratios).astype(np.int64)), short

    return draw
