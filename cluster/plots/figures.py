"""Figures of matplotlib in the style that all plots share, as PNG files or as SVG elements of an HTML page.

The SVG elements have no fixed size, no style sheet of their own and no external references. Their colors are CSS
variables of the page, so that the same drawing is readable in the light and in the dark scheme.
"""

import contextlib
import io
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

# The first six are distinguishable also by readers who cannot tell red from green.
SERIES_COLORS = (
    *("#1f6fb4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b4fa3", "#444444"),
    *("#c26bb3", "#6f8f00", "#0e9fb5", "#8a5a2b", "#7f93e6", "#1d5c3a"),
)
TEXT_COLOR = "#222222"
MUTED_COLOR = "#5d6670"
GRID_COLOR = "#dddddd"
BACKGROUND_COLOR = "#ffffff"
PAGE_BACKGROUND_COLOR = "#fefefe"  # of the report, in which it is a variable
CSS_VARIABLE_BY_COLOR = {TEXT_COLOR: "ink", GRID_COLOR: "grid", PAGE_BACKGROUND_COLOR: "paper", MUTED_COLOR: "soft"} | {
    color: f"s{index + 1}" for index, color in enumerate(SERIES_COLORS)
}

Box = tuple[float, float, float, float]  # left, right, bottom, top
Point = tuple[float, float]
Line = tuple[Point, Point]

PIXELS_PER_INCH = 128  # of PNG images; a power of two, so that a size in pixels stays exact

# Size of a chart of the report in inches. matplotlib's SVG has 72 units to the inch; on a phone, one is about a pixel.
WIDTH_INCHES = 4.9
HEIGHT_INCHES = 3.0

MATPLOTLIB_SETTINGS: dict[str, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "imgnet-cluster",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": TEXT_COLOR,
    "text.parse_math": False,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED_COLOR,
    "axes.facecolor": "none",
    "axes.formatter.limits": [-4, 6],
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": MUTED_COLOR,
    "axes.labelsize": 10,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": True,
    "axes.ymargin": 0.08,
    "xtick.color": MUTED_COLOR,
    "xtick.labelsize": 9.5,
    "ytick.color": MUTED_COLOR,
    "ytick.labelsize": 9.5,
    "ytick.major.size": 0,
    "grid.color": GRID_COLOR,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@contextlib.contextmanager
def matplotlib_settings() -> Iterator[None]:
    """Draw with the settings above inside this context, whatever the user's matplotlibrc says."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs when it builds its font cache
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        rc_params: Any = matplotlib.rcParams  # its type lists the settings of one version of matplotlib only
        rc_params.update(MATPLOTLIB_SETTINGS)
        yield


def make_axes(width: float = WIDTH_INCHES, height: float = HEIGHT_INCHES, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of `width` x `height` inches and its axes, from top to bottom, which share the x axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, [row[0] for row in grid]


def draw_boxes(axes: Axes, boxes: Sequence[Box], color: str) -> None:
    """Draw boxes of one color as a single path: a long job has thousands of them."""
    if boxes:
        corners = [
            corner
            for left, right, bottom, top in boxes
            for corner in ((left, bottom), (right, bottom), (right, top), (left, top), (left, bottom))
        ]
        codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(boxes)
        axes.add_patch(PathPatch(Outline(corners, codes), facecolor=color, linewidth=0))
    axes.autoscale_view()


def draw_lines(axes: Axes, lines: Sequence[Line], **style: Any) -> None:  # Any: as matplotlib has it
    """Draw separate straight lines of one style as a single path."""
    if lines:
        xs = [x for line in lines for x in (line[0][0], line[1][0], math.nan)]
        ys = [y for line in lines for y in (line[0][1], line[1][1], math.nan)]
        axes.plot(xs, ys, **style)


def make_pixel_figure(width: int, height: int) -> Figure:
    """Return an empty figure for a PNG image of this size in pixels."""
    size = (width / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
    return Figure(figsize=size, dpi=PIXELS_PER_INCH, facecolor=BACKGROUND_COLOR)


def font_points(pixels: float) -> float:
    """Return the size of a font in points, of which 72 are an inch."""
    return 72 * pixels / PIXELS_PER_INCH


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG. Raises `OSError`."""
    figure.savefig(path, format="png", facecolor=BACKGROUND_COLOR, metadata={"Software": None})


def figure_to_svg(figure: Figure, title: str, job: str = "") -> str:
    """Return a figure as an SVG element. Screen readers read `title`; with `job`, it is unique in the page."""
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(output.getvalue())
    id_prefix = re.sub(r"\W+", "-", f"{job} {title} ")  # SVG ids are global in the page
    for element in root.iter():
        element.tag = _local_name(element.tag)
        element[:] = [child for child in element if _local_name(child.tag) not in ("metadata", "style")]
        element.attrib = {
            name: _adapt_attribute(name, value, id_prefix)
            for name, value in ((_local_name(name), value) for name, value in element.attrib.items())
            if name not in ("version", "xmlns", "type")
        }
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(qualified_name: str) -> str:
    return qualified_name.rpartition("}")[2]


def _adapt_attribute(name: str, value: str, id_prefix: str) -> str:
    """Return an attribute as the page needs it: ids that are unique there, CSS colors, short numbers."""
    if name == "id":
        return f"{id_prefix}{value}"
    if name in ("href", "clip-path"):
        return value.replace("#", f"#{id_prefix}")
    if name == "style":
        value = re.sub(r"font:\s*([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"font-family:[^;]*;?\s*", "", value)  # the page sets fonts
        for color, variable in CSS_VARIABLE_BY_COLOR.items():
            value = value.replace(color, f"var(--{variable})")
    elif name in ("d", "x", "y"):  # a path, or a single number: rounded to a tenth of a unit, without needless spaces
        value = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
        value = re.sub(r"\s*([A-Za-z])\s*", r"\1", value.strip())
        value = re.sub(r"M(\S+) (\S+?)L(\S+?) \2L\3 (\S+?)L\1 \4z", r"M\1 \2H\3V\4H\1z", value)  # a rectangle
    return value
