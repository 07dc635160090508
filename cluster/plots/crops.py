"""A picture of crops: the same few images under each, what the network does not see dimmed, and its answers."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .palette import INK, PAPER, font

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

CELL, GAP, TOP, LEFT, TITLE = 224, 16, 144, 16, 18  # pixels
LINE, MORE = 26, 18  # below an image: its answers; the right class where one of them is wrong
RIGHT, WRONG, EDGE = "#2a9d5c", "#d1495b", "#ffcc00"
DIM = 0.65  # towards white
NAMES = {"tta": "tta: also mirrored"}


def draw(path: Path, title: str, size: int, images: Sequence[Mapping[str, Any]], several: bool = False) -> None:
    """Write the picture: a row for each image, a column for each crop. Raises `OSError`.

    `images` is what train.evaluation.__main__ tells as "seen", of `size` pixels: the first of `several`.
    """
    from PIL import Image, ImageDraw

    crops = [one["crop"] for one in images[0]["answers"]] if images else []
    wholes = [_fitted(one["jpeg"]) for one in images]
    feet = [LINE + (0 if all(answer["right"] for answer in one["answers"]) else MORE) for one in images]
    width = max(LEFT + max(2, len(crops)) * (CELL + GAP), 2 * LEFT + round(font(TITLE).getlength(title)))
    height = TOP + sum(whole.height + foot + GAP for whole, foot in zip(wholes, feet, strict=True))
    page = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(page)
    others = ", the first of --sizes, and not at the others" if several else ""
    _head(pen, title, f"Drawn at {size} pixels{others}.")
    for column, crop in enumerate(crops):
        pen.text((_middle(column), TOP - 16), NAMES.get(crop, crop), INK, font=font(16), anchor="mm")
    top = TOP
    for one, whole, foot in zip(images, wholes, feet, strict=True):
        for column, answer in enumerate(one["answers"]):
            page.paste(marked(whole, answer["boxes"]), (_middle(column) - whole.width // 2, top))
            _answer(pen, _middle(column), top + whole.height, answer, one["class"])
        top += whole.height + foot + GAP
    page.save(path)


def _middle(column: int) -> int:
    return LEFT + column * (CELL + GAP) + CELL // 2


def _fitted(jpeg: str) -> "Image":
    """The image, as large as a cell has room for: small copies are enlarged, so that all rows are alike."""
    from PIL import Image

    whole = Image.open(BytesIO(base64.b64decode(jpeg))).convert("RGB")
    factor = CELL / max(whole.size)
    return whole.resize((max(1, round(whole.width * factor)), max(1, round(whole.height * factor))))


def _head(pen: "ImageDraw", title: str, drawn: str) -> None:
    """The title, what is drawn, and what frames, percentages and colours mean."""
    pen.text((LEFT, 14), title, INK, font=font(TITLE))
    pen.text((LEFT, 42), drawn, INK, font=font(13))
    pen.text((LEFT, 62), "Yellow frame: what the network sees.", INK, font=font(13))
    left, says = float(LEFT), "Below: the class it says, and its probability; "
    for words, colour in ((says, INK), ("green: right", RIGHT), (", ", INK), ("red: wrong", WRONG)):
        pen.text((left, 82), words, colour, font=font(13))
        left += pen.textlength(words, font=font(13))


def _answer(pen: "ImageDraw", middle: int, top: int, answer: Mapping[str, Any], truth: str) -> None:
    """What the network says of a crop, and what it is where that is wrong."""
    words = f"{_short(answer['class'])} {answer['percent']:.0f} %"
    pen.text((middle, top + 6), words, RIGHT if answer["right"] else WRONG, font=font(15), anchor="ma")
    if not answer["right"]:
        pen.text((middle, top + LINE), f"is {_short(truth)}", INK, font=font(13), anchor="ma")


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
