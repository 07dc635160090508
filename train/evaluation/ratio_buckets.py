"""Groups images by aspect ratio, so that accuracy can be compared between tall, square and wide images."""

import numpy as np
from numpy.typing import NDArray

from train.data.index.open import Index

from .protocol import RatioBucket

MAX_BUCKETS = 6  # of about equally many images each, as fast.ai's notebook of 2018 compares crops
RATIO_DIGITS = 2  # digits of a ratio that are shown; images that agree in them are in the same bucket


class AspectRatioBuckets:
    """The images of an index in at most `MAX_BUCKETS` buckets of aspect ratio (width / height).

    ids_by_ratio      image ids from the tallest to the widest
    bucket_of_image   each image's bucket, by image id
    summaries         one dict per bucket, for JSON: mean "ratio", lowest "from", highest "to", number of "images"
    """

    def __init__(self, index: Index) -> None:
        ratios = np.asarray(index.widths) / np.asarray(index.heights)
        self.ids_by_ratio: NDArray[np.int64] = np.argsort(ratios, kind="stable")
        ids_by_bucket = np.split(self.ids_by_ratio, bucket_boundaries(ratios[self.ids_by_ratio]))
        self.bucket_of_image = np.empty(len(ratios), np.int64)
        for bucket, ids in enumerate(ids_by_bucket):
            self.bucket_of_image[ids] = bucket
        self.summaries: list[RatioBucket] = [
            {
                "ratio": float(ratios[ids].mean()),
                "from": float(ratios[ids[0]]),
                "to": float(ratios[ids[-1]]),
                "images": len(ids),
            }
            for ids in ids_by_bucket
        ]


def bucket_boundaries(ratios: NDArray[np.float64]) -> list[int]:
    """Return the indices at which sorted ratios are cut into at most `MAX_BUCKETS` buckets.

    A cut is only possible where the rounded ratio changes; the cuts are those nearest to buckets of equal size.
    """
    changes = np.flatnonzero(np.diff(np.round(ratios, RATIO_DIGITS))) + 1
    possible = np.array([0, *changes.tolist(), len(ratios)])
    equal_sizes = [len(ratios) * number / MAX_BUCKETS for number in range(1, MAX_BUCKETS)]
    boundaries = {int(possible[np.abs(possible - boundary).argmin()]) for boundary in equal_sizes}
    return sorted(boundaries - {0, len(ratios)})
