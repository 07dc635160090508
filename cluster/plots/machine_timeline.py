"""The chart of a job's machines: what each did over time, losses, attempts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import svg
from .curves import DASHES, Chart, Facts, Key, Points, time_unit
from .palette import COLOURS
from .svg import PAPER, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"training": COLOURS[0], "validating": COLOURS[2], "getting ready": COLOURS[3], "waiting": SOFT}
MOST_BARS = 3000  # of a chart of machines that is drawn a second time for a phone


def machines(one: Facts, name: str) -> Chart | None:
    """Return what each machine did over time, the losses, and where each attempt began."""
    if not any(one["lives"].values()):
        return None
    title = "Machines over time"
    wide = svg.svg(_machines(one, 3.2 * svg.WIDTH, False), f"{name}-machines", title)
    narrow = ""
    if sum(map(len, one["lives"].values())) <= MOST_BARS:
        narrow = svg.svg(_machines(one, svg.WIDTH, True), f"{name}-narrow", title)
    kinds = {kind for some in one["lives"].values() for kind, *_ in some}
    keys = [Key(kind, of, "box") for kind, of in KINDS.items() if kind in kinds]
    keys += [Key("lost", COLOURS[1], "dotted")] if "lost" in kinds else []
    keys += [Key("the loss", COLOURS[1], "cross")] if one["losses"] else []
    keys += [Key("an attempt begins", SOFT, "dashed")] if one["timeline"] else []
    return Chart(title, wide, keys, narrow=narrow)


def _machines(one: Facts, width: float, narrow: bool) -> "Figure":
    names, bars = list(one["lives"]), defaultdict[str, list[tuple[float, float, float]]](list)
    figure, (axes,) = svg.axes(width, 0.95 + 0.3 * min(len(names), 40))
    unit, factor = time_unit(max((end for some in one["lives"].values() for *_, end in some), default=0.0))
    for row, name in enumerate(names):
        for kind, begin, end in joined(one["lives"][name]):
            bars[kind].append((row, begin / factor, end / factor))
    for kind, of in KINDS.items():
        _bars(axes, bars[kind], of)
    for place, begin, end in bars["lost"]:
        axes.plot([begin, end], [place, place], color=COLOURS[1], linestyle=DASHES["dotted"], linewidth=1.6)
    for name, moment in one["losses"]:
        if name in names:
            spot = [moment / factor], [names.index(name)]
            axes.plot(*spot, marker="X", color=COLOURS[1], markeredgecolor=PAPER, markersize=10, zorder=5)
    axes.set(xlabel=unit, ylabel="machine", ylim=(len(names) - 0.4, -0.95))
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.01)
    _attempts(axes, [(row["attempt"], row["seconds"] / factor) for row in one["timeline"]], narrow)
    return figure


def _bars(axes: "Axes", bars: Sequence[tuple[float, float, float]], of: str) -> None:
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
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=of, linewidth=0))
    axes.autoscale_view()


def _attempts(axes: "Axes", begun: Points, narrow: bool) -> None:
    """A line where each attempt began, and its number above, unless it would be written over the one before."""
    last, room = -1e9, (axes.get_xlim()[1] - axes.get_xlim()[0]) * (0.07 if narrow else 0.015)
    for number, moment in begun:
        axes.axvline(moment, color=SOFT, linestyle=DASHES["dashed"], linewidth=1.0)
        if moment - last >= room:
            axes.text(moment, -0.62, f" {number:.0f}", color=SOFT, va="center", fontsize=9.5)
            last = moment


def joined(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return the spans with neighbours of one kind as one."""
    found: list[tuple[str, float, float]] = []
    for kind, begin, end in spans:
        if found and found[-1][0] == kind and begin <= found[-1][2]:
            found[-1] = kind, found[-1][1], end
        else:
            found.append((kind, begin, end))
    return found
