"""The chart of a job's machines: what each did over time, losses, attempts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import svg
from .curves import LINE_STYLES, Chart, JobFacts, LegendEntry, Points, time_unit
from .palette import SERIES_COLOURS
from .svg import MUTED_COLOUR, PAGE_BACKGROUND_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACTIVITY_COLOURS = {
    "training": SERIES_COLOURS[0],
    "validating": SERIES_COLOURS[2],
    "getting ready": SERIES_COLOURS[3],
    "waiting": MUTED_COLOUR,
}
MAX_BARS_FOR_NARROW_CHART = 3000  # of a chart of machines that is drawn a second time for a phone


def machines_chart(facts: JobFacts, name: str) -> Chart | None:
    """Return what each machine did over time, the losses, and where each attempt began."""
    if not any(facts["lives"].values()):
        return None
    title = "Machines over time"
    wide = svg.figure_to_svg(_machines_figure(facts, 3.2 * svg.WIDTH_INCHES, False), f"{name}-machines", title)
    narrow = ""
    if sum(map(len, facts["lives"].values())) <= MAX_BARS_FOR_NARROW_CHART:
        narrow = svg.figure_to_svg(_machines_figure(facts, svg.WIDTH_INCHES, True), f"{name}-narrow", title)
    kinds = {kind for some in facts["lives"].values() for kind, *_ in some}
    keys = [LegendEntry(kind, of, "box") for kind, of in ACTIVITY_COLOURS.items() if kind in kinds]
    keys += [LegendEntry("lost", SERIES_COLOURS[1], "dotted")] if "lost" in kinds else []
    keys += [LegendEntry("the loss", SERIES_COLOURS[1], "cross")] if facts["losses"] else []
    keys += [LegendEntry("an attempt begins", MUTED_COLOUR, "dashed")] if facts["timeline"] else []
    return Chart(title, wide, keys, narrow_svg=narrow)


def _machines_figure(facts: JobFacts, width: float, is_narrow: bool) -> "Figure":
    names, bars = list(facts["lives"]), defaultdict[str, list[tuple[float, float, float]]](list)
    figure, (axes,) = svg.make_axes(width, 0.95 + 0.3 * min(len(names), 40))
    unit, factor = time_unit(max((end for some in facts["lives"].values() for *_, end in some), default=0.0))
    for row, name in enumerate(names):
        for kind, begin, end in merge_adjacent_spans(facts["lives"][name]):
            bars[kind].append((row, begin / factor, end / factor))
    for kind, of in ACTIVITY_COLOURS.items():
        _draw_bars(axes, bars[kind], of)
    for place, begin, end in bars["lost"]:
        axes.plot([begin, end], [place, place], color=SERIES_COLOURS[1], linestyle=LINE_STYLES["dotted"], linewidth=1.6)
    for name, moment in facts["losses"]:
        if name in names:
            spot = [moment / factor], [names.index(name)]
            axes.plot(
                *spot,
                marker="X",
                color=SERIES_COLOURS[1],
                markeredgecolor=PAGE_BACKGROUND_COLOUR,
                markersize=10,
                zorder=5,
            )
    axes.set(xlabel=unit, ylabel="machine", ylim=(len(names) - 0.4, -0.95))
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.01)
    _draw_attempt_starts(axes, [(row["attempt"], row["seconds"] / factor) for row in facts["timeline"]], is_narrow)
    return figure


def _draw_bars(axes: "Axes", bars: Sequence[tuple[float, float, float]], fill_colour: str) -> None:
    """Draw bars (row, begin, end) of one colour as one path: of many machines there are thousands."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        corner
        for row, begin, end in bars
        for corner in ((begin, row - 0.32), (end, row - 0.32), (end, row + 0.32), (begin, row + 0.32), (begin, row))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    if corners:
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=fill_colour, linewidth=0))
    axes.autoscale_view()


def _draw_attempt_starts(axes: "Axes", starts: Points, is_narrow: bool) -> None:
    """A line where each attempt began, and its number above, unless it would be written over the one before."""
    last, room = -1e9, (axes.get_xlim()[1] - axes.get_xlim()[0]) * (0.07 if is_narrow else 0.015)
    for number, moment in starts:
        axes.axvline(moment, color=MUTED_COLOUR, linestyle=LINE_STYLES["dashed"], linewidth=1.0)
        if moment - last >= room:
            axes.text(moment, -0.62, f" {number:.0f}", color=MUTED_COLOUR, va="center", fontsize=9.5)
            last = moment


def merge_adjacent_spans(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return the spans with neighbours of one kind as one."""
    found: list[tuple[str, float, float]] = []
    for kind, begin, end in spans:
        if found and found[-1][0] == kind and begin <= found[-1][2]:
            found[-1] = kind, found[-1][1], end
        else:
            found.append((kind, begin, end))
    return found
