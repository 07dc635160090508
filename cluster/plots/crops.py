"""Plot of test-time crops: each image under each crop, with the network's answer below (`imgnet-cluster eval --plot`).

The part of an image that the network does not see is dimmed.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from train.evaluation.protocol import CropAnswer, Evaluation, ExampleImage

from .figures import BACKGROUND_COLOR, TEXT_COLOR, font_points, make_pixel_figure, matplotlib_settings, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

# Lengths in pixels.
CELL_PIXELS = 224
CELL_GAP = 16
HEADER_HEIGHT = 144
LEFT_MARGIN = 16
TITLE_FONT_SIZE = 18
ANSWER_HEIGHT = 26  # below each image: the predicted class of each crop
TRUE_CLASS_HEIGHT = 18  # below the answers, only where one of them is wrong: the true class

CORRECT_COLOR = "#2a9d5c"
WRONG_COLOR = "#d1495b"
FRAME_COLOR = "#ffcc00"
DIM_FRACTION = 0.65  # how far a dimmed pixel is moved towards white
CROP_LABELS = {"tta": "tta: also mirrored"}


def draw_crops(path: Path, evaluation: Evaluation) -> None:
    """Write the plot of an evaluation's example images: one row for each image, one column for each crop.

    Raises `OSError`.
    """
    with matplotlib_settings():
        save_png(crops_figure(evaluation), path)


def crops_figure(evaluation: Evaluation) -> "Figure":
    """Return the plot, as `draw_crops` says. One unit of its axes is a pixel, counted from the top left."""
    import numpy as np
    from matplotlib.textpath import TextPath

    images = evaluation.examples
    title = f"{evaluation.recipe}, {evaluation.epoch} epochs done, step {evaluation.step}"
    crop_names = list(dict.fromkeys(row.crop for row in evaluation.rows))
    cells = [_decode_to_cell_size(image.jpeg) for image in images]
    row_heights = [cell.height + _answer_height(image) + CELL_GAP for cell, image in zip(cells, images, strict=True)]
    title_width = round(TextPath((0, 0), title, size=TITLE_FONT_SIZE).get_extents().width)
    width = max(LEFT_MARGIN + max(2, len(crop_names)) * (CELL_PIXELS + CELL_GAP), 2 * LEFT_MARGIN + title_width)
    height = HEADER_HEIGHT + sum(row_heights)
    figure = make_pixel_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    sizes = list(dict.fromkeys(row.size for row in evaluation.rows))
    size_note = ", the first of --sizes" if len(sizes) > 1 else ""
    _draw_header(axes, title, f"Drawn at {sizes[0]} pixels{size_note}.")
    for column, crop_name in enumerate(crop_names):
        position = (_column_center(column), HEADER_HEIGHT - 16)
        axes.text(*position, CROP_LABELS.get(crop_name, crop_name), ha="center", va="center", fontsize=font_points(16))
    top = HEADER_HEIGHT
    for image, cell, row_height in zip(images, cells, row_heights, strict=True):
        for column, answer in enumerate(image.answers):
            center_x = _column_center(column)
            picture = np.asarray(dim_outside_boxes(cell, answer.boxes))
            figure.figimage(picture, center_x - cell.width // 2, height - top - cell.height)  # from the bottom left
            _draw_answer(axes, center_x, top + cell.height, answer, image.true)
        top += row_height
    return figure


def _answer_height(image: ExampleImage) -> int:
    is_all_right = all(answer.predicted == image.true for answer in image.answers)
    return ANSWER_HEIGHT + (0 if is_all_right else TRUE_CLASS_HEIGHT)


def _column_center(column: int) -> int:
    return LEFT_MARGIN + column * (CELL_PIXELS + CELL_GAP) + CELL_PIXELS // 2


def _decode_to_cell_size(jpeg: bytes) -> "Image":
    """Decode an image and scale its long side to the cell: small images are enlarged, so that all rows look alike."""
    from PIL import Image

    image = Image.open(BytesIO(jpeg)).convert("RGB")
    factor = CELL_PIXELS / max(image.size)
    return image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))))


def _draw_header(axes: "Axes", title: str, subtitle: str) -> None:
    """Draw the title, the subtitle, and the legend of frames, percentages and colors."""
    axes.text(LEFT_MARGIN, 14, title, va="top", fontsize=font_points(TITLE_FONT_SIZE))
    lines = (subtitle, "Yellow frame: what the network sees.", "Below: the predicted class and its probability;")
    for index, line in enumerate(lines):
        text = axes.text(LEFT_MARGIN, 42 + 20 * index, line, va="top", fontsize=font_points(13))
    for words, color in ((" green: right", CORRECT_COLOR), (",", TEXT_COLOR), (" red: wrong", WRONG_COLOR)):
        # Each part of the last line begins at the lower right corner of the part before it.
        text = axes.annotate(words, (1, 0), xycoords=text, va="bottom", color=color, fontsize=font_points(13))


def _draw_answer(axes: "Axes", center_x: int, top: int, answer: CropAnswer, true_class: str) -> None:
    """Draw the predicted class and its probability, and the true class where the prediction is wrong."""
    prediction = f"{_truncate_class_name(answer.predicted)} {answer.percent:.0f} %"
    is_right = answer.predicted == true_class
    color = CORRECT_COLOR if is_right else WRONG_COLOR
    axes.text(center_x, top + 6, prediction, ha="center", va="top", color=color, fontsize=font_points(15))
    if not is_right:
        truth = f"is {_truncate_class_name(true_class)}"
        axes.text(center_x, top + ANSWER_HEIGHT, truth, ha="center", va="top", fontsize=font_points(13))


def dim_outside_boxes(image: "Image", boxes: Sequence[Sequence[float]]) -> "Image":
    """Return a copy of `image` that is dimmed outside `boxes`, with a frame around each box.

    A box is (top, left, height, width) as fractions of the image.
    """
    from PIL import Image, ImageDraw

    mask = Image.new("L", image.size, round(255 * (1 - DIM_FRACTION)))
    pixel_boxes = []
    for top, left, height, width in boxes:
        pixel_box = (
            round(left * image.width),
            round(top * image.height),
            round((left + width) * image.width) - 1,
            round((top + height) * image.height) - 1,
        )
        pixel_boxes.append(pixel_box)
        ImageDraw.Draw(mask).rectangle(pixel_box, fill=255)
    dimmed = Image.composite(image, Image.new("RGB", image.size, BACKGROUND_COLOR), mask)
    for pixel_box in pixel_boxes:
        ImageDraw.Draw(dimmed).rectangle(pixel_box, outline=FRAME_COLOR, width=2)
    return dimmed


def _truncate_class_name(name: str) -> str:
    return name if len(name) < 20 else f"{name[:18]}.."
