"""Charts of the HTML report, drawn with matplotlib from the facts of one job or of several jobs side by side.

`cluster/report/facts.py` collects the facts. A chart of which there is nothing to draw yet is None.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from train.forecast import TermComparison
from train.metrics.text import PART_TITLES

from . import figures, svg
from .job_facts import CurvePoint, JobFacts, StepPoint
from .palette import SERIES_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
Unit = tuple[str, float]  # label of an axis, and how many seconds or images one unit of it is

LINE_STYLES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5))}
LINE_WIDTH = 1.8
MAX_POINTS_WITH_MARKERS = 40
FORECAST_COLOR = SERIES_COLORS[3]
ACTUAL_COLOR = SERIES_COLORS[0]


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend. `symbol` is a line ("solid", "dashed", "dotted"), a "box" or a "cross"."""

    name: str
    color: str
    symbol: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG, with the title, legend and note that the page shows around it.

    `narrow_svg` is a second drawing for narrow screens; it is empty where one drawing fits all screens.
    """

    title: str
    svg: str
    legend: list[LegendEntry] = field(default_factory=list)
    note: str = ""
    narrow_svg: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a chart. A point whose y is NaN interrupts the line."""

    legend_entry: LegendEntry
    points: Points
    is_step_plot: bool = False
    width: float = LINE_WIDTH


def job_color(index: int) -> str:
    """Return the color of the job with this index among those of the page."""
    return SERIES_COLORS[index % len(SERIES_COLORS)]


# --- curves of all jobs ---------------------------------------------------------------------------------------------


def training_charts(all_facts: Sequence[JobFacts]) -> list[Chart]:
    """Return the charts over time and over images, with the curves of all jobs in each. Empty charts are left out."""
    all_points = [point for facts in all_facts for point in (*facts.steps, *facts.epochs)]
    time = time_unit(max((point.seconds for point in all_points), default=0.0))
    images = image_unit(max((point.images for point in all_points), default=0))
    rates = _training_curves(all_facts, lambda point: point.lr, images)
    accuracy_over_time = _accuracy_curves(all_facts, lambda point: point.seconds, time)
    accuracy_over_images = _accuracy_curves(all_facts, lambda point: point.images, images)
    charts = [
        _curve_chart("acc-time", "Accuracy over time", "percent", time, accuracy_over_time),
        _curve_chart("acc-images", "Accuracy over images", "percent", images, accuracy_over_images),
        _curve_chart("loss", "Loss over images", "loss", images, _loss_curves(all_facts, images)),
        _curve_chart("rate", "Learning rate over images", "learning rate", images, rates, y_from_zero=True),
        _size_and_batch_chart(all_facts, images),
        _curve_chart(
            "speed",
            "Images per second over time",
            "images/s",
            time,
            _speed_curves(all_facts, time),
            y_from_zero=True,
        ),
    ]
    return [chart for chart in charts if chart]


def time_unit(max_seconds: float) -> Unit:
    """Return the name of the time unit for an axis up to `max_seconds`, and the number of seconds in it."""
    if max_seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if max_seconds < 4 * 3600 else ("hours", 3600.0)


def image_unit(max_images: float) -> Unit:
    """Return the label of an axis up to `max_images` seen images, and the number of images in one unit of it."""
    if max_images < 5000:
        return "images seen", 1.0
    return ("images seen, thousands", 1e3) if max_images < 5e6 else ("images seen, millions", 1e6)


def _accuracy_curves(
    all_facts: Sequence[JobFacts], x_of_point: Callable[[CurvePoint], float], unit: Unit
) -> list[Curve]:
    curves = []
    for index, facts in enumerate(all_facts):
        top1 = [(x_of_point(epoch) / unit[1], epoch.result.top1) for epoch in facts.epochs]
        top5 = [(x_of_point(epoch) / unit[1], epoch.result.top5) for epoch in facts.epochs]
        for metric_index, (label, style, points) in enumerate((("top-1", "solid", top1), ("top-5", "dashed", top5))):
            color = job_color(metric_index)
            if len(all_facts) > 1:  # the color tells the jobs apart, the style the metrics
                label = f"{facts.job} {label}"
                color = job_color(index)
            curves.append(Curve(LegendEntry(label, color, style), _known(points)))
    return curves


def _known(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Return the points whose y is known."""
    return [(x, y) for x, y in points if y is not None]


def _loss_curves(all_facts: Sequence[JobFacts], unit: Unit) -> list[Curve]:
    curves = []
    for index, facts in enumerate(all_facts):
        prefix = f"{facts.job} " if len(all_facts) > 1 else ""
        validation_color = job_color(index if len(all_facts) > 1 else 1)
        training = _known([(step.images / unit[1], step.loss) for step in facts.steps])
        validation = _known([(epoch.images / unit[1], epoch.result.val_loss) for epoch in facts.epochs])
        curves.append(Curve(LegendEntry(f"{prefix}training", job_color(index)), training))
        curves.append(Curve(LegendEntry(f"{prefix}validation", validation_color, "dashed"), validation))
    return curves


def _training_curves(
    all_facts: Sequence[JobFacts],
    y_of_step: Callable[[StepPoint], float | None],
    unit: Unit,
    is_step_plot: bool = False,
) -> list[Curve]:
    curves = []
    for index, facts in enumerate(all_facts):
        points = _known([(step.images / unit[1], y_of_step(step)) for step in facts.steps])
        # Earlier jobs get wider lines, so that lines which cover each other are all visible.
        width = LINE_WIDTH + 0.9 * min(2, len(all_facts) - 1 - index)
        curves.append(Curve(LegendEntry(facts.job, job_color(index)), points, is_step_plot, width))
    return curves


def _speed_curves(all_facts: Sequence[JobFacts], unit: Unit) -> list[Curve]:
    """Return the curves of images per second, interrupted between attempts, where nothing was trained."""
    curves = []
    for index, facts in enumerate(all_facts):
        points: list[tuple[float, float]] = []
        last_attempt = None
        for step in facts.steps:
            if step.images_per_second is None:
                continue
            if last_attempt not in (None, step.attempt):
                points.append((step.seconds / unit[1], math.nan))
            points.append((step.seconds / unit[1], step.images_per_second))
            last_attempt = step.attempt
        curves.append(Curve(LegendEntry(facts.job, job_color(index)), points))
    return curves


def _curve_chart(
    name: str, title: str, y_label: str, unit: Unit, curves: Sequence[Curve], y_from_zero: bool = False
) -> Chart | None:
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    figure, (axes,) = figures.make_axes()
    _plot_curves(axes, curves)
    axes.set(xlabel=unit[0], ylabel=y_label)
    if y_from_zero:
        axes.set_ylim(bottom=0)
    legend = [curve.legend_entry for curve in curves] if len(curves) > 1 else []
    return Chart(title, svg.figure_to_svg(figure, name, title), legend)


def _plot_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    end = max(x for curve in curves for x, _ in curve.points)
    for curve in curves:
        marked_points = short_piece_ends(curve.points, 0.02 * end)
        if len(curve.points) <= MAX_POINTS_WITH_MARKERS and not curve.is_step_plot:
            marked_points = list(range(len(curve.points)))
        axes.plot(
            [x for x, _ in curve.points],
            [y for _, y in curve.points],
            color=curve.legend_entry.color,
            linestyle=LINE_STYLES[curve.legend_entry.symbol],
            marker="o" if marked_points else "",
            markevery=marked_points or None,
            drawstyle="steps-post" if curve.is_step_plot else "default",
            linewidth=curve.width,
        )
    axes.margins(x=0.02)
    axes.set_xlim(left=0)


def short_piece_ends(points: Points, min_length: float) -> list[int]:
    """Return the index of the last point of each uninterrupted piece of a curve that is shorter than `min_length`.

    These points get a marker, because a very short line is invisible.
    """
    interruptions = [index for index, (_, y) in enumerate(points) if math.isnan(y)]
    pieces = [
        (before + 1, after - 1) for before, after in pairwise([-1, *interruptions, len(points)]) if after - before > 1
    ]
    return [last for first, last in pieces if points[last][0] - points[first][0] < min_length]


def _size_and_batch_chart(all_facts: Sequence[JobFacts], unit: Unit) -> Chart | None:
    """Return the chart of the image size above the global batch."""
    size_curves = _training_curves(all_facts, lambda step: step.image_size, unit, is_step_plot=True)
    size_curves = [curve for curve in size_curves if curve.points]
    batch_curves = _training_curves(all_facts, lambda step: step.global_batch, unit, is_step_plot=True)
    batch_curves = [curve for curve in batch_curves if curve.points]
    if not size_curves and not batch_curves:
        return None
    figure, (upper_axes, lower_axes) = figures.make_axes(rows=2)
    for axes, curves, label in (
        (upper_axes, size_curves, "image size, pixels"),
        (lower_axes, batch_curves, "global batch"),
    ):
        _plot_curves(axes, curves)
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.15 * max(y for curve in curves for _, y in curve.points))
    lower_axes.set_xlabel(unit[0])
    title = "Image size and global batch over images"
    legend = [curve.legend_entry for curve in size_curves] if len(all_facts) > 1 else []
    return Chart(title, svg.figure_to_svg(figure, "sizes", title), legend)


# --- charts of one job ----------------------------------------------------------------------------------------------


def time_breakdown_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return the seconds of each epoch, stacked by part. A run of an old version has only training and validation.

    `name` is the prefix of the SVG ids, unique in the page.
    """
    epochs = [point.result for point in facts.epochs]
    rows = [
        (epoch.epoch, epoch.where or {"steps": epoch.train_seconds, "validation": epoch.val_seconds})
        for epoch in epochs
    ]
    parts = [part for part in PART_TITLES if any(seconds.get(part, 0.0) > 0 for _, seconds in rows)]
    if not rows or not parts:
        return None
    figure, (axes,) = figures.make_axes()
    epoch_numbers = [number for number, _ in rows]
    bottoms = [0.0] * len(rows)
    for part in parts:
        heights = [max(0.0, seconds.get(part, 0.0)) for _, seconds in rows]
        tops = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        boxes = zip(epoch_numbers, bottoms, tops, strict=True)
        figures.draw_boxes(axes, [(x - 0.4, x + 0.4, bottom, top) for x, bottom, top in boxes], _part_color(part))
        bottoms = tops
    axes.set_ylim(bottom=0)
    axes.set(xlabel="epoch", ylabel="seconds")
    axes.grid(visible=False, axis="x")
    axes.locator_params(axis="x", integer=True)
    title = "Time of each epoch by part"
    legend = [LegendEntry(PART_TITLES[part], _part_color(part), "box") for part in parts]
    return Chart(title, svg.figure_to_svg(figure, f"{name}-where", title), legend)


def _part_color(part: str) -> str:
    return SERIES_COLORS[[str(known_part) for known_part in PART_TITLES].index(part)]


def forecast_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return the forecast and the actual time of each term as bars; while the job runs, only the forecast.

    `name` is the prefix of the SVG ids, unique in the page.
    """
    total = next((row for row in facts.forecast_comparison if row.term == "all"), None)
    actual_terms = [row for row in facts.forecast_comparison if row is not total]
    if actual_terms:
        forecast_terms = {row.term: row.forecast for row in actual_terms}
    else:
        all_terms = facts.forecast.terms if facts.forecast else {}
        forecast_terms = {term: seconds for term, seconds in all_terms.items() if seconds}
    if not forecast_terms:
        return None
    figure, (axes,) = figures.make_axes(height=0.8 + 0.42 * len(forecast_terms))
    unit, seconds_per_unit = time_unit(max([*forecast_terms.values(), *(row.actual for row in actual_terms)]))
    for index, seconds in enumerate(forecast_terms.values()):
        _draw_bar(axes, index - 0.2, seconds / seconds_per_unit, FORECAST_COLOR)
    for index, row in enumerate(actual_terms):
        error_text = format_forecast_error(row.actual, row.error)
        _draw_bar(axes, index + 0.2, row.actual / seconds_per_unit, ACTUAL_COLOR, error_text)
    axes.set(xlabel=unit, ylim=(len(forecast_terms) - 0.5, -0.5))
    axes.margins(x=0.26)  # room for the numbers beside the bars
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(forecast_terms)), [*forecast_terms])
    axes.grid(visible=False, axis="y")
    title = "Forecast"
    legend = [LegendEntry("forecast", FORECAST_COLOR, "box")]
    if facts.forecast_comparison:
        title = "Forecast and actual time"
        legend.append(LegendEntry("actual", ACTUAL_COLOR, "box"))
    drawing = svg.figure_to_svg(figure, f"{name}-forecast", title)
    return Chart(title, drawing, legend, _forecast_total_note(facts, total))


def _draw_bar(axes: "Axes", y: float, length: float, fill_color: str, suffix: str = "") -> None:
    axes.barh(y, length, height=0.36, color=fill_color)
    axes.text(length, y, f" {length:.1f}{suffix and ', ' + suffix}", va="center", fontsize=8.5)


def format_forecast_error(actual: float | None, error: float | None) -> str:
    """Return the relative error of a forecast in percent.

    It is empty where nothing is known, and for terms below a second, where a relative error is meaningless.
    """
    return "" if error is None or not actual or actual < 1 else f"{100 * error:+.0f} %"


def _forecast_total_note(facts: JobFacts, total: TermComparison | None) -> str:
    """Return a sentence on the total time, and where the constants of the forecast come from."""
    forecast = facts.forecast
    source_note = f" (constants: {forecast.source})" if forecast and forecast.source else ""
    if not total:
        return f"{forecast.minutes:.3g} minutes in total{source_note}" if forecast else ""
    error_text = format_forecast_error(total.actual, total.error)
    error_note = f" ({error_text})" if error_text else ""
    unit, seconds_per_unit = time_unit(max(total.forecast, total.actual))
    predicted = f"{total.forecast / seconds_per_unit:.1f} {unit}"
    return f"total: forecast {predicted}{source_note}, actual {total.actual / seconds_per_unit:.1f}{error_note}"


def cost_chart(all_facts: Sequence[JobFacts]) -> Chart | None:
    """Return the dollars spent over time, with a curve for each job on rented machines."""
    rented_jobs = [(index, facts) for index, facts in enumerate(all_facts) if facts.cost.over_time]
    if not rented_jobs:
        return None
    unit = time_unit(max(facts.cost.over_time[-1][0] for _, facts in rented_jobs))
    curves = []
    for index, facts in rented_jobs:
        points = [(seconds / unit[1], dollars) for seconds, dollars in facts.cost.over_time]
        curves.append(Curve(LegendEntry(facts.job, job_color(index)), points))
    chart = _curve_chart("dollars", "Cost over time", "dollars", unit, curves, y_from_zero=True)
    note = f"{unit[0]} since the launch of the first machine; machines, disks and addresses"
    return chart and Chart(chart.title, chart.svg, chart.legend, note)
