"""Picture of an experiment: one dot for each run, and the training accuracy over epochs as bands."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.plots.figures import (
    BACKGROUND_COLOR,
    SERIES_COLORS,
    font_points,
    make_pixel_figure,
    matplotlib_settings,
    save_png,
)
from experiments.harness.claims import Experiment
from experiments.harness.confidence import ResultRows, RowsByArm, accuracies, accuracy, mean_with_deviation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lengths in pixels.
WIDTH = 960
LEFT_MARGIN = 260  # for the names of the arms
RIGHT_MARGIN = 170  # for their mean accuracies
TOP_MARGIN = 80
ROW_HEIGHT = 34  # of an arm in the upper panel
PANEL_GAP = 96
CURVES_HEIGHT = 300
CURVES_LEFT_MARGIN = 80
CURVES_RIGHT_MARGIN = 40
FOOTER_HEIGHT = 60

BAND_ALPHA = 0.2  # opacity
ArmRows = Sequence[tuple[str, ResultRows]]


def draw_experiment(path: Path, experiment: Experiment, rows: RowsByArm) -> None:
    """Write the picture as PNG. Arms without runs are left out."""
    arms = [(arm.name, rows[arm.name]) for arm in experiment.arms if rows.get(arm.name)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib_settings():
        save_png(experiment_figure(experiment.title, arms), path)


def experiment_figure(title: str, arms: ArmRows) -> "Figure":
    """Return the picture with its two panels."""
    rows_height = ROW_HEIGHT * len(arms)
    curves_top = TOP_MARGIN + rows_height + PANEL_GAP
    height = curves_top + CURVES_HEIGHT + FOOTER_HEIGHT
    figure = make_pixel_figure(WIDTH, height)

    def add_axes(left: int, top: int, right_margin: int, panel_height: int) -> "Axes":
        width = WIDTH - left - right_margin
        box = (left / WIDTH, 1 - (top + panel_height) / height, width / WIDTH, panel_height / height)
        axes = figure.add_axes(box)
        axes.tick_params(labelsize=font_points(13), length=0)
        return axes

    figure.text(30 / WIDTH, 1 - 20 / height, title, va="top", fontsize=font_points(19))
    draw_dots(add_axes(LEFT_MARGIN, TOP_MARGIN, RIGHT_MARGIN, rows_height), arms)
    if any(row["train_top1"] for _, rows in arms for row in rows):
        draw_curves(add_axes(CURVES_LEFT_MARGIN, curves_top, CURVES_RIGHT_MARGIN, CURVES_HEIGHT), arms)
    return figure


def _arm_color(index: int) -> str:
    return SERIES_COLORS[index % len(SERIES_COLORS)]


def draw_dots(axes: "Axes", arms: ArmRows) -> None:
    """Draw a row for each arm: a dot for each run, the mean, and a band of one standard deviation on both sides.

    Runs that diverged are hollow dots. The axis ends at the ticks around the dots, and cuts wider bands.
    """
    for index, (_, rows) in enumerate(arms):
        color = _arm_color(index)
        fills = [BACKGROUND_COLOR if row["diverged"] else color for row in rows]
        axes.scatter([accuracy(row) for row in rows], [index] * len(rows), c=fills, edgecolors=color, s=22, zorder=3)
    axes.set_xlim(_round_limits([value for _, rows in arms for value in accuracies(rows)]))
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    for index, (_, rows) in enumerate(arms):
        color = _arm_color(index)
        arm_values = accuracies(rows)
        mean = statistics.mean(arm_values)
        if len(arm_values) > 1:
            deviation = statistics.stdev(arm_values)
            axes.barh(index, 2 * deviation, 0.53, mean - deviation, color=color, alpha=BAND_ALPHA)
        axes.plot([mean, mean], [index - 0.32, index + 0.32], color=color, linewidth=1.8)
        summary = mean_with_deviation(arm_values)
        beside_axes = axes.get_yaxis_transform()  # x in fractions of the axes
        text_style: dict[str, Any] = {"color": color, "va": "center", "transform": beside_axes}
        axes.text(1.03, index, summary, fontsize=font_points(14), **text_style)
        axes.text(-0.03, index, arms[index][0], fontsize=font_points(15), ha="right", **text_style)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines.bottom.set_visible(False)
    axes.set_xlabel("top-1 %, one dot for each run", fontsize=font_points(14))


def _round_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the outer ones of about five round values around some values."""
    from matplotlib.ticker import MaxNLocator

    low = min(values)
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, max(low + 1e-3, *values))
    return float(ticks[0]), float(ticks[-1])


def draw_curves(axes: "Axes", arms: ArmRows) -> None:
    """Draw the training accuracy over epochs: the mean of an arm's runs, and one standard deviation as a band."""
    curves = [_mean_curve(rows) for _, rows in arms]
    for index, curve in enumerate(curves):
        if len(curve) < 2:
            continue
        epochs = range(1, len(curve) + 1)
        lower, upper = ([mean + sign * deviation for mean, deviation in curve] for sign in (-1, 1))
        axes.fill_between(epochs, lower, upper, color=_arm_color(index), alpha=BAND_ALPHA, linewidth=0)
        axes.plot(epochs, [mean for mean, _ in curve], color=_arm_color(index), linewidth=1.8)
    bounds = [bound for curve in curves for mean, deviation in curve for bound in (mean - deviation, mean + deviation)]
    axes.set_ylim(_round_limits([min(100.0, max(0.0, bound)) for bound in bounds]))
    axes.set_xlim(1, max(2, *map(len, curves)))
    axes.locator_params(axis="x", integer=True, nbins=11)
    axes.grid(visible=False, axis="x")
    axes.set_title("top-1 % in training, over epochs", loc="left", fontsize=font_points(14))


def _mean_curve(rows: ResultRows) -> list[tuple[float, float]]:
    """Return mean and standard deviation of the training accuracy at each epoch that all runs have reached."""
    values_by_epoch = zip(*(row["train_top1"] for row in rows), strict=False)
    return [
        (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0) for values in values_by_epoch
    ]
