"""A picture of crops: the same few images under each, what the network does not see dimmed, and its answers."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .palette import BACKGROUND_COLOUR, TEXT_COLOUR, load_font

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

CELL_PIXELS, CELL_GAP, HEADER_HEIGHT, LEFT_MARGIN, TITLE_FONT_SIZE = 224, 16, 144, 16, 18  # pixels
ANSWER_HEIGHT, TRUE_CLASS_HEIGHT = 26, 18  # below an image: its answers; the right class where one of them is wrong
CORRECT_COLOUR, WRONG_COLOUR, FRAME_COLOUR = "#2a9d5c", "#d1495b", "#ffcc00"
DIM_FRACTION = 0.65  # towards white
CROP_LABELS = {"tta": "tta: also mirrored"}


def draw_crops(
    path: Path, title: str, size: int, images: Sequence[Mapping[str, Any]], has_several_sizes: bool = False
) -> None:
    """Write the picture: a row for each image, a column for each crop. Raises `OSError`.

    `images` is what train.evaluation.__main__ tells as "seen", of `size` pixels: the first of `several`.
    """
    from PIL import Image, ImageDraw

    crops = [one["crop"] for one in images[0]["answers"]] if images else []
    wholes = [_decode_to_cell_size(one["jpeg"]) for one in images]
    feet = [
        ANSWER_HEIGHT + (0 if all(answer["right"] for answer in one["answers"]) else TRUE_CLASS_HEIGHT)
        for one in images
    ]
    width = max(
        LEFT_MARGIN + max(2, len(crops)) * (CELL_PIXELS + CELL_GAP),
        2 * LEFT_MARGIN + round(load_font(TITLE_FONT_SIZE).getlength(title)),
    )
    height = HEADER_HEIGHT + sum(whole.height + foot + CELL_GAP for whole, foot in zip(wholes, feet, strict=True))
    page = Image.new("RGB", (width, height), BACKGROUND_COLOUR)
    pen = ImageDraw.Draw(page)
    others = ", the first of --sizes, and not at the others" if has_several_sizes else ""
    _draw_header(pen, title, f"Drawn at {size} pixels{others}.")
    for column, crop in enumerate(crops):
        pen.text(
            (_column_centre(column), HEADER_HEIGHT - 16),
            CROP_LABELS.get(crop, crop),
            TEXT_COLOUR,
            font=load_font(16),
            anchor="mm",
        )
    top = HEADER_HEIGHT
    for one, whole, foot in zip(images, wholes, feet, strict=True):
        for column, answer in enumerate(one["answers"]):
            page.paste(dim_outside_boxes(whole, answer["boxes"]), (_column_centre(column) - whole.width // 2, top))
            _draw_answer(pen, _column_centre(column), top + whole.height, answer, one["class"])
        top += whole.height + foot + CELL_GAP
    page.save(path)


def _column_centre(column: int) -> int:
    return LEFT_MARGIN + column * (CELL_PIXELS + CELL_GAP) + CELL_PIXELS // 2


def _decode_to_cell_size(jpeg: str) -> "Image":
    """The image, as large as a cell has room for: small copies are enlarged, so that all rows are alike."""
    from PIL import Image

    whole = Image.open(BytesIO(base64.b64decode(jpeg))).convert("RGB")
    factor = CELL_PIXELS / max(whole.size)
    return whole.resize((max(1, round(whole.width * factor)), max(1, round(whole.height * factor))))


def _draw_header(pen: "ImageDraw", title: str, subtitle: str) -> None:
    """The title, what is drawn, and what frames, percentages and colours mean."""
    pen.text((LEFT_MARGIN, 14), title, TEXT_COLOUR, font=load_font(TITLE_FONT_SIZE))
    pen.text((LEFT_MARGIN, 42), subtitle, TEXT_COLOUR, font=load_font(13))
    pen.text((LEFT_MARGIN, 62), "Yellow frame: what the network sees.", TEXT_COLOUR, font=load_font(13))
    left, says = float(LEFT_MARGIN), "Below: the class it says, and its probability; "
    for words, colour in (
        (says, TEXT_COLOUR),
        ("green: right", CORRECT_COLOUR),
        (", ", TEXT_COLOUR),
        ("red: wrong", WRONG_COLOUR),
    ):
        pen.text((left, 82), words, colour, font=load_font(13))
        left += pen.textlength(words, font=load_font(13))


def _draw_answer(pen: "ImageDraw", centre_x: int, top: int, answer: Mapping[str, Any], true_class: str) -> None:
    """What the network says of a crop, and what it is where that is wrong."""
    words = f"{_truncate_class_name(answer['class'])} {answer['percent']:.0f} %"
    pen.text(
        (centre_x, top + 6), words, CORRECT_COLOUR if answer["right"] else WRONG_COLOUR, font=load_font(15), anchor="ma"
    )
    if not answer["right"]:
        pen.text(
            (centre_x, top + ANSWER_HEIGHT),
            f"is {_truncate_class_name(true_class)}",
            TEXT_COLOUR,
            font=load_font(13),
            anchor="ma",
        )


def dim_outside_boxes(image: "Image", boxes: Sequence[Sequence[float]]) -> "Image":
    """Return an image with its parts (top, left, height, width, of 1) as they are, the rest dimmed, and their edges."""
    from PIL import Image, ImageDraw

    seen = Image.new("L", image.size, round(255 * (1 - DIM_FRACTION)))
    places = []
    for top, left, height, width in boxes:
        corner = round(left * image.width), round(top * image.height)
        end = round((left + width) * image.width) - 1, round((top + height) * image.height) - 1
        places.append((*corner, *end))
        ImageDraw.Draw(seen).rectangle(places[-1], fill=255)
    found = Image.composite(image, Image.new("RGB", image.size, BACKGROUND_COLOUR), seen)
    for place in places:
        ImageDraw.Draw(found).rectangle(place, outline=FRAME_COLOUR, width=2)
    return found


def _truncate_class_name(name: str) -> str:
    return name if len(name) < 20 else f"{name[:18]}.."
