"""The request that a loader worker receives for one batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IndexKey = tuple[str, int | None]  # split, short side of the copy in pixels (None: full size)


@dataclass(frozen=True)
class BatchRequest:
    """A request for one batch of a split.

    `copy` is the short side of the copy to read, None for full-size images. `ids` are the image IDs. `shape` is
    (height, width) in pixels. `min_scale` is the smallest share of an image's area that a random crop covers; None asks
    for the center crop of validation. `augment` is that of the phase. `sample_weight` is 1, except for fillers in a
    last step. With `squares` = 5, a batch has five squares of each image in a row: at the corners and at the center.
    """

    split: str
    copy: int | None
    ids: NDArray[np.int64]
    shape: tuple[int, int]
    epoch: int = 0
    min_scale: float | None = None
    sample_weight: float = 1.0
    augment: bool | str = True
    squares: int = 1

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """The shape of the batch's images: (images, height, width, 3)."""
        return self.squares * len(self.ids), *self.shape, 3
