"""A picture of crops: the same few images under each, what the network does not see dimmed, and its answers."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .picture import INK, PAPER, font

if TYPE_CHECKING:
    from PIL.Image import Image

CELL, GAP, TOP, TEXT, LEFT = 224, 16, 92, 44, 16  # pixels
RIGHT, WRONG, EDGE = "#2a9d5c", "#d1495b", "#ffcc00"
DIM = 0.65  # towards white
NAMES = {"tta": "tta: also mirrored"}


def draw(path: Path, title: str, images: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture: a row for each image, a column for each crop. Raises `OSError`.

    `images` is what train.examine tells as "seen".
    """
    from PIL import Image, ImageDraw

    crops = [one["crop"] for one in images[0]["answers"]] if images else []
    width = LEFT + max(2, len(crops)) * (CELL + GAP)
    page = Image.new("RGB", (width, TOP + len(images) * (CELL + TEXT + GAP)), PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((LEFT, 16), title, INK, font=font(18))
    for column, crop in enumerate(crops):
        place = LEFT + column * (CELL + GAP) + CELL / 2, TOP - 24
        pen.text(place, NAMES.get(crop, crop), INK, font=font(16), anchor="mm")
    for row, one in enumerate(images):
        top = TOP + row * (CELL + TEXT + GAP)
        whole = Image.open(BytesIO(base64.b64decode(one["jpeg"]))).convert("RGB")
        whole.thumbnail((CELL, CELL))
        for column, answer in enumerate(one["answers"]):
            left = LEFT + column * (CELL + GAP)
            part = marked(whole, answer["boxes"])
            page.paste(part, (left + (CELL - part.width) // 2, top + CELL - part.height))
            words = f"{_short(answer['class'])} {answer['percent']:.0f} %"
            pen.text((left, top + CELL + 6), words, RIGHT if answer["right"] else WRONG, font=font(15))
            if not answer["right"]:
                pen.text((left, top + CELL + 24), f"is {_short(one['class'])}", INK, font=font(13))
    page.save(path)


def marked(whole: "Image", boxes: Sequence[Sequence[float]]) -> "Image":
    """Return an image with its parts (top, left, height, width, of 1) as they are, the rest dimmed, and their edges."""
    from PIL import Image, ImageDraw

    seen = Image.new("L", whole.size, round(255 * (1 - DIM)))
    places = []
    for top, left, height, width in boxes:
        corner = round(left * whole.width), round(top * whole.height)
        end = round((left + width) * whole.width) - 1, round((top + height) * whole.height) - 1
        places.append((*corner, *end))
        ImageDraw.Draw(seen).rectangle(places[-1], fill=255)
    found = Image.composite(whole, Image.new("RGB", whole.size, PAPER), seen)
    for place in places:
        ImageDraw.Draw(found).rectangle(place, outline=EDGE, width=2)
    return found


def _short(name: str) -> str:
    return name if len(name) < 20 else f"{name[:18]}.."
