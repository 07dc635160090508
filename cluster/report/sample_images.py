"""Thumbnails of a few validation images, each with the position of the crop on which the network is validated."""

import base64
from pathlib import Path

from cluster.plots.job_facts import PixelSize, RelativeBox, SampleImage
from train.data.order.rect_val import RESIZE_TO_CROP_RATIO, rect_crop_shape
from train.metrics.thumbnails import Thumbnail, read_thumbnails
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
        src="data:image/jpeg;base64," + base64.b64encode(thumbnail.jpeg).decode(),
        square=center_crop_box((width, height), (side, side)),
        rectangle=center_crop_box((width, height), (crop_height, crop_width)) if uses_rectangle else None,
        pixels=(crop_width, crop_height),
    )


def center_crop_box(image_size: PixelSize, crop_shape: tuple[int, int]) -> RelativeBox:
    """Return the part of an image that the center crop of shape (height, width) sees.

    As in train/data/loading/crop.py, the short side of the image is first scaled to `RESIZE_TO_CROP_RATIO` times the
    short side of the crop, or to more where the crop would not fit.
    """
    width, height = image_size
    crop_height, crop_width = crop_shape
    factor = max(
        round(min(crop_shape) * RESIZE_TO_CROP_RATIO) / min(image_size), crop_height / height, crop_width / width
    )
    box_height = min(1.0, crop_height / (height * factor))
    box_width = min(1.0, crop_width / (width * factor))
    return (1 - box_width) / 2, (1 - box_height) / 2, box_width, box_height
