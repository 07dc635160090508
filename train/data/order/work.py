"""The request that a loader worker receives for one batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IndexKey = tuple[str, int | None]  # split, copy


@dataclass(frozen=True)
class BatchRequest:
    """One batch to make. `shape` is (height, width) in pixels; `min_scale` None asks for the centre crop; `share` is
    how much each image counts in its step: 1, but for the fillers of a last step that is not full. Without `augment`
    crops have one size.
    """

    split: str
    copy: int | None
    ids: NDArray[np.int64]
    shape: tuple[int, int]
    epoch: int = 0
    min_scale: float | None = None
    sample_weight: float = 1.0
    augment: bool = True

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """The shape of its batch."""
        return len(self.ids), *self.shape, 3
