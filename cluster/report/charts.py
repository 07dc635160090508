"""Charts of the report, drawn with matplotlib from the facts of one job or of several jobs side by side.

A chart of which there is nothing to draw yet is None.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from cluster.plots import figures
from cluster.plots.figures import MUTED_COLOR, PAGE_BACKGROUND_COLOR, SERIES_COLORS, figure_to_svg
from cluster.state.states import MachineState
from train.metrics.text import PART_TITLES, three_digits

from .facts import JobFacts
from .tables import format_error

Points = Sequence[tuple[float, float]]
Unit = tuple[str, float]  # label of an axis, and how many seconds or images one unit of it is
Moment = Any  # a StepPoint or EpochRow; in the chart of costs, seconds

LINE_STYLES = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.5))}
LINE_WIDTH = 1.8
MAX_POINTS_WITH_MARKERS = 40
FORECAST_COLOR = SERIES_COLORS[3]
ACTUAL_COLOR = SERIES_COLORS[0]
STATE_COLORS = {
    MachineState.TRAINING: SERIES_COLORS[0],
    MachineState.VALIDATING: SERIES_COLORS[2],
    MachineState.SETUP: SERIES_COLORS[3],
    MachineState.WAITING: MUTED_COLOR,
}
LOST_COLOR = SERIES_COLORS[1]
MACHINES_WIDTH_INCHES = 3.2 * figures.WIDTH_INCHES


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend. `symbol` is a line ("solid", "dashed", "dotted"), a "box" or a "cross"."""

    name: str
    color: str
    symbol: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG, "" for none, with the title, legend and note that the page shows around it."""

    title: str
    svg: str
    legend: Sequence[LegendEntry] = ()
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line of a chart for each job: what was measured, and when. A value that is NaN interrupts the line."""

    name: str
    values: Callable[[JobFacts], Iterable[tuple[Moment, float | None]]]
    symbol: str = "solid"


Curve = tuple[LegendEntry, Points, float]  # a line of a chart, with its width
TOP1 = Series("top-1", lambda facts: ((epoch, epoch.top1) for epoch in facts.epochs))
TOP5 = Series("top-5", lambda facts: ((epoch, epoch.top5) for epoch in facts.epochs), "dashed")
TRAINING_LOSS = Series("training", lambda facts: ((step, step.loss) for step in facts.steps))
VALIDATION_LOSS = Series("validation", lambda facts: ((epoch, epoch.val_loss) for epoch in facts.epochs), "dashed")
LEARNING_RATE = Series("", lambda facts: ((step, step.lr) for step in facts.steps))
IMAGE_SIZE = Series("", lambda facts: ((step, step.image_size) for step in facts.steps))
GLOBAL_BATCH = Series("", lambda facts: ((step, step.global_batch) for step in facts.steps))
COST = Series("", lambda facts: facts.dollars_over_time)


def _speeds(facts: JobFacts) -> Iterable[tuple[Moment, float]]:
    """Yield the images per second, interrupted between attempts, where nothing was trained."""
    for index, step in enumerate(facts.steps):
        if index and facts.steps[index - 1].attempt != step.attempt:
            yield step, math.nan
        yield step, step.images_per_second


# --- curves of all jobs ---------------------------------------------------------------------------------------------


def training_charts(all_facts: Sequence[JobFacts]) -> list[Chart]:
    """Return the charts over time and over images, with the curves of all jobs in each. Empty charts are left out."""
    moments: list[Moment] = [moment for facts in all_facts for moment in (*facts.steps, *facts.epochs)]
    time = time_unit(max((moment.time for moment in moments), default=0.0))
    images = image_unit(max((moment.images for moment in moments), default=0))

    def over_time(*series: Series) -> list[Curve]:
        return _curves(all_facts, series, lambda moment: moment.time / time[1])

    def over_images(*series: Series) -> list[Curve]:
        return _curves(all_facts, series, lambda moment: moment.images / images[1])

    sizes = {"image size, pixels": over_images(IMAGE_SIZE), "global batch": over_images(GLOBAL_BATCH)}
    charts = [
        _curve_chart("Accuracy over time", time[0], {"percent": over_time(TOP1, TOP5)}),
        _curve_chart("Accuracy over images", images[0], {"percent": over_images(TOP1, TOP5)}),
        _curve_chart("Loss over images", images[0], {"loss": over_images(TRAINING_LOSS, VALIDATION_LOSS)}),
        _curve_chart("Learning rate over images", images[0], {"learning rate": over_images(LEARNING_RATE)}, bottom=0),
        _curve_chart("Image size and global batch over images", images[0], sizes, bottom=0, style="steps-post"),
        _curve_chart("Images per second over time", time[0], {"images/s": over_time(Series("", _speeds))}, bottom=0),
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


def _curves(all_facts: Sequence[JobFacts], all_series: Sequence[Series], x: Callable[[Moment], float]) -> list[Curve]:
    """Return the lines with at least one point. Each job has a color; with one job only, each series has one."""
    has_several_jobs = len(all_facts) > 1
    curves: list[Curve] = []
    for index, facts in enumerate(all_facts):
        for number, series in enumerate(all_series):
            points = [(x(moment), value) for moment, value in series.values(facts) if value is not None]
            name = f"{facts.job} {series.name}".strip() if has_several_jobs else series.name
            color = SERIES_COLORS[(index if has_several_jobs else number) % len(SERIES_COLORS)]
            # Earlier jobs get wider lines, so that lines which cover each other are all visible.
            width = LINE_WIDTH + 0.9 * min(2, len(all_facts) - 1 - index)
            if not all(math.isnan(y) for _, y in points):
                curves.append((LegendEntry(name, color, series.symbol), points, width))
    return curves


def _curve_chart(
    title: str,
    x_label: str,
    curves_by_label: dict[str, list[Curve]],
    bottom: float | None = None,
    style: str = "default",
    note: str = "",
) -> Chart | None:
    """Return a chart with a panel for each label of a y axis. `bottom` is where these axes begin."""
    panels = {label: curves for label, curves in curves_by_label.items() if curves}
    if not panels:
        return None
    figure, all_axes = figures.make_axes(rows=len(panels))
    for axes, (label, curves) in zip(all_axes, panels.items(), strict=True):
        for entry, points, width in curves:
            has_markers = len(points) <= MAX_POINTS_WITH_MARKERS and style == "default"
            axes.plot(
                *zip(*points, strict=True),
                color=entry.color,
                linestyle=LINE_STYLES[entry.symbol],
                marker="o" if has_markers else "",
                drawstyle=style,
                linewidth=width,
            )
        axes.margins(x=0.02)
        axes.set_xlim(left=0)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=bottom)
    all_axes[-1].set_xlabel(x_label)
    legend = [entry for entry, *_ in curves] if len(curves) > 1 else []
    return Chart(title, figure_to_svg(figure, title), legend, note)


def cost_chart(all_facts: Sequence[JobFacts]) -> Chart | None:
    """Return the dollars spent over time, with a curve for each job on rented machines."""
    unit, seconds_per_unit = time_unit(
        max(seconds for facts in all_facts for seconds, _ in (*facts.dollars_over_time, (0, 0)))
    )
    curves = _curves(all_facts, (COST,), lambda seconds: seconds / seconds_per_unit)
    note = f"{unit} since the launch of the first machine"
    return _curve_chart("Cost over time", unit, {"dollars": curves}, bottom=0, note=note)


# --- charts of one job ----------------------------------------------------------------------------------------------


def time_breakdown_chart(facts: JobFacts) -> Chart | None:
    """Return the seconds of each epoch, stacked by part."""
    epochs = [epoch for epoch in facts.epochs if epoch.where]
    colors = dict(zip(PART_TITLES, SERIES_COLORS, strict=False))
    parts = [part for part in PART_TITLES if any(epoch.where.get(part, 0.0) > 0 for epoch in epochs)]
    if not parts:
        return None
    figure, (axes,) = figures.make_axes()
    bottoms = [0.0] * len(epochs)
    for part in parts:
        tops = [bottom + max(0.0, epoch.where.get(part, 0.0)) for bottom, epoch in zip(bottoms, epochs, strict=True)]
        boxes = [
            (epoch.epoch - 0.4, epoch.epoch + 0.4, bottom, top)
            for epoch, bottom, top in zip(epochs, bottoms, tops, strict=True)
        ]
        figures.draw_boxes(axes, boxes, colors[part])
        bottoms = tops
    axes.set_ylim(bottom=0)
    axes.set(xlabel="epoch", ylabel="seconds")
    axes.grid(visible=False, axis="x")
    axes.locator_params(axis="x", integer=True)
    title = "Time of each epoch by part"
    legend = [LegendEntry(PART_TITLES[part], colors[part], "box") for part in parts]
    return Chart(title, figure_to_svg(figure, title, facts.job), legend)


def forecast_chart(facts: JobFacts) -> Chart | None:
    """Return forecast and actual time of each term as bars, as far as known; without terms only a note."""
    compared = [row for row in facts.forecast_comparison if row.term != "all"]
    terms = {row.term: row.forecast for row in compared}
    if not compared and facts.forecast:
        terms = {term: seconds for term, seconds in facts.forecast.terms.items() if seconds}
    title = "Forecast and actual time" if compared else "Forecast"
    note = forecast_note(facts)
    if not terms:
        return Chart(title, "", note=note) if note else None
    figure, (axes,) = figures.make_axes(height=0.8 + 0.42 * len(terms))
    unit, seconds_per_unit = time_unit(max([*terms.values(), *(row.actual for row in compared)]))
    for index, seconds in enumerate(terms.values()):
        _draw_bar(axes, index - 0.2, seconds / seconds_per_unit, FORECAST_COLOR)
    for index, row in enumerate(compared):
        _draw_bar(axes, index + 0.2, row.actual / seconds_per_unit, ACTUAL_COLOR, format_error(row))
    axes.set(xlabel=unit, ylim=(len(terms) - 0.5, -0.5))
    axes.margins(x=0.26)  # room for the numbers beside the bars
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(terms)), [*terms])
    axes.grid(visible=False, axis="y")
    legend = [LegendEntry("forecast", FORECAST_COLOR, "box"), LegendEntry("actual", ACTUAL_COLOR, "box")]
    return Chart(title, figure_to_svg(figure, title, facts.job), legend if compared else legend[:1], note)


def _draw_bar(axes: Axes, y: float, length: float, fill_color: str, suffix: str = "") -> None:
    axes.barh(y, length, height=0.36, color=fill_color)
    axes.text(length, y, f" {length:.1f}{suffix and ', ' + suffix}", va="center", fontsize=8.5)


def forecast_note(facts: JobFacts) -> str:
    """Return a sentence on the total time, and where the constants of the forecast come from."""
    forecast = facts.forecast
    source_note = f" (constants: {forecast.source})" if forecast and forecast.source else ""
    total = next((row for row in facts.forecast_comparison if row.term == "all"), None)
    if not total:
        return f"{three_digits(forecast.minutes)} minutes in total{source_note}" if forecast else ""
    unit, seconds_per_unit = time_unit(max(total.forecast, total.actual))
    predicted, actual = total.forecast / seconds_per_unit, total.actual / seconds_per_unit
    error_note = f" ({error})" if (error := format_error(total)) else ""
    return f"total: forecast {predicted:.1f} {unit}{source_note}, actual {actual:.1f}{error_note}"


def machines_chart(facts: JobFacts) -> Chart | None:
    """Return the chart of what each machine did, or None when no activity is known."""
    if not any(facts.activity.values()):
        return None
    names = list(facts.activity)
    figure, (axes,) = figures.make_axes(MACHINES_WIDTH_INCHES, 0.95 + 0.3 * min(len(names), 40))
    end_time = max(end for spans in facts.activity.values() for *_, end in spans)
    unit, seconds_per_unit = time_unit(end_time)
    spans_by_state = defaultdict[MachineState, list[tuple[int, float, float]]](list)  # row, begin, end
    for row, name in enumerate(names):
        for state, begin, end in facts.activity[name]:
            spans_by_state[state].append((row, begin / seconds_per_unit, end / seconds_per_unit))
    for state, color in STATE_COLORS.items():
        boxes = [(begin, end, row - 0.32, row + 0.32) for row, begin, end in spans_by_state[state]]
        figures.draw_boxes(axes, boxes, color)
    lost_lines = [((begin, row), (end, row)) for row, begin, end in spans_by_state[MachineState.LOST]]
    figures.draw_lines(axes, lost_lines, color=LOST_COLOR, linestyle=LINE_STYLES["dotted"], linewidth=1.6)
    losses = [(moment / seconds_per_unit, names.index(name)) for name, moment in facts.losses if name in names]
    if losses:
        cross: dict[str, Any] = {"markersize": 10, "markeredgecolor": PAGE_BACKGROUND_COLOR, "zorder": 5}
        axes.plot(*zip(*losses, strict=True), "X", color=LOST_COLOR, **cross)
    axes.set(xlabel=unit, ylabel="machine", ylim=(len(names) - 0.4, -0.95))
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.01)
    starts = [(row.attempt, row.at / seconds_per_unit) for row in facts.timeline if row.machines]
    figures.draw_lines(
        axes,
        [((moment, 0.0), (moment, 1.0)) for _, moment in starts],
        transform=axes.get_xaxis_transform(),
        color=MUTED_COLOR,
        linestyle=LINE_STYLES["dashed"],
        linewidth=1.0,
    )
    last_labelled = -end_time
    for number, moment in starts:
        if moment - last_labelled >= 0.015 * end_time / seconds_per_unit:  # else it would overlap the number before
            axes.text(moment, -0.62, f" {number}", color=MUTED_COLOR, va="center", fontsize=9.5)
            last_labelled = moment
    legend = [LegendEntry(state, color, "box") for state, color in STATE_COLORS.items() if spans_by_state[state]]
    if spans_by_state[MachineState.LOST]:
        legend.append(LegendEntry(MachineState.LOST, LOST_COLOR, "dotted"))
    if losses:
        legend.append(LegendEntry("moment of the loss", LOST_COLOR, "cross"))
    if starts:
        legend.append(LegendEntry("start of an attempt", MUTED_COLOR, "dashed"))
    title = "Machines over time"
    return Chart(title, figure_to_svg(figure, title, facts.job), legend)
