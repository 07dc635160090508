"""Thumbnails of a few validation images, for the report.

They are stored beside the logs and copied with them: the machines that hold the images are gone after the run.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.data.index.base import Index
from train.tools.agent_protocol import LOGS_FOLDER, attempt_name
from train.tools.files import write_atomic
from train.tools.records import encode, read_intact

THUMBNAIL_COUNT = 6
CANDIDATE_COUNT = 60  # images of which the thumbnails are chosen by their shape
THUMBNAIL_PIXELS = 220  # length of a thumbnail's longer side
CLASS_THUMBNAIL_PIXELS = 110  # the same for an image that stands for a class
JPEG_QUALITY = 85


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small validation image. `size` and `shown` are (width, height) of the image and of its `jpeg`."""

    label: str
    size: tuple[int, int]
    shown: tuple[int, int]
    jpeg: bytes


def write_thumbnails(index: Index, log_dir: Path, attempt: int) -> None:
    """Write logs/val-<attempt>.json: images from the tallest to the widest. An error is printed, and ends no run."""
    _write(index, choose_images, THUMBNAIL_PIXELS, log_dir, f"val-{attempt_name(attempt)}")


def write_class_thumbnails(index: Index, labels: Sequence[int], log_dir: Path, attempt: int) -> None:
    """Write logs/classes-<attempt>.json: the first image of each of these classes. An error is printed."""
    label_of_image = index.labels[:]
    numbers = [int(matches.argmax()) for label in labels if (matches := label_of_image == label).any()]
    _write(index, lambda _: numbers, CLASS_THUMBNAIL_PIXELS, log_dir, f"classes-{attempt_name(attempt)}")


def read_thumbnails(log_dir: Path) -> list[Thumbnail]:
    """Return the thumbnails of the first attempt that wrote readable ones, [] when there are none."""
    return _read_first(sorted((log_dir / LOGS_FOLDER).glob("val-*.json")))


def read_class_thumbnails(log_dir: Path) -> list[Thumbnail]:
    """Return the images of classes by the last attempt that wrote some: its validation chose them. [] for none."""
    return _read_first(sorted((log_dir / LOGS_FOLDER).glob("classes-*.json"), reverse=True))


def _write(index: Index, choose: Callable[[Index], list[int]], pixels: int, log_dir: Path, name: str) -> None:
    try:
        thumbnails = []
        for number in choose(index):
            jpeg, shown = shrink_to_jpeg(index.read(number), pixels)
            label, size = index.classes[index.labels[number]], (int(index.widths[number]), int(index.heights[number]))
            thumbnails.append(Thumbnail(label=label, size=size, shown=shown, jpeg=jpeg))
        path = log_dir / LOGS_FOLDER / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(encode(thumbnails)).encode(), durable=False)
    except Exception as error:  # an image library or the disk may raise anything, and that must not end a run
        print(f"no thumbnails of validation images: {' '.join(str(error).split())}", flush=True)


def _read_first(paths: Iterable[Path]) -> list[Thumbnail]:
    return next((found for path in paths if (found := read_intact(path, list[Thumbnail]))), [])


def choose_images(index: Index) -> list[int]:
    """Return the numbers of `THUMBNAIL_COUNT` images of different shapes, in order of width / height.

    They are evenly spaced among `CANDIDATE_COUNT` images, which are evenly spaced in the data set.
    """
    candidates = _evenly_spaced(range(len(index)), CANDIDATE_COUNT)
    by_shape = sorted(candidates, key=lambda number: index.widths[number] / index.heights[number])
    return _evenly_spaced(by_shape, THUMBNAIL_COUNT)


def _evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """Return `count` of the items, the first and the last among them; all items where there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[round(position * (len(items) - 1) / (count - 1))] for position in range(count)]


def shrink_to_jpeg(data: bytes, side: int) -> tuple[bytes, tuple[int, int]]:
    """Return an image as a JPEG of at most `side` pixels, and its (width, height). Raises `BadImage`."""
    # Imported here: the report only reads thumbnails, and starts faster without the image libraries.
    import numpy as np
    from PIL import Image

    from train.data.decode import decode_image, encode_jpeg

    image = Image.fromarray(decode_image(data))
    image.thumbnail((side, side))
    return encode_jpeg(np.asarray(image), JPEG_QUALITY), image.size
