"""Picture of an experiment, drawn with Pillow: one dot for each run, and the training accuracy over epochs as bands."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.plots.palette import BACKGROUND_COLOR, GRID_COLOR, SERIES_COLORS, TEXT_COLOR, load_font
from experiments.harness.claims import Experiment
from experiments.harness.confidence import ResultRows, RowsByArm, accuracies, accuracy, mean_with_deviation

# Lengths in pixels.
WIDTH = 960
LEFT_MARGIN = 260
RIGHT_MARGIN = 170
TOP_MARGIN = 80
ROW_HEIGHT = 34  # of an arm in the upper panel
PANEL_GAP = 96
CURVES_HEIGHT = 300
CURVES_LEFT_MARGIN = 80
CURVES_RIGHT_MARGIN = 40
FOOTER_HEIGHT = 60

ARM_COLORS = (*SERIES_COLORS, "#c26bb3", "#6f8f00")
BAND_ALPHA = 50  # opacity of a band, of 255
ArmRows = Sequence[tuple[str, ResultRows]]


def draw_experiment(path: Path, experiment: Experiment, rows: RowsByArm) -> None:
    """Write the picture as PNG. Arms without runs are left out."""
    from PIL import Image, ImageDraw

    arms = [(arm.name, rows[arm.name]) for arm in experiment.arms if rows.get(arm.name)]
    curves_top = TOP_MARGIN + ROW_HEIGHT * len(arms) + PANEL_GAP
    image = Image.new("RGB", (WIDTH, curves_top + CURVES_HEIGHT + FOOTER_HEIGHT), BACKGROUND_COLOR)
    pen = ImageDraw.Draw(image, "RGBA")
    pen.text((30, 20), experiment.title, TEXT_COLOR, font=load_font(19))
    draw_dots(pen, TOP_MARGIN, arms)
    draw_curves(pen, curves_top, arms)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def axis_ticks(low: float, high: float) -> list[float]:
    """Return about five round values, the first not above `low` and the last not below `high`."""
    span = max(high - low, 1e-3)
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 5 >= span)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _arm_color(index: int) -> str:
    return ARM_COLORS[index % len(ARM_COLORS)]


def draw_dots(pen: Any, top: float, arms: ArmRows) -> None:
    """Draw a row for each arm: a dot for each run, the mean, and a band of one standard deviation on both sides.

    Runs that diverged are hollow dots.
    """
    values = [value for _, rows in arms for value in accuracies(rows)]
    ticks = axis_ticks(min(values), max(values))
    bottom = top + ROW_HEIGHT * len(arms)

    def to_x(value: float) -> float:
        return LEFT_MARGIN + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN)

    for tick in ticks:
        x = to_x(tick)
        pen.line([(x, top), (x, bottom)], GRID_COLOR)
        pen.text((x, bottom + 14), f"{tick:g}", TEXT_COLOR, font=load_font(13), anchor="mm")
    label_position = ((LEFT_MARGIN + WIDTH - RIGHT_MARGIN) / 2, bottom + 34)
    pen.text(label_position, "top-1 %, one dot for each run", TEXT_COLOR, font=load_font(14), anchor="mm")
    for index, (name, rows) in enumerate(arms):
        color = _arm_color(index)
        y = top + ROW_HEIGHT * (index + 0.5)
        arm_values = accuracies(rows)
        mean = statistics.mean(arm_values)
        if len(arm_values) > 1:
            deviation = statistics.stdev(arm_values)
            band_left = max(LEFT_MARGIN, to_x(mean - deviation))
            band_right = min(WIDTH - RIGHT_MARGIN, to_x(mean + deviation))
            pen.rectangle([band_left, y - 9, band_right, y + 9], color + f"{BAND_ALPHA:02x}")
        pen.line([(to_x(mean), y - 11), (to_x(mean), y + 11)], color, width=3)
        for row in rows:
            x = to_x(accuracy(row))
            pen.ellipse([x - 4, y - 4, x + 4, y + 4], BACKGROUND_COLOR if row["diverged"] else color, color, 2)
        pen.text((LEFT_MARGIN - 14, y), name, color, font=load_font(15), anchor="rm")
        summary = mean_with_deviation(arm_values)
        pen.text((WIDTH - RIGHT_MARGIN + 14, y), summary, color, font=load_font(14), anchor="lm")


def draw_curves(pen: Any, top: float, arms: ArmRows) -> None:
    """Draw the training accuracy over epochs: the mean of an arm's runs, and one standard deviation as a band."""
    curves = [_mean_curve(rows) for _, rows in arms]
    bounds = [bound for curve in curves for mean, deviation in curve for bound in (mean - deviation, mean + deviation)]
    if not bounds:
        return
    epochs = max(map(len, curves))
    ticks = axis_ticks(max(0.0, min(bounds)), min(100.0, max(bounds)))
    width = WIDTH - CURVES_LEFT_MARGIN - CURVES_RIGHT_MARGIN

    def to_pixels(epoch: int, value: float) -> tuple[float, float]:
        x = CURVES_LEFT_MARGIN + (epoch - 1) / max(1, epochs - 1) * width
        return x, top + CURVES_HEIGHT * (1 - (value - ticks[0]) / (ticks[-1] - ticks[0]))

    for tick in ticks:
        left, right = to_pixels(1, tick), to_pixels(epochs, tick)
        pen.line([left, right], GRID_COLOR)
        pen.text((left[0] - 10, left[1]), f"{tick:g}", TEXT_COLOR, font=load_font(13), anchor="rm")
    for epoch in range(1, epochs + 1, max(1, epochs // 10)):
        position = (to_pixels(epoch, 0)[0], top + CURVES_HEIGHT + 16)
        pen.text(position, f"{epoch}", TEXT_COLOR, font=load_font(13), anchor="mm")
    heading = "top-1 % in training, over epochs"
    pen.text((CURVES_LEFT_MARGIN, top - 16), heading, TEXT_COLOR, font=load_font(14), anchor="lm")
    for index, curve in enumerate(curves):
        if len(curve) < 2:
            continue
        color = _arm_color(index)
        points = list(enumerate(curve, 1))
        upper_edge = [to_pixels(epoch, mean + deviation) for epoch, (mean, deviation) in points]
        lower_edge = [to_pixels(epoch, mean - deviation) for epoch, (mean, deviation) in points]
        pen.polygon([*upper_edge, *reversed(lower_edge)], color + f"{BAND_ALPHA:02x}")
        pen.line([to_pixels(epoch, mean) for epoch, (mean, _) in points], color, width=3, joint="curve")


def _mean_curve(rows: ResultRows) -> list[tuple[float, float]]:
    """Return mean and standard deviation of the training accuracy at each epoch that all runs have reached."""
    values_by_epoch = zip(*(row["train_top1"] for row in rows), strict=False)
    return [
        (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0) for values in values_by_epoch
    ]
