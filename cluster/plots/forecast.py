"""A picture of a forecast: minutes and dollars over the number of machines, a line for each type. Drawn with Pillow."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import BadInput

from .palette import BACKGROUND_COLOUR, GRID_COLOUR, SERIES_COLOURS, TEXT_COLOUR, load_font

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, PANEL_GAP, BOTTOM_MARGIN = 960, 800, 90, 30, 70, 84, 76


def draw_forecast(path: Path, title: str, minutes: Mapping[str, Points], dollars: Mapping[str, Points]) -> None:
    """Write the picture: two panels over the same machines, which are doublings. Raises `BadInput`, `OSError`."""
    from PIL import Image, ImageDraw

    if path.suffix.lower() != ".png":
        raise BadInput(f"--plot {path}: the name of a picture ends in .png")
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND_COLOUR)
    pen = ImageDraw.Draw(image)
    pen.text((LEFT_MARGIN, 22), title, TEXT_COLOUR, font=load_font(20))
    machines = sorted({x for line in minutes.values() for x, _ in line})
    high = (HEIGHT - TOP_MARGIN - PANEL_GAP - BOTTOM_MARGIN) / 2
    colours = {name: SERIES_COLOURS[place % len(SERIES_COLOURS)] for place, name in enumerate(minutes)}
    draw_panel(pen, TOP_MARGIN, high, "minutes", machines, minutes, colours)
    draw_panel(pen, TOP_MARGIN + high + PANEL_GAP, high, "dollars, on demand", machines, dollars, colours)
    pen.text((WIDTH / 2, HEIGHT - 18), "machines", TEXT_COLOUR, font=load_font(15), anchor="mm")
    image.save(path)


def ticks_from_zero(max_value: float) -> list[float]:
    """Return round values from 0 to the first that is not below `most`, about five of them."""
    step = 10 ** math.floor(math.log10(max_value / 4)) if max_value > 0 else 1.0
    step *= next(one for one in (1, 2, 2.5, 5, 10) if one * step * 5 >= max_value)
    return [step * number for number in range(math.ceil(max_value / step - 1e-9) + 1)]


def draw_panel(
    pen: "ImageDraw", top: float, height: float, title: str, machines: Sequence[float], lines: Mapping[str, Points],
    colours: Mapping[str, str],
) -> None:  # fmt: skip
    """Draw one panel: its frame, grid, lines with their values, and the names of the lines."""
    known = [y for line in lines.values() for _, y in line]
    scale, foot = (
        ticks_from_zero(1.08 * max(known, default=1.0)),
        top + height,
    )  # room for a value above the highest point
    first, last = math.log2(machines[0]), math.log2(machines[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - first) / (last - first) if last > first else 0.5
        across = LEFT_MARGIN + 30 + share * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN - 60)
        return across, foot - height * y / scale[-1]

    for value in scale:
        _, y = place(machines[0], value)
        pen.line([(LEFT_MARGIN, y), (WIDTH - RIGHT_MARGIN, y)], GRID_COLOUR)
        pen.text((LEFT_MARGIN - 10, y), f"{value:g}", TEXT_COLOUR, font=load_font(14), anchor="rm")
    for count in machines:
        x, _ = place(count, 0)
        pen.line([(x, foot), (x, foot + 5)], TEXT_COLOUR)
        pen.text((x, foot + 30), f"{count:g}", TEXT_COLOUR, font=load_font(14), anchor="mm")
    pen.line([(LEFT_MARGIN, top), (LEFT_MARGIN, foot), (WIDTH - RIGHT_MARGIN, foot)], TEXT_COLOUR)
    pen.text(
        (LEFT_MARGIN, top - 14),
        title if known else f"{title}: no price is known",
        TEXT_COLOUR,
        font=load_font(15),
        anchor="lm",
    )
    for line, points in lines.items():
        spots = [place(*one) for one in points]
        if len(spots) > 1:
            pen.line(spots, colours[line], width=3, joint="curve")
        for (x, y), (count, value) in zip(spots, points, strict=True):
            pen.ellipse([x - 5, y - 5, x + 5, y + 5], colours[line])
            others = [one[1] for some in lines.values() for one in some if one[0] == count]
            if value in (max(others), min(others)):  # the outer ones: what stands between would be written over
                low = foot + 15 if y + 26 > foot else y + 16  # not through the axis
                pen.text(
                    (x, low if value < max(others) else y - 15),
                    f"{value:.3g}",
                    colours[line],
                    font=load_font(13),
                    anchor="mm",
                )
    draw_legend(pen, top, {line if lines[line] else f"{line} (unknown price)": colours[line] for line in lines})


def draw_legend(pen: "ImageDraw", top: float, colour_by_name: Mapping[str, str]) -> None:
    """Write the names of the lines in their colours above a panel, to the right."""
    right = float(WIDTH - RIGHT_MARGIN)
    for name, colour in reversed(list(colour_by_name.items())):
        width = pen.textlength(name, font=load_font(14))
        pen.text((right, top - 14), name, colour, font=load_font(14), anchor="rm")
        pen.ellipse([right - width - 16, top - 18, right - width - 8, top - 10], colour)
        right -= width + 34
