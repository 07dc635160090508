"""A few validation images, small, beside the logs: they come home with these, from machines that will be gone."""

import base64
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.data.index.base import Index
from train.tools.filesystem import write_atomic

THUMBNAIL_COUNT = 6
CANDIDATE_COUNT = 60  # images among which the few are chosen, for their shapes
THUMBNAIL_PIXELS = 220  # pixels of a thumbnail's longer side


def write_thumbnails(index: Index, log_dir: Path, attempt: int) -> None:
    """Write logs/val-<attempt>.json: `COUNT` validation images from tall to broad, of each "label", "size" and
    "shown" (width, height of the image and of its thumbnail), and "jpeg" in base64. A run that cannot goes without.
    """
    try:
        found = [_thumbnail(index, number) for number in choose_images(index)]
        (log_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_atomic(log_dir / "logs" / f"val-{attempt:06d}.json", json.dumps(found).encode(), durable=False)
    except Exception as error:  # of a library that reads images, or of a disk: not what a run fails of
        print(f"no thumbnails of validation images: {' '.join(str(error).split())}", flush=True)


def read_thumbnails(log_dir: Path) -> list[dict[str, Any]]:
    """Return what the first attempt that could has written, as `keep` says, with "jpeg" as bytes; else nothing."""
    for path in sorted((log_dir / "logs").glob("val-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [
                {**one, "jpeg": base64.b64decode(one["jpeg"], validate=True)} for one in json.loads(path.read_text())
            ]
    return []


def choose_images(index: Index) -> list[int]:
    """Return the numbers of `COUNT` images of as different shapes as `LOOK` that lie evenly in the set have."""
    looked = _evenly_spaced(range(len(index)), CANDIDATE_COUNT)
    return _evenly_spaced(
        sorted(looked, key=lambda number: index.widths[number] / index.heights[number]), THUMBNAIL_COUNT
    )


def _evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """So many of them, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(one * (len(items) - 1) / (count - 1))] for one in range(count)]


def _thumbnail(index: Index, number: int) -> dict[str, Any]:
    jpeg, shown = shrink_to_jpeg(index.read(number), THUMBNAIL_PIXELS)
    return {
        "label": index.classes[int(index.labels[number])],
        "size": (int(index.widths[number]), int(index.heights[number])),
        "shown": shown,
        "jpeg": base64.b64encode(jpeg).decode(),
    }


def shrink_to_jpeg(data: bytes, side: int) -> tuple[bytes, tuple[int, int]]:
    """Return an image's file as a JPEG whose longer side is `side` pixels at most, and its width and height.

    Raises `data.decode.BadImage`.
    """
    import numpy as np
    from PIL import Image

    from train.data.decode import decode_image, encode_jpeg

    image = Image.fromarray(decode_image(data))
    image.thumbnail((side, side))
    return encode_jpeg(np.asarray(image), 85), image.size
