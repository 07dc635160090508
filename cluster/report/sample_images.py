"""Thumbnails of a few validation images, each with the position of the crop on which the network is validated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.data.order.center_crop import center_corner, resized_size
from train.data.order.rect_val import rect_crop_shape
from train.metrics.confusion import PICTURED_PAIRS, ConfusedPair, Confusion
from train.metrics.thumbnails import Thumbnail, read_class_thumbnails, read_thumbnails
from train.recipe.schedule import PhaseRow

RelativeBox = tuple[float, float, float, float]  # left, top, width, height as fractions of an image


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """A validation image, with the part of it that the validation sees as (width, height) in pixels.

    `square` is the center crop where the validation sees a rectangle instead, else None.
    """

    thumbnail: Thumbnail
    seen: RelativeBox
    pixels: tuple[int, int]
    square: RelativeBox | None


@dataclass(frozen=True, kw_only=True)
class ConfusedClasses:
    """A frequent error, with an image of the true class and one of the class that the network named."""

    pair: ConfusedPair
    true: Thumbnail
    predicted: Thumbnail


def sample_images(run_folder: Path, schedule: Sequence[PhaseRow]) -> list[SampleImage]:
    """Return the thumbnails of a run, with the crops that the last phase of `schedule` validates."""
    return [_sample_image(thumbnail, schedule[-1]) for thumbnail in read_thumbnails(run_folder)] if schedule else []


def _sample_image(thumbnail: Thumbnail, phase: PhaseRow) -> SampleImage:
    square_shape = (phase.size, phase.size)
    height, width = rect_crop_shape(*thumbnail.size, phase.size) if phase.rect_val else square_shape
    return SampleImage(
        thumbnail=thumbnail,
        seen=center_crop_box(thumbnail.size, (height, width)),
        pixels=(width, height),
        square=center_crop_box(thumbnail.size, square_shape) if phase.rect_val else None,
    )


def center_crop_box(image_size: tuple[int, int], crop_shape: tuple[int, int]) -> RelativeBox:
    """Return the part of an image of (width, height) that the center crop of shape (height, width) sees."""
    width, height = image_size
    whole_height, whole_width = resized = resized_size((height, width), crop_shape)
    top, left = center_corner(resized, crop_shape)
    return left / whole_width, top / whole_height, crop_shape[1] / whole_width, crop_shape[0] / whole_height


def confused_classes(run_folder: Path, confusion: Confusion | None) -> list[ConfusedClasses]:
    """Return the most frequent errors of the last validation for whose classes the run has kept images."""
    thumbnails = {thumbnail.label: thumbnail for thumbnail in read_class_thumbnails(run_folder)}
    pairs = confusion.most_confused(PICTURED_PAIRS) if confusion else []
    return [
        ConfusedClasses(pair=pair, true=thumbnails[pair.true], predicted=thumbnails[pair.predicted])
        for pair in pairs
        if {pair.true, pair.predicted} <= thumbnails.keys()
    ]
