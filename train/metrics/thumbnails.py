"""A few validation images, small, beside the logs: they come home with these, from machines that will be gone."""

import base64
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.data.index.base import Index
from train.tools.filesystem import replace

COUNT = 6
LOOK = 60  # images among which the few are chosen, for their shapes
SIDE = 220  # pixels of a thumbnail's longer side


def keep(index: Index, notes: Path, attempt: int) -> None:
    """Write logs/val-<attempt>.json: `COUNT` validation images from tall to broad, of each "label", "size" and
    "shown" (width, height of the image and of its thumbnail), and "jpeg" in base64. A run that cannot goes without.
    """
    try:
        found = [_thumbnail(index, number) for number in chosen(index)]
        (notes / "logs").mkdir(parents=True, exist_ok=True)
        replace(notes / "logs" / f"val-{attempt:06d}.json", json.dumps(found).encode(), durable=False)
    except Exception as error:  # of a library that reads images, or of a disk: not what a run fails of
        print(f"no thumbnails of validation images: {' '.join(str(error).split())}", flush=True)


def kept(run: Path) -> list[dict[str, Any]]:
    """Return what the first attempt that could has written, as `keep` says, with "jpeg" as bytes; else nothing."""
    for path in sorted((run / "logs").glob("val-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [
                {**one, "jpeg": base64.b64decode(one["jpeg"], validate=True)} for one in json.loads(path.read_text())
            ]
    return []


def chosen(index: Index) -> list[int]:
    """Return the numbers of `COUNT` images of as different shapes as `LOOK` that lie evenly in the set have."""
    looked = _spread(range(len(index)), LOOK)
    return _spread(sorted(looked, key=lambda number: index.widths[number] / index.heights[number]), COUNT)


def _spread(things: Sequence[int], count: int) -> list[int]:
    """So many of them, the first and the last among them."""
    if len(things) <= count:
        return list(things)
    return [things[round(one * (len(things) - 1) / (count - 1))] for one in range(count)]


def _thumbnail(index: Index, number: int) -> dict[str, Any]:
    jpeg, shown = small(index.read(number), SIDE)
    return {
        "label": index.classes[int(index.labels[number])],
        "size": (int(index.widths[number]), int(index.heights[number])),
        "shown": shown,
        "jpeg": base64.b64encode(jpeg).decode(),
    }


def small(data: bytes, side: int) -> tuple[bytes, tuple[int, int]]:
    """Return an image's file as a JPEG whose longer side is `side` pixels at most, and its width and height.

    Raises `data.decode.BadImage`.
    """
    import numpy as np
    from PIL import Image

    from train.data.decode import decode, encode

    image = Image.fromarray(decode(data))
    image.thumbnail((side, side))
    return encode(np.asarray(image), 85), image.size
