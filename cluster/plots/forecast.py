"""Plot of a forecast: minutes and dollars against the number of machines, one line for each machine type."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import BadInput

from .figures import font_points, make_pixel_figure, matplotlib_settings, save_png
from .palette import SERIES_COLORS, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Lines = Mapping[str, Points]  # machine type -> points (machines, value)

# Of the image in pixels.
WIDTH = 960
HEIGHT = 800
# Empty parts of the y axis as fractions of the largest value: room for the numbers at the lowest and highest points.
SPACE_BELOW_ZERO = 0.1
SPACE_ABOVE_LINES = 0.14


def draw_forecast(path: Path, title: str, minutes: Lines, dollars: Lines) -> None:
    """Write the plot as PNG: minutes above dollars, over the same numbers of machines on a logarithmic axis.

    Raises `BadInput` when the name of the file does not end in .png, and `OSError`.
    """
    if path.suffix.lower() != ".png":
        raise BadInput(f"--plot {path}: the plot is a PNG image; give a file name that ends in .png")
    with matplotlib_settings():
        save_png(forecast_figure(title, minutes, dollars), path)


def forecast_figure(title: str, minutes: Lines, dollars: Lines) -> "Figure":
    """Return the plot with a panel for the minutes and one for the dollars."""
    figure = make_pixel_figure(WIDTH, HEIGHT)
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.12)
    figure.suptitle(title, x=0.02, ha="left", fontsize=font_points(20))
    upper_axes, lower_axes = figure.subplots(2, 1, sharex=True)
    _draw_panel(upper_axes, "minutes", minutes)
    _draw_panel(lower_axes, "dollars, on demand", dollars)
    machine_counts = sorted({count for points in minutes.values() for count, _ in points})
    lower_axes.set_xscale("log", base=2)
    for axes in (upper_axes, lower_axes):
        axes.set_xticks(machine_counts, [f"{count:g}" for count in machine_counts])
        axes.tick_params(labelbottom=True, labelsize=font_points(14))
        axes.grid(visible=False, axis="x")
    lower_axes.set_xlabel("machines", fontsize=font_points(15))
    return figure


def _draw_panel(axes: "Axes", title: str, lines: Lines) -> None:
    """Draw the lines with their values, and the legend above them."""
    values = [value for points in lines.values() for _, value in points]
    for index, (name, points) in enumerate(lines.items()):
        color = SERIES_COLORS[index % len(SERIES_COLORS)]
        label = name if points else f"{name} (unknown price)"
        counts = [count for count, _ in points]
        axes.plot(counts, [value for _, value in points], color=color, marker="o", markersize=6, label=label)
        for count, value in points:
            values_here = [other for others in lines.values() for machines, other in others if machines == count]
            if value in (min(values_here), max(values_here)):  # numbers between the outer ones would overlap
                _draw_number(axes, (count, value), color, is_above=value == max(values_here))
    largest = max(values, default=1.0)
    axes.set_ylim(-SPACE_BELOW_ZERO * largest, (1 + SPACE_ABOVE_LINES) * largest)
    axes.locator_params(axis="y", nbins=6)
    heading = title if values else f"{title}: no price is known"
    axes.set_title(heading, loc="left", color=TEXT_COLOR, fontsize=font_points(15))
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(lines),
        frameon=False,
        labelcolor="linecolor",
        fontsize=font_points(14),
        borderpad=0.2,
    )


def _draw_number(axes: "Axes", point: tuple[float, float], color: str, is_above: bool) -> None:
    axes.annotate(
        f"{point[1]:.3g}",
        point,
        xytext=(0, 6 if is_above else -6),
        textcoords="offset points",
        ha="center",
        va="bottom" if is_above else "top",
        color=color,
        fontsize=font_points(13),
    )
