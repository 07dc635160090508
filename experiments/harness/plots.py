"""A picture of an experiment, drawn with Pillow: a dot for each run, and training accuracy over epochs as bands."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.plots.palette import BACKGROUND_COLOUR, GRID_COLOUR, SERIES_COLOURS, TEXT_COLOUR, load_font
from experiments.harness.claims import Experiment
from experiments.harness.confidence import RowsByArm, accuracies, accuracy, mean_with_deviation

WIDTH, LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN = 960, 260, 170, 80
ROW_HEIGHT, PANEL_GAP, CURVES_HEIGHT, FOOTER_HEIGHT = (
    34,
    96,
    300,
    60,
)  # pixels: an arm's row, between the panels, the curves' height, below them
ARM_COLOURS = (*SERIES_COLOURS, "#c26bb3", "#6f8f00")
BAND_ALPHA = 50  # of 255: how strong a band is


def draw_experiment(path: Path, experiment: Experiment, rows: RowsByArm) -> None:
    """Write the picture as PNG."""
    from PIL import Image, ImageDraw

    arms = [(arm.name, rows[arm.name]) for arm in experiment.arms if rows.get(arm.name)]
    high = TOP_MARGIN + ROW_HEIGHT * len(arms) + PANEL_GAP + CURVES_HEIGHT + FOOTER_HEIGHT
    image = Image.new("RGB", (WIDTH, high), BACKGROUND_COLOUR)
    pen = ImageDraw.Draw(image, "RGBA")
    pen.text((30, 20), experiment.title, TEXT_COLOUR, font=load_font(19))
    draw_dots(pen, TOP_MARGIN, arms)
    draw_curves(pen, TOP_MARGIN + ROW_HEIGHT * len(arms) + PANEL_GAP, arms)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def axis_ticks(low: float, high: float) -> list[float]:
    """Return about five round values, the first not above `low` and the last not below `high`."""
    wide = max(high - low, 1e-3)
    step = 10 ** math.floor(math.log10(wide / 4))
    step *= next(one for one in (1, 2, 5, 10) if one * step * 5 >= wide)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def draw_dots(pen: Any, top: float, arms: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Draw a row for each arm: its runs, the mean, and one standard deviation to both sides."""
    known = [one for _, mine in arms for one in accuracies(mine)]
    scale, foot = axis_ticks(min(known), max(known)), top + ROW_HEIGHT * len(arms)

    def place(x: float) -> float:
        return LEFT_MARGIN + (x - scale[0]) / (scale[-1] - scale[0]) * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN)

    for x in scale:
        pen.line([(place(x), top), (place(x), foot)], GRID_COLOUR)
        pen.text((place(x), foot + 14), f"{x:g}", TEXT_COLOUR, font=load_font(13), anchor="mm")
    pen.text(
        ((LEFT_MARGIN + WIDTH - RIGHT_MARGIN) / 2, foot + 34),
        "top-1 %, one dot for each run",
        TEXT_COLOUR,
        font=load_font(14),
        anchor="mm",
    )
    for number, (name, mine) in enumerate(arms):
        colour, y, found = ARM_COLOURS[number % len(ARM_COLOURS)], top + ROW_HEIGHT * (number + 0.5), accuracies(mine)
        mean = statistics.mean(found)
        if len(found) > 1:
            half = statistics.stdev(found)
            ends = [max(LEFT_MARGIN, place(mean - half)), min(WIDTH - RIGHT_MARGIN, place(mean + half))]
            pen.rectangle([ends[0], y - 9, ends[1], y + 9], colour + f"{BAND_ALPHA:02x}")
        pen.line([(place(mean), y - 11), (place(mean), y + 11)], colour, width=3)
        for row in mine:
            box = [place(accuracy(row)) - 4, y - 4, place(accuracy(row)) + 4, y + 4]
            pen.ellipse(box, BACKGROUND_COLOUR if row["diverged"] else colour, colour, 2)
        pen.text((LEFT_MARGIN - 14, y), name, colour, font=load_font(15), anchor="rm")
        pen.text((WIDTH - RIGHT_MARGIN + 14, y), mean_with_deviation(found), colour, font=load_font(14), anchor="lm")


def draw_curves(pen: Any, top: float, arms: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Draw the accuracy in training over epochs: the mean of an arm's runs, and one standard deviation as a band."""
    lines = [_mean_curve(mine) for _, mine in arms]
    known = [y for line in lines for mean, half in line for y in (mean - half, mean + half)]
    if not known:
        return
    longest, scale, left = max(map(len, lines)), axis_ticks(max(0.0, min(known)), min(100.0, max(known))), 80

    def place(epoch: int, y: float) -> tuple[float, float]:
        across = left + (epoch - 1) / max(1, longest - 1) * (WIDTH - left - 40)
        return across, top + CURVES_HEIGHT * (1 - (y - scale[0]) / (scale[-1] - scale[0]))

    for y in scale:
        pen.line([place(1, y), place(longest, y)], GRID_COLOUR)
        pen.text((left - 10, place(1, y)[1]), f"{y:g}", TEXT_COLOUR, font=load_font(13), anchor="rm")
    for epoch in range(1, longest + 1, max(1, longest // 10)):
        pen.text(
            (place(epoch, 0)[0], top + CURVES_HEIGHT + 16), f"{epoch}", TEXT_COLOUR, font=load_font(13), anchor="mm"
        )
    pen.text((left, top - 16), "top-1 % in training, over epochs", TEXT_COLOUR, font=load_font(14), anchor="lm")
    for number, line in enumerate(lines):
        colour, spots = ARM_COLOURS[number % len(ARM_COLOURS)], list(enumerate(line, 1))
        above, below = ([place(epoch, mean + sign * half) for epoch, (mean, half) in spots] for sign in (1, -1))
        if len(spots) > 1:
            pen.polygon([*above, *reversed(below)], colour + f"{BAND_ALPHA:02x}")
            pen.line([place(epoch, mean) for epoch, (mean, _) in spots], colour, width=3, joint="curve")


def _mean_curve(rows: Sequence[Any]) -> list[tuple[float, float]]:
    """Mean and standard deviation at each epoch that all runs ended."""
    columns = list(zip(*(row["train_top1"] for row in rows), strict=False))
    return [(statistics.mean(one), statistics.stdev(one) if len(one) > 1 else 0.0) for one in columns]
