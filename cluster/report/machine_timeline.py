"""Chart of a job's machines over time: the activity of each, losses, and the start of each attempt."""

from collections import defaultdict
from collections.abc import Sequence

from cluster.plots import figures
from cluster.plots.figures import MUTED_COLOR, PAGE_BACKGROUND_COLOR, SERIES_COLORS

from .activity import Activity, ActivitySpan
from .charts import LINE_STYLES, Chart, LegendEntry, time_unit
from .facts import JobFacts
from .svg import figure_to_svg

ACTIVITY_COLORS = {
    Activity.TRAINING: SERIES_COLORS[0],
    Activity.VALIDATING: SERIES_COLORS[2],
    Activity.GETTING_READY: SERIES_COLORS[3],
    Activity.WAITING: MUTED_COLOR,
}
LOST_COLOR = SERIES_COLORS[1]
WIDTH_INCHES = 3.2 * figures.WIDTH_INCHES


def machines_chart(facts: JobFacts) -> Chart | None:
    """Return the chart of what each machine did, or None when no activity is known."""
    if not any(facts.activity.values()):
        return None
    names = list(facts.activity)
    figure, (axes,) = figures.make_axes(WIDTH_INCHES, 0.95 + 0.3 * min(len(names), 40))
    end_time = max(end for spans in facts.activity.values() for *_, end in spans)
    unit, seconds_per_unit = time_unit(end_time)
    spans_by_kind = defaultdict[Activity, list[tuple[int, float, float]]](list)  # row, begin, end
    for row, name in enumerate(names):
        for kind, begin, end in merge_adjacent_spans(facts.activity[name]):
            spans_by_kind[kind].append((row, begin / seconds_per_unit, end / seconds_per_unit))
    for kind, color in ACTIVITY_COLORS.items():
        boxes = [(begin, end, row - 0.32, row + 0.32) for row, begin, end in spans_by_kind[kind]]
        figures.draw_boxes(axes, boxes, color)
    lost_lines = [((begin, row), (end, row)) for row, begin, end in spans_by_kind[Activity.LOST]]
    figures.draw_lines(axes, lost_lines, color=LOST_COLOR, linestyle=LINE_STYLES["dotted"], linewidth=1.6)
    losses = [(moment / seconds_per_unit, names.index(name)) for name, moment in facts.losses if name in names]
    axes.plot(
        [moment for moment, _ in losses],
        [row for _, row in losses],
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
    kinds = {kind for kind, spans in spans_by_kind.items() if spans}
    legend = [LegendEntry(kind, color, "box") for kind, color in ACTIVITY_COLORS.items() if kind in kinds]
    if Activity.LOST in kinds:
        legend.append(LegendEntry(Activity.LOST, LOST_COLOR, "dotted"))
    if losses:
        legend.append(LegendEntry("moment of the loss", LOST_COLOR, "cross"))
    if starts:
        legend.append(LegendEntry("start of an attempt", MUTED_COLOR, "dashed"))
    title = "Machines over time"
    return Chart(title, figure_to_svg(figure, title, facts.job), legend)


def merge_adjacent_spans(spans: Sequence[ActivitySpan]) -> list[ActivitySpan]:
    """Merge neighboring spans of the same activity."""
    merged: list[ActivitySpan] = []
    for kind, begin, end in spans:
        if merged and merged[-1][0] == kind and begin <= merged[-1][2]:
            merged[-1] = (kind, merged[-1][1], end)
        else:
            merged.append((kind, begin, end))
    return merged
