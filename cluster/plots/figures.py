"""Figures of matplotlib in the style that all plots share, whatever the user's matplotlibrc says."""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs when it builds its font cache
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        rc_params: Any = matplotlib.rcParams  # its type lists the settings of one version of matplotlib only
        rc_params.update(MATPLOTLIB_SETTINGS)
        yield


def make_axes(width: float = WIDTH_INCHES, height: float = HEIGHT_INCHES, rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """Return a figure of `width` x `height` inches and its axes, from top to bottom, which share the x axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, [row[0] for row in grid]


def draw_boxes(axes: "Axes", boxes: Sequence[Box], color: str) -> None:
    """Draw boxes of one color as a single path: a long job has thousands of them."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if boxes:
        corners = [
            corner
            for left, right, bottom, top in boxes
            for corner in ((left, bottom), (right, bottom), (right, top), (left, top), (left, bottom))
        ]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=color, linewidth=0))
    axes.autoscale_view()


def draw_lines(axes: "Axes", lines: Sequence[Line], **style: Any) -> None:  # Any: as matplotlib has it
    """Draw separate straight lines of one style as a single path."""
    if lines:
        xs = [x for line in lines for x in (line[0][0], line[1][0], math.nan)]
        ys = [y for line in lines for y in (line[0][1], line[1][1], math.nan)]
        axes.plot(xs, ys, **style)


def make_pixel_figure(width: int, height: int) -> "Figure":
    """Return an empty figure for a PNG image of this size in pixels."""
    from matplotlib.figure import Figure

    size = (width / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
    return Figure(figsize=size, dpi=PIXELS_PER_INCH, facecolor=BACKGROUND_COLOR)


def font_points(pixels: float) -> float:
    """Return the size of a font in points, of which 72 are an inch."""
    return 72 * pixels / PIXELS_PER_INCH


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG. Raises `OSError`."""
    figure.savefig(path, format="png", facecolor=BACKGROUND_COLOR, metadata={"Software": None})
