"""Chart of a job's machines over time: the activity of each, losses, and the start of each attempt."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import figures, svg
from .curves import LINE_STYLES, Chart, LegendEntry, Points, time_unit
from .job_facts import Activity, ActivitySpan, JobFacts
from .palette import MUTED_COLOR, PAGE_BACKGROUND_COLOR, SERIES_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bar = tuple[float, float, float]  # row, begin, end

ACTIVITY_COLORS = {
    Activity.TRAINING: SERIES_COLORS[0],
    Activity.VALIDATING: SERIES_COLORS[2],
    Activity.GETTING_READY: SERIES_COLORS[3],
    Activity.WAITING: MUTED_COLOR,
}
LOST_COLOR = SERIES_COLORS[1]
MAX_BARS_FOR_NARROW_CHART = 3000  # above it, the second drawing for phones is left out: it would double the page's size


def machines_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return the chart of what each machine did, or None when no activity is known.

    `name` is the prefix of the SVG ids, unique in the page.
    """
    activity = facts.activity
    if not any(activity.values()):
        return None
    title = "Machines over time"
    wide = svg.figure_to_svg(_machines_figure(facts, 3.2 * figures.WIDTH_INCHES, False), f"{name}-machines", title)
    narrow = ""
    if sum(map(len, activity.values())) <= MAX_BARS_FOR_NARROW_CHART:
        narrow = svg.figure_to_svg(_machines_figure(facts, figures.WIDTH_INCHES, True), f"{name}-narrow", title)
    kinds = {kind for spans in activity.values() for kind, *_ in spans}
    legend = [LegendEntry(kind, color, "box") for kind, color in ACTIVITY_COLORS.items() if kind in kinds]
    if Activity.LOST in kinds:
        legend.append(LegendEntry(Activity.LOST, LOST_COLOR, "dotted"))
    if facts.losses:
        legend.append(LegendEntry("moment of the loss", LOST_COLOR, "cross"))
    if facts.timeline:
        legend.append(LegendEntry("start of an attempt", MUTED_COLOR, "dashed"))
    return Chart(title, wide, legend, narrow_svg=narrow)


def _machines_figure(facts: JobFacts, width: float, is_narrow: bool) -> "Figure":
    names = list(facts.activity)
    figure, (axes,) = figures.make_axes(width, 0.95 + 0.3 * min(len(names), 40))
    end_time = max((end for spans in facts.activity.values() for *_, end in spans), default=0.0)
    unit, seconds_per_unit = time_unit(end_time)
    bars_by_kind = defaultdict[Activity, list[Bar]](list)
    for row, name in enumerate(names):
        for kind, begin, end in merge_adjacent_spans(facts.activity[name]):
            bars_by_kind[kind].append((row, begin / seconds_per_unit, end / seconds_per_unit))
    for kind, color in ACTIVITY_COLORS.items():
        boxes = [(begin, end, row - 0.32, row + 0.32) for row, begin, end in bars_by_kind[kind]]
        figures.draw_boxes(axes, boxes, color)
    lost_lines = [((begin, row), (end, row)) for row, begin, end in bars_by_kind[Activity.LOST]]
    figures.draw_lines(axes, lost_lines, color=LOST_COLOR, linestyle=LINE_STYLES["dotted"], linewidth=1.6)
    losses = [(moment / seconds_per_unit, names.index(name)) for name, moment in facts.losses if name in names]
    if losses:
        axes.plot(
            *zip(*losses, strict=True),
            linestyle="",
            marker="X",
            color=LOST_COLOR,
            markeredgecolor=PAGE_BACKGROUND_COLOR,
            markersize=10,
            zorder=5,
        )
    axes.set(xlabel=unit, ylabel="machine", ylim=(len(names) - 0.4, -0.95))
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.01)
    attempt_starts = [(row.attempt, row.seconds / seconds_per_unit) for row in facts.timeline]
    _draw_attempt_starts(axes, attempt_starts, is_narrow)
    return figure


def _draw_attempt_starts(axes: "Axes", starts: Points, is_narrow: bool) -> None:
    """Draw a line where each attempt started, with its number above unless it would overlap the number before."""
    left, right = axes.get_xlim()
    min_distance = (right - left) * (0.07 if is_narrow else 0.015)
    last_labelled = -1e9
    figures.draw_lines(
        axes,
        [((moment, 0.0), (moment, 1.0)) for _, moment in starts],
        transform=axes.get_xaxis_transform(),
        color=MUTED_COLOR,
        linestyle=LINE_STYLES["dashed"],
        linewidth=1.0,
    )
    for number, moment in starts:
        if moment - last_labelled >= min_distance:
            axes.text(moment, -0.62, f" {number:.0f}", color=MUTED_COLOR, va="center", fontsize=9.5)
            last_labelled = moment


def merge_adjacent_spans(spans: Sequence[ActivitySpan]) -> list[ActivitySpan]:
    """Merge neighboring spans of the same activity."""
    merged: list[ActivitySpan] = []
    for kind, begin, end in spans:
        if merged and merged[-1][0] == kind and begin <= merged[-1][2]:
            merged[-1] = (kind, merged[-1][1], end)
        else:
            merged.append((kind, begin, end))
    return merged
