"""Thumbnails of a few validation images, each with the position of the crop on which the network is validated."""

import base64
from pathlib import Path

from cluster.plots.job_facts import ConfusedClasses, PixelSize, RelativeBox, SampleImage
from train.data.order.center_crop import center_corner, resized_size
from train.data.order.rect_val import rect_crop_shape
from train.metrics.confusion import PICTURED_PAIRS, Confusion
from train.metrics.thumbnails import Thumbnail, read_class_thumbnails, read_thumbnails
from train.recipe.schedule import PhaseRow


def sample_images(run_folder: Path, schedule_row: PhaseRow | None) -> list[SampleImage]:
    """Return the thumbnails of a run, with the crops that the phase `schedule_row` validates."""
    if schedule_row is None:
        return []
    return [_describe_image(thumbnail, schedule_row) for thumbnail in read_thumbnails(run_folder)]


def _describe_image(thumbnail: Thumbnail, schedule_row: PhaseRow) -> SampleImage:
    side, uses_rectangle = schedule_row.size, schedule_row.rect_val
    width, height = thumbnail.size
    crop_height, crop_width = rect_crop_shape(width, height, side) if uses_rectangle else (side, side)
    return SampleImage(
        label=thumbnail.label,
        size=(width, height),
        shown=thumbnail.shown,
        src=_data_uri(thumbnail),
        square=center_crop_box((width, height), (side, side)),
        rectangle=center_crop_box((width, height), (crop_height, crop_width)) if uses_rectangle else None,
        pixels=(crop_width, crop_height),
    )


def center_crop_box(image_size: PixelSize, crop_shape: tuple[int, int]) -> RelativeBox:
    """Return the part of an image that the center crop of shape (height, width) sees."""
    width, height = image_size
    whole_height, whole_width = resized = resized_size((height, width), crop_shape)
    top, left = center_corner(resized, crop_shape)
    return left / whole_width, top / whole_height, crop_shape[1] / whole_width, crop_shape[0] / whole_height


def confused_classes(run_folder: Path, confusion: Confusion | None) -> list[ConfusedClasses]:
    """Return the most frequent errors of the last validation for whose classes the run has kept images."""
    src_by_class = {thumbnail.label: _data_uri(thumbnail) for thumbnail in read_class_thumbnails(run_folder)}
    pairs = confusion.most_confused(PICTURED_PAIRS) if confusion else []
    return [
        ConfusedClasses(pair=pair, true_src=src_by_class[pair.true], predicted_src=src_by_class[pair.predicted])
        for pair in pairs
        if {pair.true, pair.predicted} <= src_by_class.keys()
    ]


def _data_uri(thumbnail: Thumbnail) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(thumbnail.jpeg).decode()
