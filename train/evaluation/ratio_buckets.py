"""Groups images by aspect ratio, so that crops of one shape form a batch."""

import numpy as np
from numpy.typing import NDArray

from train.data.index.open import Index

MAX_BUCKETS = 6  # at most, of about as many images each, by aspect ratio: as fast.ai's notebook of 2018 compares crops


RATIO_DIGITS = 2  # of a ratio, as it is shown: images that agree in them are never apart


class AspectRatioBuckets:
    """The images by aspect ratio: `order` from the tallest to the widest, `of` each image's bucket, `told` as JSON.

    `told` has of each bucket the mean ratio (w / h), the lowest ("from"), the highest ("to"), and how many images.
    """

    def __init__(self, index: Index) -> None:
        ratios = np.asarray(index.widths) / np.asarray(index.heights)
        self.ids_by_ratio: NDArray[np.int64] = np.argsort(ratios, kind="stable")
        parts = np.split(self.ids_by_ratio, bucket_boundaries(ratios[self.ids_by_ratio]))
        self.bucket_of_image = np.empty(len(ratios), np.int64)
        for number, part in enumerate(parts):
            self.bucket_of_image[part] = number
        self.summaries = [
            {
                "ratio": float(ratios[part].mean()), "from": float(ratios[part[0]]), "to": float(ratios[part[-1]]),
                "images": len(part),
            }
            for part in parts
        ]  # fmt: skip


def bucket_boundaries(ratios: NDArray[np.float64]) -> list[int]:
    """Return where sorted ratios are cut into at most `BUCKETS` parts: where a ratio changes, nearest to even parts."""
    changes = np.flatnonzero(np.diff(np.round(ratios, RATIO_DIGITS))) + 1
    places = np.array([0, *changes.tolist(), len(ratios)])
    even = [len(ratios) * part / MAX_BUCKETS for part in range(1, MAX_BUCKETS)]
    found = {int(places[np.abs(places - one).argmin()]) for one in even}
    return sorted(found - {0, len(ratios)})
