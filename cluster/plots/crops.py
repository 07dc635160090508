"""Plot of test-time crops: each image under each crop, with the network's answer below (`eval --plot`)."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from train.inference.protocol import Box, CropAnswer, Evaluation

from .figures import font_points, make_pixel_figure, matplotlib_settings, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

CELL_PIXELS = 260  # side of the place of an image and its answer
HEADER_PIXELS = 120
CORRECT_COLOR = "#2a9d5c"
WRONG_COLOR = "#d1495b"
FRAME_COLOR = "#ffcc00"
UNIT_SQUARE = (0, 1, 1, 0)  # left, right, bottom, top: in the units of the boxes
UNSEEN_ALPHA = 0.35  # of what the network does not see
CROP_LABELS = {"tta": "tta: also mirrored"}
CAPTION = (
    "Yellow frame: what the network sees. Below: the predicted class and its probability.\nGreen: right, red: wrong."
)


def draw_crops(path: Path, evaluation: Evaluation) -> None:
    """Write the plot of an evaluation's examples: a row for each image, a column for each crop. Raises `OSError`."""
    from PIL import Image

    examples, answers = evaluation.examples, evaluation.examples[0].answers
    sizes = list(dict.fromkeys(row.size for row in evaluation.rows))
    size_note = ", the first of --sizes" if len(sizes) > 1 else ""
    title = (
        f"{evaluation.recipe}, {evaluation.epoch} epochs done, step {evaluation.step}, at {sizes[0]} pixels{size_note}"
    )
    with matplotlib_settings():
        figure = make_pixel_figure(CELL_PIXELS * max(3, len(answers)), HEADER_PIXELS + CELL_PIXELS * len(examples))
        figure.set_layout_engine("constrained")
        figure.suptitle(f"{title}\n{CAPTION}", fontsize=font_points(15))
        cells = figure.subplots(len(examples), len(answers), squeeze=False)
        for axes, answer in zip(cells[0], answers, strict=True):
            axes.set_title(CROP_LABELS.get(answer.crop, answer.crop), fontsize=font_points(16))
        for row, example in zip(cells, examples, strict=True):
            image = Image.open(BytesIO(example.jpeg)).convert("RGB")
            for axes, answer in zip(row, example.answers, strict=True):
                _show_boxes(axes, image, answer.boxes)
                _show_answer(axes, answer, example.true)
        save_png(figure, path)


def _show_boxes(axes: "Axes", image: "Image", boxes: tuple[Box, ...]) -> None:
    from matplotlib.patches import Rectangle

    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    aspect = image.height / image.width
    axes.imshow(image, alpha=UNSEEN_ALPHA, extent=UNIT_SQUARE, aspect=aspect)
    for top, left, height, width in boxes:
        frame = Rectangle((left, top), width, height, fill=False, edgecolor=FRAME_COLOR)
        axes.add_patch(frame)
        axes.imshow(image, extent=UNIT_SQUARE, aspect=aspect).set_clip_path(frame)


def _show_answer(axes: "Axes", answer: CropAnswer, true_class: str) -> None:
    is_right = answer.predicted == true_class
    text = f"{_shorten(answer.predicted)} {answer.percent:.0f} %" + ("" if is_right else f"\nis {_shorten(true_class)}")
    axes.set_xlabel(text, color=CORRECT_COLOR if is_right else WRONG_COLOR, fontsize=font_points(15))


def _shorten(class_name: str) -> str:
    return class_name if len(class_name) < 20 else f"{class_name[:18]}.."
