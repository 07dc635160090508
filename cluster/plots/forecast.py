"""Plot of a forecast: minutes and dollars over the number of machines, one line for each machine type.

It is drawn with Pillow, so that `imgnet-cluster plan --plot` needs no matplotlib.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import BadInput

from .palette import BACKGROUND_COLOR, GRID_COLOR, SERIES_COLORS, TEXT_COLOR, load_font

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Points = Sequence[tuple[float, float]]

# Lengths in pixels.
WIDTH = 960
HEIGHT = 800
LEFT_MARGIN = 90
RIGHT_MARGIN = 30
TOP_MARGIN = 70
PANEL_GAP = 84
BOTTOM_MARGIN = 76


def draw_forecast(path: Path, title: str, minutes: Mapping[str, Points], dollars: Mapping[str, Points]) -> None:
    """Write the plot as PNG: minutes above dollars, over the same numbers of machines on a logarithmic axis.

    `minutes` and `dollars` map the name of each line to its points (machines, value). Raises `BadInput` when the name
    of the file does not end in .png, and `OSError`.
    """
    from PIL import Image, ImageDraw

    if path.suffix.lower() != ".png":
        raise BadInput(f"--plot {path}: the plot is a PNG image; give a file name that ends in .png")
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND_COLOR)
    pen = ImageDraw.Draw(image)
    pen.text((LEFT_MARGIN, 22), title, TEXT_COLOR, font=load_font(20))
    machine_counts = sorted({count for points in minutes.values() for count, _ in points})
    panel_height = (HEIGHT - TOP_MARGIN - PANEL_GAP - BOTTOM_MARGIN) / 2
    second_top = TOP_MARGIN + panel_height + PANEL_GAP
    colors = {name: SERIES_COLORS[index % len(SERIES_COLORS)] for index, name in enumerate(minutes)}
    draw_panel(pen, TOP_MARGIN, panel_height, "minutes", machine_counts, minutes, colors)
    draw_panel(pen, second_top, panel_height, "dollars, on demand", machine_counts, dollars, colors)
    pen.text((WIDTH / 2, HEIGHT - 18), "machines", TEXT_COLOR, font=load_font(15), anchor="mm")
    image.save(path)


def ticks_from_zero(max_value: float) -> list[float]:
    """Return about five round values, from 0 to the first that is not below `max_value`."""
    step = 10 ** math.floor(math.log10(max_value / 4)) if max_value > 0 else 1.0
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * step * 5 >= max_value)
    return [step * index for index in range(math.ceil(max_value / step - 1e-9) + 1)]


def draw_panel(
    pen: "ImageDraw",
    top: float,
    height: float,
    title: str,
    machine_counts: Sequence[float],
    lines: Mapping[str, Points],
    colors: Mapping[str, str],
) -> None:
    """Draw one panel: axes, grid, lines with their values, and the legend.

    `lines` maps the name of each line to its points (machines, value), `colors` to its color.
    """
    values = [value for points in lines.values() for _, value in points]
    bottom = top + height
    ticks = ticks_from_zero(1.08 * max(values, default=1.0))  # leaves room for the number above the highest point
    log_first = math.log2(machine_counts[0])
    log_last = math.log2(machine_counts[-1])

    def to_pixels(machines: float, value: float) -> tuple[float, float]:
        fraction = (math.log2(machines) - log_first) / (log_last - log_first) if log_last > log_first else 0.5
        x = LEFT_MARGIN + 30 + fraction * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN - 60)
        return x, bottom - height * value / ticks[-1]

    for tick in ticks:
        _, y = to_pixels(machine_counts[0], tick)
        pen.line([(LEFT_MARGIN, y), (WIDTH - RIGHT_MARGIN, y)], GRID_COLOR)
        pen.text((LEFT_MARGIN - 10, y), f"{tick:g}", TEXT_COLOR, font=load_font(14), anchor="rm")
    for count in machine_counts:
        x, _ = to_pixels(count, 0)
        pen.line([(x, bottom), (x, bottom + 5)], TEXT_COLOR)
        pen.text((x, bottom + 30), f"{count:g}", TEXT_COLOR, font=load_font(14), anchor="mm")
    pen.line([(LEFT_MARGIN, top), (LEFT_MARGIN, bottom), (WIDTH - RIGHT_MARGIN, bottom)], TEXT_COLOR)
    heading = title if values else f"{title}: no price is known"
    pen.text((LEFT_MARGIN, top - 14), heading, TEXT_COLOR, font=load_font(15), anchor="lm")
    for name, points in lines.items():
        pixels = [to_pixels(*point) for point in points]
        if len(pixels) > 1:
            pen.line(pixels, colors[name], width=3, joint="curve")
        for (x, y), (count, value) in zip(pixels, points, strict=True):
            pen.ellipse([x - 5, y - 5, x + 5, y + 5], colors[name])
            values_here = [point[1] for others in lines.values() for point in others if point[0] == count]
            if value not in (min(values_here), max(values_here)):
                continue  # numbers between the outer ones would overlap
            below_point = bottom + 15 if y + 26 > bottom else y + 16  # not across the axis
            text_y = y - 15 if value == max(values_here) else below_point
            pen.text((x, text_y), f"{value:.3g}", colors[name], font=load_font(13), anchor="mm")
    draw_legend(pen, top, {name if lines[name] else f"{name} (unknown price)": colors[name] for name in lines})


def draw_legend(pen: "ImageDraw", top: float, color_by_name: Mapping[str, str]) -> None:
    """Draw the names of the lines in their colors, above a panel and aligned to the right."""
    right = float(WIDTH - RIGHT_MARGIN)
    for name, color in reversed(list(color_by_name.items())):
        width = pen.textlength(name, font=load_font(14))
        pen.text((right, top - 14), name, color, font=load_font(14), anchor="rm")
        pen.ellipse([right - width - 16, top - 18, right - width - 8, top - 10], color)
        right -= width + 34
